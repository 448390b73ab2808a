import { PROBE_MS, VITALS_INTERVAL_MS } from "../protocol/limits.ts";

/** One look at a ready engine. */
export interface Look {
  readonly at_ms: number;
  /** Requests whose next byte the engine owes; none that waits for its client. */
  readonly owed: number;
  /** The engine's metrics that move while it works; null when it did not tell. */
  readonly mark: string | null;
  /** A rank without GPUs that uses the processor works, whatever its metrics say. */
  readonly busy: boolean;
}

/** What is remembered from one look to the next. */
interface Liveness {
  readonly at_ms: number;
  readonly mark: string | null;
  /** How long the engine has owed answers without getting on, in all. Time in which it owed nothing does not count, nor does it end it. */
  readonly still_ms: number;
}

/** Longest time between two looks that is counted: more of it was not the engine's but the machine's. */
const LONGEST_MS = 2 * (PROBE_MS + VITALS_INTERVAL_MS);

/** What is known of an engine that has just become ready. */
export const alive = (now_ms: number): Liveness => ({ at_ms: now_ms, mark: null, still_ms: 0 });

/** What a look adds. An engine is stuck once `still_ms` has reached its bound. */
export function afterLook(before: Liveness, { at_ms, owed, mark, busy }: Look): Liveness {
  const moved = mark !== null && mark !== before.mark;
  const known = mark ?? before.mark;
  if (moved || busy) return { at_ms, mark: known, still_ms: 0 };
  const passed_ms = Math.min(Math.max(0, at_ms - before.at_ms), LONGEST_MS);
  return { at_ms, mark: known, still_ms: before.still_ms + (owed > 0 ? passed_ms : 0) };
}
