import { readdir, readFile } from "node:fs/promises";
import { readFileSync } from "node:fs";
import { spawn } from "node:child_process";
import type { ChildProcess } from "node:child_process";
import { setTimeout as sleep } from "node:timers/promises";
import { OWNER_POLL_MS } from "../protocol/limits.ts";

/** Environment variable that marks every process of one attempt, whatever session it moves to. */
export const ATTEMPT_VARIABLE = "LLMGW_ATTEMPT";

/** Sends a signal; a process that is gone already is no fault. */
export function signalProcess(pid: number, signal: NodeJS.Signals, to: "leader" | "group"): boolean {
  try {
    process.kill(to === "group" ? -pid : pid, signal);
    return true;
  } catch {
    return false;
  }
}

/** Whether a process exists (a zombie counts as gone). */
export function isAlive(pid: number): boolean {
  const stat = readStat(pid);
  return stat !== null && stat.state !== "Z" && stat.state !== "X";
}

/** When a process started, in clock ticks since boot: with the boot id it names one process for ever. Null when gone. */
export function startTimeOf(pid: number): number | null {
  return readStat(pid)?.start_ticks ?? null;
}

interface Stat {
  readonly state: string;
  readonly session: number;
  readonly cpu_ticks: number;
  readonly start_ticks: number;
}

/** Fields 3, 6, 14 and 15, and 22 of /proc/PID/stat (proc(5)); the name in field 2 may hold blanks and brackets. */
function readStat(pid: number): Stat | null {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, "utf8");
    const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
    const cpu_ticks = Number(fields[11]) + Number(fields[12]);
    return { state: fields[0] ?? "", session: Number(fields[3]), cpu_ticks, start_ticks: Number(fields[19]) };
  } catch {
    return null;
  }
}

/**
 * What the processes of a session have taken in so far, in bytes: what they read and what they hold in memory. While a
 * model loads it rises, whatever the engine prints.
 */
export async function intakeOf(session: number): Promise<number> {
  let bytes = 0;
  for (const pid of await processIds()) {
    if (readStat(pid)?.session !== session) continue;
    const [held, moved] = [await readProc(pid, "status"), await readProc(pid, "io")];
    bytes += 1_024 * Number(/^VmRSS:\s+(\d+)/m.exec(held)?.[1] ?? 0) + Number(/^rchar: (\d+)/m.exec(moved)?.[1] ?? 0);
  }
  return bytes;
}

/** Linux counts processor time in hundredths of a second, whatever its own clock does (USER_HZ). */
const TICK_MS = 10;

/** Processor time that the processes of a session have used so far, in ms; what has ended counts no more. */
export async function processorTimeOf_ms(session: number): Promise<number> {
  let ticks = 0;
  for (const pid of await processIds()) {
    const stat = readStat(pid);
    if (stat?.session === session) ticks += stat.cpu_ticks;
  }
  return ticks * TICK_MS;
}

/** All there are, this one too; some may be gone before they are looked at. */
const processIds = async (): Promise<number[]> => (await readdir("/proc")).map(Number).filter(Number.isInteger);

const readProc = (pid: number, file: string): Promise<string> => readFile(`/proc/${pid}/${file}`, "utf8").catch(() => "");

/**
 * Memory that the processes of a session hold, in bytes; what they share among them counts once. Null when there are none,
 * or they belong to somebody else.
 */
export async function memoryOfSession(session: number): Promise<number | null> {
  let kib = 0;
  for (const pid of await processIds()) {
    if (readStat(pid)?.session !== session) continue;
    const share = /^Pss:\s+(\d+)/m.exec(await readProc(pid, "smaps_rollup")) ?? /^VmRSS:\s+(\d+)/m.exec(await readProc(pid, "status"));
    kib += Number(share?.[1] ?? 0);
  }
  return kib === 0 ? null : kib * 1_024;
}

/** The id of this boot of the machine. */
export async function bootId(): Promise<string> {
  return (await readFile("/proc/sys/kernel/random/boot_id", "utf8")).trim();
}

