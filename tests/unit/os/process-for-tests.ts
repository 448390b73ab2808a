/** What tests of processes share. */
import { setTimeout as sleep } from "node:timers/promises";
import { isAlive } from "../../../src/os/process.ts";

/** Whether a process, which need not be our child, is gone within a time. */
export async function waitGone(pid: number, deadline_ms: number): Promise<boolean> {
  const end_ms = performance.now() + deadline_ms;
  while (isAlive(pid)) {
    if (performance.now() > end_ms) return false;
    await sleep(20);
  }
  return true;
}
