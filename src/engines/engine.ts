/**
 * engines/ holds what llmgw knows of inference engines: one small interface, one file per engine, and
 * `registry.ts`, the only file that knows them all. Everything here is pure: it builds commands and reads
 * answers, but starts nothing and opens no socket (the shim does).
 */
import type { EngineKind } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";

/** What an engine's command is made of. */
export interface LaunchInput {
  readonly launch: RankLaunch;
  /** Absolute path of the engine's program; for `sim` this very program and its arguments. */
  readonly program: readonly [string, ...string[]];
  readonly weights_path: string | null;
  /** The unix socket the engine must listen on, and nowhere else. */
  readonly socket: string;
  /** A folder only this attempt uses, for caches and key files. */
  readonly folder: string;
}

export interface EngineCommand {
  readonly argv: readonly [string, ...string[]];
  /** Added to the scrubbed environment. */
  readonly env: Readonly<Record<string, string>>;
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

/** One step of stopping: the signal for the engine's process group, then the wait before the next step. */
export interface StopStep {
  readonly signal: "SIGTERM" | "SIGINT" | "SIGKILL";
  /** `leader` for the engine's first process, `group` for all of its session. */
  readonly to: "leader" | "group";
  readonly wait_ms: number;
}

export interface Engine {
  readonly kind: EngineKind;
  /** Environment variables the engine reads that must not be inherited: exact names, or prefixes ending in `*`. */
  readonly scrub: readonly string[];
  /** Flags llmgw sets itself; `args` of the catalog may not name them. */
  readonly owned_flags: readonly string[];
  /** Where its weights come from: a file or folder, or nothing at all. */
  readonly needs_weights: boolean;
  command(input: LaunchInput): EngineCommand;
  /** Asked until each says ready, in order; one that failed ends the attempt. */
  readonly probes: readonly Probe[];
  readonly stop: readonly StopStep[];
  /** Arguments that print the version, and how to read it from stdout and stderr together. */
  readonly version_args: readonly string[];
  readVersion(output: string): string | null;
  /** Whether a log line shows that loading goes on; it extends the start deadline. */
  isProgress(line: string): boolean;
}
