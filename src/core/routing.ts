import type { Target } from "../protocol/gateway-api.ts";

/** What the gateway itself has counted of one target. */
export interface TargetState {
  readonly in_flight: number;
  /** Failures in a row. */
  readonly failures: number;
  /** Not chosen before this time while others can be; 0 = may be chosen. */
  readonly ejected_until_ms: number;
}

export const FRESH_TARGET: TargetState = { in_flight: 0, failures: 0, ejected_until_ms: 0 };

/**
 * Chooses where a request goes: the ready target with the fewest requests in flight, in turn among equals. A target that
 * failed lately stays out of it, however empty it is, unless all have: then none is worse than another.
 * @param tried attempts this request has been to already
 * @param tick rises with each choice
 */
export function chooseTarget(
  targets: readonly Target[],
  stateOf: (target: Target) => TargetState,
  tried: ReadonlySet<string>,
  tick: number,
  now_ms: number,
): Target | null {
  const open = targets.filter((target) => target.state === "ready" && !tried.has(target.attempt));
  const well = open.filter((target) => stateOf(target).ejected_until_ms <= now_ms);
  const among = well.length > 0 ? well : open;
  const least = Math.min(...among.map((target) => stateOf(target).in_flight));
  const best = among.filter((target) => stateOf(target).in_flight === least);
  return best[tick % best.length] ?? null;
}

/** First time a failing target is left out, in ms; doubled with each failure in a row. */
const EJECT_FIRST_MS = 500;
const EJECT_MAX_MS = 30_000;

/** The state of a target after a request to it failed. */
export function afterFailure(state: TargetState, now_ms: number): TargetState {
  const failures = state.failures + 1;
  const out_ms = Math.min(EJECT_MAX_MS, EJECT_FIRST_MS * 2 ** Math.min(failures - 1, 20));
  return { ...state, failures, ejected_until_ms: now_ms + out_ms };
}

/** The state of a target after it answered. */
export function afterAnswer(state: TargetState): TargetState {
  return { ...state, failures: 0, ejected_until_ms: 0 };
}
