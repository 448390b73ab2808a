import { spawn } from "node:child_process";
import { open, readFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { messageOf, OperatorError, ERROR_CODES, type ErrorCode } from "../../protocol/errors.ts";
import { DEMO_STOP_MS } from "../../protocol/limits.ts";

/** One process of the demo: a server or an agent, writing to a log file of its own. */
export interface Child {
  readonly name: string;
  readonly log: string;
  /** Resolves with how it ended: "exit code 1", "signal SIGKILL". */
  readonly ended: Promise<string>;
  /** Asks it to end, insists after a while, and resolves when it is gone. */
  stop(): Promise<void>;
}

interface ChildOptions {
  readonly name: string;
  readonly argv: readonly [string, ...string[]];
  readonly log: string;
  readonly env: Readonly<Record<string, string | undefined>>;
}

/**
 * Starts a process in a session of its own, so that a Ctrl-C meant for the demo reaches the demo alone, which then
 * ends its children in order.
 * @throws OperatorError when it cannot be started or its log not be written
 */
export async function startChild({ name, argv, log, env }: ChildOptions): Promise<Child> {
  const file = await open(log, "a", 0o600);
  try {
    const [program, ...words] = argv;
    const child = spawn(program, words, { stdio: ["ignore", file.fd, file.fd], env: env as NodeJS.ProcessEnv, detached: true, cwd: "/" });
    await new Promise<void>((resolve, reject) => child.once("spawn", resolve).once("error", reject));
    let gone = false;
    const ended = new Promise<string>((resolve) => {
      child.once("exit", (code, signal) => {
        gone = true;
        resolve(signal ? `signal ${signal}` : `exit code ${code}`);
      });
    });
    const stop = async (): Promise<void> => {
      if (gone) return;
      child.kill("SIGTERM");
      await Promise.race([ended, sleep(DEMO_STOP_MS, undefined, { ref: false })]);
      if (!gone) child.kill("SIGKILL");
      await ended;
    };
    return { name, log, ended, stop };
  } catch (error) {
    throw new OperatorError("E_INTERNAL", `cannot start the ${name}`, messageOf(error), `check ${argv[0]}`);
  } finally {
    await file.close();
  }
}

/** The last lines of a log, without blank ones. */
async function lastLines(log: string, count: number): Promise<string[]> {
  const text = await readFile(log, "utf8").catch(() => "");
  const lines = text.split("\n").filter((line) => line.trim() !== "");
  return lines.slice(-count);
}

/** The error of a process that ended when it should not have: its own code where it named one. */
export async function diedError(child: Child, how: string, kept: boolean): Promise<OperatorError> {
  const lines = await lastLines(child.log, 8);
  const named = /\((E_[A-Z_]+)\)/.exec(lines.join("\n"))?.[1];
  const code: ErrorCode = ERROR_CODES.find((each) => each === named) ?? "E_INTERNAL";
  const why = lines.length === 0 ? "it wrote nothing" : `its last lines:\n${lines.map((line) => `    ${line}`).join("\n")}`;
  return new OperatorError(
    code,
    `the ${child.name} ended (${how})`,
    why,
    kept ? `see ${child.log}` : "run it again with --keep DIR and see DIR/logs",
  );
}
