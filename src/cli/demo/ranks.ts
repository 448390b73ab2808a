import { setTimeout as sleep } from "node:timers/promises";
import { processesTagged, signalProcess } from "../../os/process.ts";
import { DEMO_POLL_MS, DEMO_STOP_MS } from "../../protocol/limits.ts";

/** Environment variable by which a demo knows what it started, also what its agents and shims did. */
export const TAG = "LLMGW_DEMO";

const tagged = (tag: string): Promise<number[]> => processesTagged(`${TAG}=${tag}`);

/**
 * Ends what outlives an agent by design: the shims, each of which stops its engine. Whoever does not end in time is
 * killed. Returns when nothing of the demo runs.
 */
export async function endRanks(tag: string): Promise<void> {
  let left = await tagged(tag);
  for (const pid of left) signalProcess(pid, "SIGTERM", "leader");
  const end_ms = performance.now() + DEMO_STOP_MS;
  while (left.length > 0) {
    await sleep(DEMO_POLL_MS);
    left = await tagged(tag);
    if (performance.now() > end_ms) for (const pid of left) signalProcess(pid, "SIGKILL", "leader");
  }
}

/** Kills everything of the demo at once. */
export async function killRanks(tag: string): Promise<void> {
  for (const pid of await tagged(tag)) signalProcess(pid, "SIGKILL", "leader");
}
