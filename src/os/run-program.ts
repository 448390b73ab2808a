import { PROGRAM_OUTPUT_MS } from "../protocol/limits.ts";
import { signalProcess, spawnSession } from "./process.ts";

/** How a program ended and what it printed. */
export interface Ran {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly out: string;
  readonly err: string;
  /** It was killed because its time was up. */
  readonly late: boolean;
}

/** Bounds of one run. */
interface RunBounds {
  readonly env: NodeJS.ProcessEnv;
  readonly cwd: string;
  readonly within_ms: number;
  /** Of each stream so much is kept; the rest is read and dropped. */
  readonly max_bytes: number;
  /** Which end of a longer stream is kept; its head when absent. */
  readonly keep?: "head" | "tail";
  /** Kills it when it aborts. */
  readonly signal?: AbortSignal;
}

/** Takes in a stream, and keeps one end of it. */
function keeper(max_bytes: number, keep: "head" | "tail"): { add(chunk: Buffer): void; text(): string } {
  const parts: Buffer[] = [];
  let size = 0;
  return {
    add: (chunk) => {
      if (keep === "head" && size >= max_bytes) return;
      parts.push(chunk);
      size += chunk.length;
      while (keep === "tail" && parts[0] !== undefined && size - parts[0].length >= max_bytes) size -= parts.shift()?.length ?? 0;
    },
    text: () => {
      const whole = Buffer.concat(parts);
      return (keep === "head" ? whole.subarray(0, max_bytes) : whole.subarray(-max_bytes)).toString("utf8");
    },
  };
}

/**
 * Runs a program to its end in a session of its own, of which nothing is left afterwards.
 * @throws Error when it cannot be started; the signal's reason once what it killed is gone
 */
export async function runProgram(argv: readonly [string, ...string[]], bounds: RunBounds): Promise<Ran> {
  const { env, cwd, within_ms, max_bytes, keep = "head", signal: ends } = bounds;
  ends?.throwIfAborted();
  const child = spawnSession(argv, env, cwd);
  const out = keeper(max_bytes, keep);
  const err = keeper(max_bytes, keep);
  child.stdout?.on("data", out.add);
  child.stderr?.on("data", err.add);
  return new Promise((resolve, reject) => {
    let late = false;
    const killAll = () => signalProcess(child.pid as number, "SIGKILL", "group");
    const timer = setTimeout(() => {
      late = true;
      killAll();
    }, within_ms);
    ends?.addEventListener("abort", killAll, { once: true });
    const over = () => {
      clearTimeout(timer);
      ends?.removeEventListener("abort", killAll);
    };
    child.once("error", (error) => {
      over();
      reject(error);
    });
    child.once("exit", (code, signal) => {
      over();
      killAll();
      const done = () => {
        if (ends?.aborted) reject(ends.reason as Error);
        else resolve({ code, signal, out: out.text(), err: err.text(), late });
      };
      const wait = setTimeout(done, PROGRAM_OUTPUT_MS);
      child.once("close", () => {
        clearTimeout(wait);
        done();
      });
    });
  });
}
