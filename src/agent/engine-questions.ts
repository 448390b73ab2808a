import { createHash } from "node:crypto";
import { access, constants, realpath, stat } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { checkHelp, refusalBy, refusalIn, widestCommands } from "../engines/check.ts";
import type { Engine, EngineCommand } from "../engines/engine.ts";
import { engineOf } from "../engines/registry.ts";
import { makeFolderOnce, readIfThere, writeAtomic } from "../os/files.ts";
import { userOf } from "../os/user.ts";
import { runProgram, type Ran } from "../os/run-program.ts";
import type { EngineCheck } from "../protocol/engine-check.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";
import { ENGINE_DEVICES_MS, ENGINE_HELP_BYTES, ENGINE_HELP_MS, ENGINE_VERSION_MS } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { inherited, underCustody } from "../shim/engine-process.ts";

/** A help text as it is kept: it holds as long as the program is the same file. */
const Kept = v.object({ path: v.string(), mtime_ms: v.number(), size: v.number(), text: v.string() });

/** Who asks, and where answers are kept. */
interface Asker {
  /** User the engines run as; null = this one. */
  readonly engine_user: string | null;
  /** Folder for help texts; null = none are kept. */
  readonly folder: string | null;
}

/** Asks engine programs about themselves: their version, their help, and whether they take a command. */
export class EngineQuestions {
  readonly #asker: Asker;
  readonly #asked = new Map<string, Promise<string>>();

  constructor(asker: Asker) {
    this.#asker = asker;
  }

  /** Runs an engine for its version. @returns the version, or why it does not run here */
  async version(kind: EngineKind, path: string): Promise<{ version: string } | { reason: string }> {
    const engine = engineOf(kind);
    try {
      await access(path, constants.X_OK);
    } catch (error) {
      return { reason: `cannot be run: ${messageOf(error)}` };
    }
    let ran;
    try {
      ran = await this.#run(kind, [path, ...engine.version_args], engine.help?.env ?? {}, ENGINE_VERSION_MS);
    } catch (error) {
      return { reason: `cannot be started: ${error instanceof OperatorError ? error.why : messageOf(error)}` };
    }
    if (ran.late) return { reason: `it did not print its version within ${ENGINE_VERSION_MS / 1_000} s` };
    if (ran.signal === "SIGILL") return { reason: "it died of an illegal instruction: this CPU lacks what the build needs" };
    const output = `${ran.out}\n${ran.err}`;
    const asked = engine.version_args.join(" ");
    const last = output.trim().split("\n").at(-1)?.slice(0, 300) ?? "";
    if (ran.code !== 0) return { reason: `${asked} ended with ${ran.signal ?? `code ${ran.code}`}: ${last}` };
    const version = engine.readVersion(output);
    return version === null ? { reason: `${asked} does not print a version of ${kind}: ${last}` } : { version };
  }