/** Starts a program in its own session, without our terminal, descriptors or fate. Output goes to `log_fd`. */
export function spawnDetached(argv: readonly [string, ...string[]], env: NodeJS.ProcessEnv, log_fd: number, cwd = "/"): Promise<number> {
  const [program, ...args] = argv;
  return new Promise((resolve, reject) => {
    const child = spawn(program, args, { detached: true, stdio: ["ignore", log_fd, log_fd], env, cwd });
    child.once("error", reject);
    child.once("spawn", () => {
      child.unref();
      resolve(child.pid as number);
    });
  });
}

/** Starts a child in its own session, its output piped to us. */
export function spawnSession(argv: readonly [string, ...string[]], env: NodeJS.ProcessEnv, cwd: string): ChildProcess {
  const [program, ...args] = argv;
  return spawn(program, args, { detached: true, stdio: ["ignore", "pipe", "pipe"], env, cwd });
}

/** Whether a process was started with `NAME=value` in its environment; one of another user cannot be read and is not. */
async function isTagged(pid: number, tag: string): Promise<boolean> {
  return (await readProc(pid, "environ")).split("\0").includes(tag);
}

/** Processes other than this one that carry `NAME=value` in their environment; zombies not counted. */
export async function processesTagged(tag: string): Promise<number[]> {
  return othersThat((pid) => isTagged(pid, tag));
}

/** The processes of a session, and those that carry the attempt's tag wherever they went; zombies not counted. */
export async function processesOf(attempt: string, session: number | null): Promise<number[]> {
  const tag = `${ATTEMPT_VARIABLE}=${attempt}`;
  return othersThat(async (pid) => (session !== null && readStat(pid)?.session === session) || (await isTagged(pid, tag)));
}

async function othersThat(match: (pid: number) => Promise<boolean>): Promise<number[]> {
  const found: number[] = [];
  for (const pid of await processIds()) if (pid > 1 && pid !== process.pid && isAlive(pid) && (await match(pid))) found.push(pid);
  return found;
}

/**
 * Kills every process of an attempt until none is left.
 * @param except processes to spare, for a shim that carries the tag itself
 * @returns those that would not go within the deadline
 */
export async function sweepAttempt(
  attempt: string,
  session: number | null,
  deadline_ms: number,
  except: readonly number[] = [],
): Promise<number[]> {
  const end = performance.now() + deadline_ms;
  for (;;) {
    const left = (await processesOf(attempt, session)).filter((pid) => !except.includes(pid));
    if (left.length === 0 || performance.now() > end) return left;
    for (const pid of left) signalProcess(pid, "SIGKILL", "leader");
    await sleep(20);
  }
}

/**
 * Kills every other process that carries `name=value` in its environment until none is left.
 * @returns those that would not go within the deadline
 */
export async function sweepTagged(name: string, value: string, deadline_ms: number): Promise<number[]> {
  const end = performance.now() + deadline_ms;
  for (;;) {
    const left = await processesTagged(`${name}=${value}`);
    if (left.length === 0 || performance.now() > end) return left;
    for (const pid of left) signalProcess(pid, "SIGKILL", "leader");
    await sleep(20);
  }
}

/** The process whose command line has these arguments one after the other; null when there is none. */
export async function processWithArguments(wanted: readonly string[]): Promise<number | null> {
  const needle = `\0${wanted.join("\0")}\0`;
  const [found] = await othersThat(async (pid) => (await readProc(pid, "cmdline")).includes(needle));
  return found ?? null;
}

/** Calls once when the owner (or the process that had its number at first) is gone. Returns a way to stop looking. */
export function watchOwner(pid: number, gone: () => void): () => void {
  const start = startTimeOf(pid);
  const timer = setInterval(() => {
    if (start !== null && isAlive(pid) && startTimeOf(pid) === start) return;
    clearInterval(timer);
    gone();
  }, OWNER_POLL_MS);
  return () => clearInterval(timer);
}
