import { OperatorError } from "../protocol/errors.ts";

const UNITS: Readonly<Record<string, number>> = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000 };

/**
 * Reads a length of time: `90s`, `5m`, `1h`, `250ms`; a number alone is seconds.
 * @returns milliseconds
 * @throws OperatorError E_USAGE
 */
export function duration(flag: string, text: string): number {
  const [, digits, unit = "s"] = /^(\d+(?:\.\d+)?)(ms|s|m|h)?$/.exec(text) ?? [];
  const length_ms = digits === undefined ? Number.NaN : Number(digits) * (UNITS[unit] ?? Number.NaN);
  // setTimeout's own limit; a longer one would end at once.
  if (Number.isFinite(length_ms) && length_ms < 2 ** 31) return Math.round(length_ms);
  throw new OperatorError("E_USAGE", `--${flag} cannot be "${text}"`, "it is a length of time below 24 days", `--${flag} 60s, 5m or 1h`);
}
