import type { Vitals } from "../engines/engine.ts";
import { processorTimeOf_ms } from "../os/process.ts";
import { ENGINE_WORKS_SHARE, VITALS_INTERVAL_MS } from "../protocol/limits.ts";
import { afterLook, alive } from "./liveness.ts";

/** What of a rank shows whether its engine gets on. */
interface WatchedRank {
  readonly vitals: Vitals;
  /** Bound of the time in which it owes answers and gets on with none, in ms. */
  readonly stuck_ms: number;
  /** The engine's session where the processor does its work; null where GPUs do. */
  readonly session: number | null;
  isReady(): boolean;
  /** How many answers it owes. */
  owed(): number;
  /** Status and body of a GET; status 0 when nothing answered. */
  ask(path: string): Promise<readonly [number, string]>;
  /** Called once, when its metrics prove nothing. */
  cannotTell(status: number): void;
}

/** Resolves, with the reason in words, when a ready engine has owed answers for too long without getting on with any; else never. */
export async function watchVitals(rank: WatchedRank): Promise<string> {
  const { vitals, stuck_ms, session } = rank;
  const interval_ms = Math.min(VITALS_INTERVAL_MS, stuck_ms / 4);
  let liveness = alive(performance.now());
  let used_ms = 0;
  let told = false;
  for (;;) {
    await Bun.sleep(interval_ms);
    if (!rank.isReady()) continue;
    const owed = rank.owed();
    const [status, metrics] = owed > 0 ? await rank.ask(vitals.path) : [0, ""];
    const mark = status === 200 ? vitals.read(metrics) : null;
    // Metrics under other names than these are no sign of anything.
    const unknown = status !== 0 && mark === null;
    if (unknown && !told) rank.cannotTell(status);
    told ||= unknown;
    const now_ms = performance.now();
    const used = owed > 0 && session !== null ? await processorTimeOf_ms(session) : used_ms;
    const works = used > used_ms && used - used_ms >= ENGINE_WORKS_SHARE * (now_ms - liveness.at_ms);
    used_ms = used;
    liveness = afterLook(liveness, { at_ms: now_ms, owed, mark, busy: unknown || works });
    if (liveness.still_ms < stuck_ms) continue;
    const requests = `${owed} request${owed === 1 ? "" : "s"} in flight`;
    return `the engine is stuck: ${requests}, and no token or step in ${Math.round(liveness.still_ms / 1_000)} s`;
  }
}