  /**
   * Checks every flag llmgw would ever give an engine.
   * @param path its program, as an operator gives it
   * @param known what {@link version} said of it; it is asked when absent
   * @throws OperatorError E_ENGINE when it cannot be run at all
   */
  async check(kind: EngineKind, path: string, known?: string): Promise<EngineCheck> {
    const engine = engineOf(kind);
    const seen = known === undefined ? await this.version(kind, path) : { version: known };
    const version = "version" in seen ? seen.version : null;
    const output = await this.help(kind, path);
    const trials = await Promise.all(widestCommands(engine, [path]).map((command) => this.#trial(engine, command)));
    const trial = trials.find((said) => said !== null && said !== "") ?? trials[0] ?? null;
    return checkHelp(engine, output, { subject: path, version, trial });
  }

  /**
   * Why an engine would refuse the command of a launch, in a sentence; null when it takes it, or nobody can say.
   * @param path its program; "" for the engine that is part of llmgw
   * @throws OperatorError E_ENGINE for `args` that are llmgw's own
   */
  async refusal(launch: RankLaunch, path: string, weights_path: string | null): Promise<string | null> {
    const engine = engineOf(launch.engine);
    if (engine.help === null) return null;
    const nowhere = this.#asker.folder ?? tmpdir();
    const endpoint =
      engine.listens === "socket"
        ? ({ kind: "socket", path: join(nowhere, "e.sock") } as const)
        : ({
            kind: "loopback",
            port: launch.door.port,
            spare_ports: Array<number>(engine.spare_ports).fill(launch.door.port),
            key: "",
          } as const);
    const command = engine.command({ launch, program: [path], weights_path, endpoint, folder: nowhere, cache: nowhere });
    const said = await this.#trial(engine, command);
    if (said !== null) return said === "" ? null : `${path} does not take its arguments: ${said}`;
    // An engine that cannot say is started all the same, and says it then.
    const output = await this.help(launch.engine, path).catch(() => "");
    const refused = refusalBy(engine, output, command.flags);
    return refused === null ? null : `${path} does not take its arguments: ${refused}`;
  }

  /**
   * What an engine prints when it is asked for all its flags: stdout, then stderr. It may be an error text.
   * @throws OperatorError E_ENGINE when it cannot be run
   */
  async help(kind: EngineKind, path: string): Promise<string> {
    const { help } = engineOf(kind);
    if (help === null) return "";
    const { mtimeMs, size } = await this.#fileOf(kind, path);
    const key = `${kind} ${path} ${mtimeMs} ${size}`;
    const known = this.#asked.get(key);
    if (known) return known;
    const asked = this.#kept(kind, path, mtimeMs, size);
    this.#asked.set(key, asked);
    asked.catch(() => this.#asked.delete(key));
    return asked;
  }

  async #kept(kind: EngineKind, path: string, mtime_ms: number, size: number): Promise<string> {
    const { help } = engineOf(kind);
    const { folder } = this.#asker;
    const file = folder && join(folder, `${kind}-${createHash("sha256").update(path).digest("hex").slice(0, 16)}.json`);
    const kept = v.safeParse(v.pipe(v.string(), v.parseJson(), Kept), file && (await readIfThere(file).catch(() => null)));
    if (kept.success && kept.output.path === path && kept.output.mtime_ms === mtime_ms && kept.output.size === size)
      return kept.output.text;
    const ran = await this.#run(kind, [path, ...(help?.args ?? [])], help?.env ?? {}, ENGINE_HELP_MS);
    if (ran.late) throw cannotAsk(kind, path, `it did not print its help within ${ENGINE_HELP_MS / 1_000} s`);
    const text = `${ran.out}\n${ran.err}`;
    // What ended with an error may end otherwise once a driver or a library is there.
    if (file && ran.code === 0) {
      await makeFolderOnce(folder as string, 0o711);
      await writeAtomic(file, JSON.stringify({ path, mtime_ms, size, text }), 0o600);
    }
    return text;
  }

  /** Why an engine that was built for GPUs cannot use those there are; "" when it can. @throws OperatorError E_ENGINE */
  async acceleratorFault(kind: EngineKind, path: string): Promise<string> {
    const { accelerator, help } = engineOf(kind);
    if (accelerator === null) return "";
    const ran = await this.#run(kind, [...accelerator.argv(path)], help?.env ?? {}, ENGINE_DEVICES_MS);
    return ran.late
      ? `it did not say within ${ENGINE_DEVICES_MS / 1_000} s which GPUs it sees`
      : accelerator.fault(`${ran.out}\n${ran.err}`);
  }

  async #fileOf(kind: EngineKind, path: string): Promise<{ mtimeMs: number; size: number }> {
    try {
      return await stat(await realpath(path));
    } catch (error) {
      throw cannotAsk(kind, path, messageOf(error));
    }
  }

  /** What an engine says to a whole command without starting: "" when it takes it; null when it cannot be asked. */
  async #trial(engine: Engine, { argv, env }: EngineCommand): Promise<string | null> {
    if (!engine.help?.trial_args) return null;
    const ran = await this.#run(engine.kind, [...argv, ...engine.help.trial_args], env, ENGINE_VERSION_MS);
    if (ran.late) return null;
    if (ran.signal !== null) return `it was killed by ${ran.signal}`;
    const output = `${ran.out}\n${ran.err}`;
    if (ran.code !== 0) return refusalIn(engine, output);
    return engine.readVersion(output) === null ? `it ended well and printed no version: is it ${engine.kind}?` : "";
  }

  async #run(kind: EngineKind, argv: [string, ...string[]], env: Readonly<Record<string, string>>, within_ms: number): Promise<Ran> {
    const { engine_user } = this.#asker;
    const user = engine_user === null ? null : await userOf(engine_user);
    if (engine_user !== null && user === null) throw cannotAsk(kind, argv[0], `there is no user ${engine_user}`);
    const { scrub } = engineOf(kind);
    const home = tmpdir();
    try {
      return await runProgram(user === null ? argv : underCustody(argv, user, Bun.which("setpriv")), {
        env: { ...inherited(process.env, scrub, user, home), ...env },
        cwd: home,
        within_ms,
        max_bytes: ENGINE_HELP_BYTES,
      });
    } catch (error) {
      throw cannotAsk(kind, argv[0], messageOf(error));
    }
  }
}

function cannotAsk(kind: EngineKind, path: string, why: string): OperatorError {
  return new OperatorError("E_ENGINE", `cannot ask ${kind} at ${path}`, why, "check the path, and run it by hand with --help");
}
