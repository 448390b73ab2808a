import { realpath, stat } from "node:fs/promises";
import { join } from "node:path";
import * as v from "valibot";
import { chooseProgram, faultOf, type Candidate, type Choice } from "../engines/rollout.ts";
import { unsuited } from "../engines/releases.ts";
import { readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { pause } from "../os/wakeup.ts";
import type { NodeResult } from "../protocol/agent-api.ts";
import { ENGINE_PATH_KEYS, type AgentConfig } from "../protocol/config.ts";
import { WantedEngine, type EngineInstall } from "../protocol/engine-release.ts";
import { explain, messageOf } from "../protocol/errors.ts";
import { INSTALLABLE_KINDS, type EngineKind, type InstallableKind } from "../protocol/ids.ts";
import type { EngineOffer, Inventory } from "../protocol/inventory.ts";
import { ENGINE_PROVE_AGAIN_MS, INSTALL_AGAIN_FIRST_MS, INSTALL_AGAIN_MAX_MS } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { VERSION } from "../protocol/version.ts";
import { install, installedEngines, removeDownloads, removeOthers, type InstallJob, type Installed } from "./engine-install.ts";
import { EngineQuestions } from "./engine-questions.ts";

const isInstallable = (kind: EngineKind): kind is InstallableKind => kind !== "sim";

/** What is remembered of engines, so that an agent that starts without a server uses what it used before. */
const Kept = v.object({ wanted: v.array(WantedEngine), last: v.record(v.string(), v.string()) });

/** What was found out about one program. */
interface Proof {
  readonly version: string;
  readonly fault: string;
}

/** An engine program that a rank may be started with. */
export interface EngineProgram {
  /** Absolute; "" for the engine that is part of llmgw. */
  readonly path: string;
  readonly version: string;
}

interface NodeEnginesOptions {
  readonly config: AgentConfig;
  /** User engines run as; null = as the agent does. */
  readonly engine_user: string | null;
  readonly log: Log;
  readonly signal: AbortSignal;
  /** What the machine has, as it was seen last. */
  readonly machine: () => Pick<Inventory, "host" | "gpus">;
  /** Versions that running ranks were started with. */
  readonly running: (kind: EngineKind) => ReadonlySet<string>;
  /** Offers or installations are not what they were. */
  readonly changed: () => void;
}

/** The engine programs of a node: those it installs as the server names them, and those it was given by path. */
export class NodeEngines {
  readonly #options: NodeEnginesOptions;
  readonly #questions: EngineQuestions;
  readonly #root: string;
  readonly #file: string;
  #wanted: readonly WantedEngine[] = [];
  readonly #last = new Map<InstallableKind, string>();
  readonly #choices = new Map<InstallableKind, Choice>();
  readonly #choosing = new Map<InstallableKind, Promise<void>>();
  readonly #installs = new Map<InstallableKind, EngineInstall>();
  /** What was proved, by path and state of the program. */
  readonly #proofs = new Map<string, Promise<Proof>>();
  readonly #made = new Map<string, Installed>();
  /** The last installation of a kind, at work or over. */
  readonly #installing = new Map<InstallableKind, Promise<Installed>>();
  /** When it was last found that none may be used. */
  readonly #refused_ms = new Map<InstallableKind, number>();
  /** Ends the work on a kind when something else is wanted of it. */
  readonly #work = new Map<InstallableKind, AbortController>();
  /** Where engines keep what they compile. */
  readonly cache_folder: string;

  constructor(options: NodeEnginesOptions) {
    const { config, engine_user } = options;
    this.#options = options;
    this.cache_folder = join(config.state, "cache");
    this.#root = join(config.state, "engines");
    this.#file = join(config.state, "agent", "engines.json");
    this.#questions = new EngineQuestions({ engine_user, folder: join(this.cache_folder, "help") });
  }

  /** Takes up what was wanted and used before. What is there is proved beside everything else. */
  async open(): Promise<void> {
    const kept = v.safeParse(v.pipe(v.string(), v.parseJson(), Kept), await readIfThere(this.#file).catch(() => null));
    if (kept.success) {
      this.#wanted = kept.output.wanted;
      for (const kind of INSTALLABLE_KINDS) if (kept.output.last[kind] !== undefined) this.#last.set(kind, kept.output.last[kind]);
    }
    await Promise.all(INSTALLABLE_KINDS.map((kind) => this.#choose(kind)));
    for (const kind of INSTALLABLE_KINDS) this.#begin(kind);
  }

  /** Takes what the server names now. */
  want(engines: readonly WantedEngine[]): void {
    const before = this.#wanted;
    this.#wanted = engines;
    const of = (list: readonly WantedEngine[], kind: InstallableKind) => JSON.stringify(list.find((each) => each.kind === kind) ?? null);
    const changed = INSTALLABLE_KINDS.filter((kind) => of(before, kind) !== of(engines, kind));
    if (changed.length === 0) return;
    void this.#keep();
    for (const kind of changed) this.#begin(kind);
  }

  /** Engines this node has; only offered ones are used. */
  offers(): EngineOffer[] {
    const built_in = { kind: "sim" as const, version: VERSION, path: "built in", origin: "built in" as const, offered: true, reason: "" };
    return [built_in, ...INSTALLABLE_KINDS.flatMap((kind) => this.#offerOf(kind))];
  }

  #offerOf(kind: InstallableKind): EngineOffer[] {
    const choice = this.#choices.get(kind);
    const path = this.#pathOf(kind);
    if (choice?.use) {
      const { version, path: used, origin } = choice.use;
      const made = this.#made.get(used);
      const note = [choice.reason, made?.note ?? ""].filter((text) => text !== "").join("; ");
      return [
        {
          kind,
          version,
          path: used,
          origin,
          offered: true,
          reason: "",
          ...(note && { note }),
          ...(made && { features: [...made.features] }),
        },
      ];
    }
    if (path === undefined) return [];
    return [{ kind, version: "", path, origin: "path", offered: false, reason: choice?.reason ?? "it is being checked" }];
  }

  /** How far the versions are that the server names. */
  installs(): EngineInstall[] {
    return [...this.#installs.values()];
  }

  /** The program for a new rank; null when this node has none. */
  program(kind: EngineKind): EngineProgram | null {
    if (!isInstallable(kind)) return { path: "", version: VERSION };
    const use = this.#choices.get(kind)?.use;
    return use ? { path: use.path, version: use.version } : null;
  }

  /** Why an engine would refuse what it is to be started with, in a sentence; null when nothing is known to speak against it. */
  async refusal(launch: RankLaunch, weights_path: string | null): Promise<string | null> {
    const { engine } = launch;
    if (isInstallable(engine)) await this.#lookAgain(engine);
    const program = this.program(engine);
    if (program !== null) return this.#questions.refusal(launch, program.path, weights_path);
    const reason = isInstallable(engine) ? this.#choices.get(engine)?.reason : "";
    return `this node does not offer it${reason ? `: ${reason}` : ""}`;
  }

  /** Whether an engine takes every flag llmgw would ever give it. @throws OperatorError E_ENGINE */
  async check(kind: EngineKind): Promise<NodeResult> {
    const path = this.program(kind)?.path ?? (isInstallable(kind) ? this.#pathOf(kind) : undefined);
    if (path === undefined || path === "") return { error: path === undefined ? `it has no ${kind}` : `${kind} is part of llmgw itself` };
    return { check: await this.#questions.check(kind, path) };
  }

  #pathOf(kind: InstallableKind): string | undefined {
    return this.#options.config[ENGINE_PATH_KEYS[kind]];
  }

  #begin(kind: InstallableKind): void {
    this.#work.get(kind)?.abort();
    const work = new AbortController();
    this.#work.set(kind, work);
    const signal = AbortSignal.any([work.signal, this.#options.signal]);
    this.#bringAbout(kind, signal).catch((error: unknown) => {
      if (!signal.aborted)
        this.#options.log.error("the engines of this node are not looked after", { engine: kind, why: messageOf(error) });
    });
  }

  /** Works until the wanted version of a kind is there and proved, or nothing more can be done about it. */
  async #bringAbout(kind: InstallableKind, signal: AbortSignal): Promise<void> {
    const wanted = this.#wanted.find((each) => each.kind === kind);
    if (!wanted) {
      this.#installs.delete(kind);
      await this.#choose(kind);
      return;
    }
    const { version, recipe } = wanted;
    const tell = (phase: EngineInstall["phase"], detail: string, next_try_ms: number | null = null) => {
      if (signal.aborted) return;
      this.#installs.set(kind, { kind, version, phase, detail, next_try_ms });
      this.#options.changed();
    };
    const unfit = unsuited(kind, this.#options.machine());
    if (unfit !== "") tell("unsuited", unfit);
    else tell("waiting", wanted.reason);
    for (let wait_ms = INSTALL_AGAIN_FIRST_MS; !signal.aborted && unfit === ""; wait_ms = Math.min(2 * wait_ms, INSTALL_AGAIN_MAX_MS)) {
      const there = (await installedEngines(this.#root, kind)).find((each) => each.version === version);
      if (!there && recipe === null) break;
      const fault = await this.#tryOnce(kind, wanted, there ?? null, tell, signal);
      if (fault === null || signal.aborted) break;
      tell("failed", fault, Date.now() + wait_ms);
      await this.#choose(kind);
      await pause(wait_ms, signal);
    }
    if (!signal.aborted) await this.#choose(kind);
  }

  /** @returns why it did not work; null when the version is there and proved */
  async #tryOnce(
    kind: InstallableKind,
    wanted: WantedEngine,
    there: Installed | null,
    tell: Tell,
    signal: AbortSignal,
  ): Promise<string | null> {
    const { version, recipe } = wanted;
    const { log, machine } = this.#options;
    try {
      let engine = there;
      if (engine === null && recipe !== null) {
        engine = await this.#installAlone(kind, { root: this.#root, engine: { ...wanted, recipe }, inventory: machine(), signal, tell });
        log.info("installed an engine", { engine: kind, version, program: engine.program });
      }
      if (engine === null) return wanted.reason;
      tell("proving", "it is run, and asked for its flags");
      // What failed before is looked at anew: a driver or a library may be there now.
      this.#forget(engine.program);
      const { fault } = await this.#prove(kind, engine.program, engine.features);
      if (fault !== "") return fault;
      tell("installed", engine.note);
      await this.#choose(kind);
      await this.#removeOld(kind, version);
      return null;
    } catch (error) {
      if (!signal.aborted) log.warn("an engine could not be installed", { engine: kind, version, why: explain(error) });
      return explain(error);
    }
  }

  /**
   * Looks whether what is in use is still there, and removes versions that were in use until a while ago with what was fetched
   * for them. Never rejects.
   */
  async tidy(): Promise<void> {
    for (const kind of INSTALLABLE_KINDS) await this.#lookAgain(kind);
    if (this.installs().every(({ phase }) => phase === "installed" || phase === "unsuited"))
      await removeDownloads(this.#root).catch(() => {});
    for (const { kind, version, phase } of this.installs()) {
      // Its driver may have come up after this agent.
      if (phase === "unsuited" && isInstallable(kind) && unsuited(kind, this.#options.machine()) === "") this.#begin(kind);
      if (phase !== "installed" || !isInstallable(kind)) continue;
      await this.#removeOld(kind, version).catch((error: unknown) => {
        this.#options.log.warn("cannot remove old engines", { engine: kind, why: messageOf(error) });
      });
    }
  }

  /** Two would write into the same folder: the one before was told to end, and this one waits until it has. */
  #installAlone(kind: InstallableKind, job: InstallJob): Promise<Installed> {
    const before = this.#installing.get(kind) ?? Promise.resolve(null);
    const made = before.catch(() => null).then(() => install(job));
    this.#installing.set(kind, made);
    return made;
  }

  async #removeOld(kind: InstallableKind, version: string): Promise<void> {
    const { log, running } = this.#options;
    await this.#installing.get(kind)?.catch(() => null);
    const use = this.#choices.get(kind)?.use;
    const gone = await removeOthers(this.#root, kind, new Set([version, ...(use ? [use.version] : []), ...running(kind)]));
    if (gone.length > 0) log.info("removed engines that nothing uses", { engine: kind, versions: gone.join(" ") });
  }

  /**
   * Proves anew a program that is no longer the file that was proved; one that is gone is installed again. Where none is
   * used, the one named by path is proved again from time to time: what it lacks may be there now.
   */
  async #lookAgain(kind: InstallableKind): Promise<void> {
    const use = this.#choices.get(kind)?.use;
    const path = this.#pathOf(kind);
    if (!use && path !== undefined && this.#choices.has(kind)) {
      const isSoon = Date.now() - (this.#refused_ms.get(kind) ?? 0) < ENGINE_PROVE_AGAIN_MS;
      if (isSoon && this.#proofs.has(await proofKey(path))) return;
      this.#forget(path);
      await this.#choose(kind);
      return;
    }
    if (!use || this.#proofs.has(await proofKey(use.path))) return;
    this.#options.log.warn("an engine is not the file that it was", { engine: kind, program: use.path });
    await this.#choose(kind);
    this.#begin(kind);
  }

  /** Decides which program new ranks are started with. One after the other: an older look must not have the last word. */
  #choose(kind: InstallableKind): Promise<void> {
    const before = this.#choosing.get(kind) ?? Promise.resolve();
    const chosen = before.catch(() => {}).then(() => this.#chooseNow(kind));
    this.#choosing.set(kind, chosen);
    return chosen;
  }

  async #chooseNow(kind: InstallableKind): Promise<void> {
    const installed = await installedEngines(this.#root, kind);
    for (const engine of installed) this.#made.set(engine.program, engine);
    const candidates: Candidate[] = [];
    for (const { program, version, features } of installed) {
      const { fault } = await this.#prove(kind, program, features);
      candidates.push({ version, path: program, origin: "installed", fault });
    }
    const path = this.#pathOf(kind);
    if (path !== undefined) candidates.push({ path, origin: "path", ...(await this.#prove(kind, path, [])) });
    const wanted = this.#wanted.find((each) => each.kind === kind)?.version ?? "";
    const choice = chooseProgram(candidates, wanted, this.#last.get(kind) ?? null);
    const before = this.#choices.get(kind);
    this.#choices.set(kind, choice);
    if (!choice.use) this.#refused_ms.set(kind, Date.now());
    if (JSON.stringify(before) === JSON.stringify(choice)) return;
    if (choice.use) {
      this.#last.set(kind, choice.use.version);
      void this.#keep();
    } else if (path !== undefined || installed.length > 0)
      this.#options.log.warn("an engine is not offered", { engine: kind, why: choice.reason });
    this.#options.changed();
  }

  /** Runs a program to see that it works here and takes what llmgw would give it; once, while it is the same file. */
  async #prove(kind: InstallableKind, path: string, features: readonly string[]): Promise<Proof> {
    const key = await proofKey(path);
    const known = this.#proofs.get(key);
    if (known) return known;
    const proof = this.#proveNow(kind, path, features);
    this.#proofs.set(key, proof);
    return proof;
  }

  #forget(path: string): void {
    for (const key of this.#proofs.keys()) if (key.startsWith(`${path}\n`)) this.#proofs.delete(key);
  }

  async #proveNow(kind: InstallableKind, path: string, features: readonly string[]): Promise<Proof> {
    const seen = await this.#questions.version(kind, path);
    if ("reason" in seen) return { version: "", fault: seen.reason };
    const { version } = seen;
    try {
      const fault = faultOf(await this.#questions.check(kind, path, version));
      if (fault !== "") return { version, fault };
      const asks = features.includes("cuda") && this.#options.machine().gpus.length > 0;
      return { version, fault: asks ? await this.#questions.acceleratorFault(kind, path) : "" };
    } catch (error) {
      return { version, fault: explain(error) };
    }
  }

  async #keep(): Promise<void> {
    const kept = { wanted: this.#wanted, last: Object.fromEntries(this.#last) };
    await writeAtomic(this.#file, JSON.stringify(kept), 0o600).catch((error: unknown) => {
      this.#options.log.warn("cannot remember which engines are used", { why: messageOf(error) });
    });
  }
}

/** A program as it is now: what was proved of it holds while this is the same. */
async function proofKey(path: string): Promise<string> {
  const about = await realpath(path)
    .then((real) => stat(real))
    .catch(() => null);
  // Its time of change is another also when its owner is, or another file took its place.
  const { mtimeMs = 0, ctimeMs = 0, size = 0, mode = 0 } = about ?? {};
  return [path, mtimeMs, ctimeMs, size, mode].join("\n");
}

type Tell = (phase: EngineInstall["phase"], detail: string) => void;
