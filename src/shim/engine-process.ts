import type { ChildProcess } from "node:child_process";
import type { EngineCommand, StopStep } from "../engines/engine.ts";
import { ATTEMPT_VARIABLE, signalProcess, spawnSession, sweepAttempt } from "../os/process.ts";
import type { UnixUser } from "../os/user.ts";
import { ENGINE_OUTPUT_MS, RANK_SWEEP_MS } from "../protocol/limits.ts";
import type { RankLog, Secret } from "./rank-log.ts";
import { lineSplitter } from "./rank-log.ts";

/** Variables that never reach an engine, whichever it is: they change how a program loads or what Bun does. */
const NEVER_INHERITED = [
  "LLMGW_*",
  "BUN_*",
  "NODE_*",
  "LD_PRELOAD",
  "LD_AUDIT",
  "PYTHONPATH",
  "PYTHONSTARTUP",
  "VLLM_*",
  "SGLANG_*",
  "NCCL_*",
  "NOTIFY_SOCKET",
];
/** What tells a program whose it is: not handed on to an engine of another user. */
const OF_THE_USER = ["HOME", "USER", "LOGNAME", "MAIL", "XDG_*", "SUDO_*", "SSH_*", "DBUS_*"];

export interface EngineEnd {
  readonly code: number | null;
  readonly signal: string | null;
}

/** The environment less the named variables; a name ending in `*` is a prefix. */
export function scrubbed(env: NodeJS.ProcessEnv, names: readonly string[]): NodeJS.ProcessEnv {
  const isNamed = (key: string) => names.some((name) => (name.endsWith("*") ? key.startsWith(name.slice(0, -1)) : key === name));
  return Object.fromEntries(Object.entries(env).filter(([key]) => !isNamed(key)));
}

/**
 * The engine's argument vector behind `setpriv`, where there is one: the kernel kills the engine when the shim dies
 * (`--pdeathsig`), and it runs as another user, who can gain nothing more, when asked to.
 * @throws Error when another user is asked for and there is no setpriv
 */
export function underCustody(
  argv: readonly [string, ...string[]],
  user: Pick<UnixUser, "uid" | "gid" | "name"> | null,
  setpriv: string | null,
): [string, ...string[]] {
  if (setpriv === null) {
    if (user !== null) throw new Error(`cannot run the engine as ${user.name}: there is no setpriv (util-linux) on this machine`);
    return [...argv];
  }
  const asUser = user && [`--reuid=${user.uid}`, `--regid=${user.gid}`, "--init-groups", "--inh-caps=-all", "--no-new-privs"];
  return [setpriv, "--pdeathsig=KILL", ...(asUser ?? []), "--", ...argv];
}

/** What an engine inherits of the shim's environment. */
export function inherited(env: NodeJS.ProcessEnv, scrub: readonly string[], user: UnixUser | null, folder: string): NodeJS.ProcessEnv {
  const rest = scrubbed(env, [...NEVER_INHERITED, ...scrub, ...(user === null ? [] : OF_THE_USER)]);
  return user === null ? rest : { ...rest, HOME: user.home || folder, USER: user.name, LOGNAME: user.name };
}

/** One engine in its own session, its output in the log. */
export class EngineProcess {
  readonly pid: number;
  readonly #attempt: string;
  readonly #child: ChildProcess;
  #end: EngineEnd | null = null;
  /** Resolves when its first process has ended and all it printed was read. */
  readonly ended: Promise<EngineEnd>;

  private constructor(child: ChildProcess, pid: number, attempt: string, onLine: (line: string) => void, secret: Secret) {
    this.#child = child;
    this.pid = pid;
    this.#attempt = attempt;
    for (const stream of [child.stdout, child.stderr]) {
      const take = lineSplitter(onLine, secret);
      stream?.on("data", take);
      stream?.on("end", () => take(null));
      stream?.on("error", () => {});
    }
    this.ended = new Promise((resolve) => {
      child.once("exit", (code, signal) => {
        this.#end = { code, signal };
        // A grandchild may hold the pipes open; what the engine itself said has come by then.
        const done = () => resolve({ code, signal });
        child.once("close", done);
        setTimeout(done, ENGINE_OUTPUT_MS);
      });
    });
  }

  /**
   * @param env what the engine inherits, scrubbed of the engine's own names
   * @throws Error when the program cannot be started
   */
  static start(
    command: EngineCommand,
    options: {
      readonly attempt: string;
      readonly scrub: readonly string[];
      readonly env: NodeJS.ProcessEnv;
      readonly user: UnixUser | null;
      readonly folder: string;
      readonly log: RankLog;
      readonly secret: Secret;
      readonly onLine: (line: string) => void;
    },
  ): Promise<EngineProcess> {
    const { attempt, scrub, env, user, folder, log, secret, onLine } = options;
    const argv = underCustody(command.argv, user, Bun.which("setpriv"));
    const environment = { ...inherited(env, scrub, user, folder), ...command.env, [ATTEMPT_VARIABLE]: attempt };
    const child = spawnSession(argv, environment, folder);
    return new Promise((resolve, reject) => {
      child.once("error", reject);
      child.once("spawn", () => {
        const line = (text: string) => {
          log.add(text);
          onLine(text);
        };
        resolve(new EngineProcess(child, child.pid as number, attempt, line, secret));
      });
    });
  }

  /** Ends the engine by its stop order, then everything that is left of the rank. */
  async stop(steps: readonly StopStep[]): Promise<EngineEnd> {
    for (const step of steps) {
      if (this.#end) break;
      signalProcess(this.pid, step.signal, step.to);
      await Promise.race([new Promise((resolve) => this.#child.once("exit", resolve)), Bun.sleep(step.wait_ms)]);
    }
    await this.sweep();
    return this.ended;
  }

  /** Kills what is left of the engine's session and of all that carries the attempt's tag. Returns what would not die. */
  sweep(): Promise<number[]> {
    return sweepAttempt(this.#attempt, this.pid, RANK_SWEEP_MS, [process.pid]);
  }
}
