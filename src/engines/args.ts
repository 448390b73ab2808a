import type { Args } from "../protocol/catalog.ts";
import { OperatorError } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";

/**
 * The catalog's `args` as engine arguments: `--name value`, a bare `--name` for true, nothing for false.
 * @param owned flags llmgw sets itself, with dashes
 * @throws OperatorError E_ENGINE naming the flag that is llmgw's own
 */
export function argsOf(kind: EngineKind, args: Args, owned: readonly string[]): string[] {
  return Object.entries(args).flatMap(([name, value]) => {
    const flag = `--${name}`;
    if (owned.includes(flag)) {
      throw new OperatorError(
        "E_ENGINE",
        `args of the catalog may not set ${flag} of ${kind}`,
        "llmgw sets it itself",
        `take ${name} out of args`,
      );
    }
    if (value === false) return [];
    return value === true ? [flag] : [flag, String(value)];
  });
}
