/**
 * engines/ holds what llmgw knows of inference engines: one small interface, one file per engine, and
 * `registry.ts`, the only file that knows them all. Everything here is pure: it builds commands and reads
 * answers, but starts nothing and opens no socket (the shim does).
 */
import type { Args } from "../protocol/catalog.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";

/** One flag of a command: its long name with dashes, and its value, or null when it takes none. */
export interface Flag {
  readonly name: string;
  readonly value: string | null;
  /** Written as one argument, `--name=value`, so that no value of an operator's is taken for a flag. */
  readonly joined?: true;
}

/** Where an engine takes requests: a unix socket in a folder of its own, or a port of 127.0.0.1 behind a key. */
export type Endpoint =
  | { readonly kind: "socket"; readonly path: string }
  | {
      readonly kind: "loopback";
      readonly port: number;
      /** Ports of 127.0.0.1 for what else the engine listens on; as many as its `spare_ports`. */
      readonly spare_ports: readonly number[];
      /** Known to this attempt alone; never in an argument, an error or a log. */
      readonly key: string;
    };

/** What an engine's command is made of. */
export interface LaunchInput {
  readonly launch: RankLaunch;
  /** Absolute path of the engine's program; for `sim` this very program and its arguments. */
  readonly program: readonly [string, ...string[]];
  readonly weights_path: string | null;
  /** Where the engine must listen, and nowhere else. */
  readonly endpoint: Endpoint;
  /** A folder only this attempt uses, with a folder `tmp` in it. */
  readonly folder: string;
  /** A folder for what the engine compiles and may use again; of this engine and version. */
  readonly cache: string;
}

/** A file an engine reads, written for its user alone before it starts. */
interface PrivateFile {
  readonly path: string;
  readonly text: string;
}

export interface EngineCommand {
  /** The whole command: the program, then its flags. */
  readonly argv: readonly [string, ...string[]];
  /** The flags that `argv` holds, for a check against the engine's help. */
  readonly flags: readonly Flag[];
  /** Added to the scrubbed environment. */
  readonly env: Readonly<Record<string, string>>;
  readonly files: readonly PrivateFile[];
}

/** A question to the engine's own HTTP surface and how to read the answer. */
export interface Probe {
  readonly path: string;
  /**
   * @param status HTTP status, or 0 when nothing answered
   * @param model the name it is to serve
   */
  judge(status: number, body: string, model: string): "ready" | "loading" | { readonly failed: string };
}

/** How to see that an engine works on what it was asked: where its metrics are, and what of them moves while it does. */
export interface Vitals {
  readonly path: string;
  /** Text that is another one once the engine has made tokens or iterations; null when these are not its metrics. */
  read(metrics: string): string | null;
}

/** One step of stopping: the signal for the engine's process group, then the wait before the next step. */
export interface StopStep {
  readonly signal: "SIGTERM" | "SIGINT" | "SIGKILL";
  /** `leader` for the engine's first process, `group` for all of its session. */
  readonly to: "leader" | "group";
  readonly wait_ms: number;
}

/** How the engine reads its command line, and what of it is llmgw's. */
export interface FlagRules {
  /**
   * `exact`: names as they are, the value apart. `argparse` (Python): also any beginning that means one flag only, `_`
   * for `-`, and `--name=value`.
   */
  readonly parser: "exact" | "argparse";
  /** All names, long and short, of what llmgw sets itself or lets nobody set. */
  readonly owned: readonly string[];
  /** Flags that a key of the catalog stands for: owned while the catalog has it. */
  readonly keyed: Readonly<Record<string, "context" | "parallel">>;
  /** Flags of the engine that are no abbreviation, though an owned one begins with the same letters. */
  readonly whole: readonly string[];
}

/** How to get the engine's help, and whether it can be asked to read its arguments and end. */
interface HelpQuestion {
  /** Arguments behind the program that print all its flags. */
  readonly args: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Added to a whole command they make the engine read its arguments and end, with an error for a bad one; null when it cannot. */
  readonly trial_args: readonly string[] | null;
}

/** A question about GPUs, asked of an engine that was built for them. */
export interface AcceleratorQuestion {
  /** @param program absolute path */
  argv(program: string): readonly [string, ...string[]];
  /** Why it cannot use them; "" when it sees one. */
  fault(output: string): string;
}

export interface Engine {
  readonly kind: EngineKind;
  /** Environment variables the engine reads that must not be inherited: exact names, or prefixes ending in `*`. */
  readonly scrub: readonly string[];
  readonly rules: FlagRules;
  /** Where its weights come from: a file or folder, or nothing at all. */
  readonly needs_weights: boolean;
  /** Whether its ranks may be on several nodes. */
  readonly gangs: boolean;
  readonly listens: Endpoint["kind"];
  /** Whether it compiles while it runs, and keeps what it compiled in `cache`. */
  readonly caches: boolean;
  /** Ports of loopback it needs besides the one it serves on. */
  readonly spare_ports: number;
  /** `args` under which `command` gives flags that it gives under no others. */
  readonly telling_args: readonly Args[];
  /** @throws OperatorError E_ENGINE when `args` hold what is llmgw's, or cannot be */
  command(input: LaunchInput): EngineCommand;
  /**
   * Asked of rank 0 until each says ready, in order; one that failed ends the attempt. The other ranks of a gang serve
   * nothing: that they have joined shows in rank 0, which does not become ready without them.
   */
  readonly probes: readonly Probe[];
  readonly vitals: Vitals;
  readonly stop: readonly StopStep[];
  /** Arguments that print the version, and how to read it from stdout and stderr together. */
  readonly version_args: readonly string[];
  readVersion(output: string): string | null;
  /** How to learn whether it sees the GPUs there are; null for an engine that uses none. */
  readonly accelerator: AcceleratorQuestion | null;
  /** Null for the engine that is part of llmgw. */
  readonly help: HelpQuestion | null;
  /** Whether a log line shows that loading goes on; it extends the start deadline. */
  isProgress(line: string): boolean;
}
