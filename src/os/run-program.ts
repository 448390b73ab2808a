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
}

/**
 * Runs a program to its end in a session of its own, of which nothing is left afterwards.
 * @throws Error when it cannot be started
 */
export async function runProgram(argv: readonly [string, ...string[]], { env, cwd, within_ms, max_bytes }: RunBounds): Promise<Ran> {
  const child = spawnSession(argv, env, cwd);
  const out: Buffer[] = [];
  const err: Buffer[] = [];
  const keep = (into: Buffer[]) => {
    let size = 0;
    return (chunk: Buffer) => {
      if (size < max_bytes) into.push(chunk.subarray(0, max_bytes - size));
      size += chunk.length;
    };
  };
  child.stdout?.on("data", keep(out));
  child.stderr?.on("data", keep(err));
  return new Promise((resolve, reject) => {
    let late = false;
    const killAll = () => signalProcess(child.pid as number, "SIGKILL", "group");
    const timer = setTimeout(() => {
      late = true;
      killAll();
    }, within_ms);
    child.once("error", (error) => {
      clearTimeout(timer);
      reject(error);
    });
    child.once("exit", (code, signal) => {
      clearTimeout(timer);
      killAll();
      const text = (parts: Buffer[]) => Buffer.concat(parts).toString("utf8");
      const done = () => resolve({ code, signal, out: text(out), err: text(err), late });
      const wait = setTimeout(done, PROGRAM_OUTPUT_MS);
      child.once("close", () => {
        clearTimeout(wait);
        done();
      });
    });
  });
}
