import { createHash } from "node:crypto";
import { rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { engineOf } from "../engines/registry.ts";
import * as v from "valibot";
import { makeFolderOnce, readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { isAlive, memoryOfSession, processWithArguments, signalProcess, startTimeOf } from "../os/process.ts";
import { ownProgram } from "../os/program.ts";
import { isSilence } from "../os/unix-http.ts";
import { RankExit } from "../protocol/agent-api.ts";
import type { RankStatus } from "../protocol/agent-api.ts";
import { messageOf, OperatorError, parseAs, explain } from "../protocol/errors.ts";
import { FETCH_PROGRESS_MS, SHIM_FROZEN_MS, SHIM_SILENT_MS, SHIM_START_MS } from "../protocol/limits.ts";
import type { RankLaunch, Revocation } from "../protocol/plan.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { EXIT_FILE, SPEC_FILE, type ShimSpec, type ShimStatus, type WrittenShimSpec } from "../protocol/shim-api.ts";
import { lastLinesOf, RankLog } from "../shim/rank-log.ts";
import type { WeightStore } from "../weights/store.ts";
import type { Custody } from "./custody.ts";
import type { EngineProgram } from "./node-engines.ts";
import type { Places } from "./places.ts";
import { ShimClient, type ShimPatience } from "./shim-client.ts";

/** A shim found again is waited for this long at first, so that one that hangs does not keep the agent from starting, in ms. */
const GREETING_MS = 5_000;
/** Wait before a shim that did not answer, or a place that was taken, is asked for again, in ms. */
const ASK_AGAIN_MS = 50;

/** What all ranks of a node share. */
export interface RankContext {
  readonly node: string;
  readonly log: Log;
  readonly weights: WeightStore;
  readonly places: Places;
  readonly tls: ShimSpec["tls"];
  /** Where attempts have their folders. */
  readonly ranks_folder: string;
  /** Where sockets lie; short. */
  readonly socket_folder: string;
  /** User engines run as; null = as the agent does. */
  readonly engine_user: string | null;
  readonly owner_pid: number | null;
  readonly custody: Custody;
  /** Aborts when the agent goes: nothing is followed any more, nothing is ended. */
  readonly closed: AbortSignal;
  /** How long shims are waited for, when not as usual. */
  readonly patience?: ShimPatience | undefined;
  /** Where engines keep what they compile. */
  readonly cache_folder: string;
  /** Why the engine would refuse what it is started with, in a sentence; null when nothing is known to speak against it. */
  refusal(launch: RankLaunch, weights_path: string | null): Promise<string | null>;
  /** The engine's program; null when this node has none. */
  program(kind: RankLaunch["engine"]): EngineProgram | null;
  revocations(): readonly Revocation[];
  /** Called after each change of any rank. */
  changed(): void;
}

/**
 * Socket paths of an attempt; the engine's has a folder of its own, which may belong to another user. llama-server takes a
 * host for a unix socket only when it ends in `.sock`.
 */
export function socketsOf(folder: string, attempt: string): { control: string; engine: string } {
  return { control: join(folder, `${attempt}.shim`), engine: join(folder, attempt, "e.sock") };
}

/** Where an engine keeps what it compiles: a folder of each engine and version, which an installed one's path tells. */
function cacheOf(folder: string, kind: RankLaunch["engine"], engine_path: string): string {
  return join(folder, `${kind}-${createHash("sha256").update(engine_path).digest("hex").slice(0, 16)}`);
}

/** The process of a shim; the start time tells it from a later one of the same number. */
interface ShimProcess {
  readonly pid: number;
  readonly start_ticks: number | null;
}

/** One attempt as the agent follows it: its weights are fetched, its shim started, or found running, and watched. */
export class Rank {
  readonly launch: RankLaunch;
  readonly folder: string;
  readonly #context: RankContext;
  readonly #shim: ShimClient;
  readonly #log: Log;
  #status: RankStatus;
  #process: ShimProcess | null = null;
  readonly #fetching = new AbortController();
  #begun = false;
  #was_ready = false;
  #stop: { readonly reason: string; readonly asked: number; told: boolean } | null = null;
  #trust_due = false;

  constructor(launch: RankLaunch, context: RankContext) {
    this.launch = launch;
    this.folder = join(context.ranks_folder, launch.attempt);
    this.#context = context;
    this.#shim = new ShimClient(socketsOf(context.socket_folder, launch.attempt).control, context.patience);
    this.#log = context.log.with({ attempt: launch.attempt, replica: launch.replica });
    const { attempt, replica, rank } = launch;
    const phase = launch.weights === null ? "starting" : "fetching";
    const nothing = { detail: "", engine_pid: null, progress: null, exit: null };
    this.#status = { attempt, replica, rank, phase, since_ms: Date.now(), ...nothing, launch };
  }

  get status(): RankStatus {
    return this.#status;
  }

  /** Fetches the weights and starts the shim; then follows it to its end. Never rejects. */
  async start(): Promise<void> {
    this.#begun = true;
    try {
      await makeFolderOnce(this.folder, 0o711);
      await writeAtomic(join(this.folder, "launch.json"), JSON.stringify(this.launch), 0o600);
      const weights_path = await this.#obtainWeights();
      const refusal = this.#stop ? null : await this.#askEngine(weights_path);
      if (refusal !== null && !this.#stop) return await this.#end("start", refusal);
      await this.#takePlaces();
      if (this.#stop) return await this.#end("stopped", this.#stop.reason);
      if (this.#context.closed.aborted) return;
      await this.#startShim(weights_path);
    } catch (error) {
      // An agent that goes leaves the attempt as it is: the next one begins it again.
      if (this.#context.closed.aborted) return;
      const why = explain(error);
      if (this.#stop) return this.#end("stopped", this.#stop.reason);
      return this.#end(this.#status.phase === "fetching" ? "fetch" : "start", why);
    }
    await this.#follow(SHIM_START_MS);
  }

  /**
   * Takes up what an earlier agent left of this attempt, whatever it is: a shim that runs is followed on, one that is
   * gone has its exit taken.
   * @returns false when the attempt never came to a shim; `start` begins it again
   */
  async adopt(): Promise<boolean> {
    const spec_file = join(this.folder, SPEC_FILE);
    const [spec, exit] = await Promise.all([readIfThere(spec_file), readIfThere(join(this.folder, EXIT_FILE))]);
    if (spec === null && exit === null) return false;
    const started = v.safeParse(v.pipe(v.string(), v.parseJson(), v.object({ engine_version: v.string() })), spec);
    if (started.success) this.#status = { ...this.#status, engine_version: started.output.engine_version };
    this.#begun = true;
    this.#context.places.take(this.launch);
    if (exit !== null) {
      await this.#takeExit("it ended");
      await this.clearSockets();
      return true;
    }
    try {
      this.#take(await this.#shim.status(0, AbortSignal.any([this.#context.closed, AbortSignal.timeout(GREETING_MS)])));
    } catch {
      const pid = await processWithArguments(["shim", "--spec", spec_file]);
      if (pid === null) {
        await this.bury("it was not running when the agent came back");
        return true;
      }
      this.#process = { pid, start_ticks: startTimeOf(pid) };
    }
    this.trust();
    void this.#follow(Infinity);
    return true;
  }

  /**
   * Follows a shim that runs, until it has ended. Never rejects.
   * @param patience_ms how long it may take to answer for the first time
   */
  async #follow(patience_ms: number): Promise<void> {
    let revision = 0;
    let answered = false;
    let silent_since: number | null = null;
    const { closed, patience } = this.#context;
    const started = performance.now();
    while (!closed.aborted) {
      try {
        const status = await this.#shim.status(revision, closed);
        ({ revision } = status);
        [answered, silent_since] = [true, null];
        this.#take(status);
        if (status.phase === "exited") return;
        await this.#tell();
      } catch (error) {
        if (closed.aborted) return;
        const now = performance.now();
        // A shim whose socket somebody removed cannot be asked any more, and its engine's lies beside it.
        if (isSilence(error) || !this.#shim.isThere()) {
          if (silent_since !== null) this.#showFrozen();
          silent_since ??= now;
          // Asked for what it has, it is to answer at once.
          revision = 0;
        }
        // Nobody answers: it has not opened its socket yet, has left its exit behind, or died without.
        const asked = this.#stop?.asked;
        const late = !answered && now - started > patience_ms;
        const silent = asked !== undefined && now - asked > SHIM_SILENT_MS;
        const frozen = silent_since !== null && now - silent_since > (patience?.frozen_ms ?? SHIM_FROZEN_MS);
        if (!this.#isShimAlive()) return this.bury("its shim is gone");
        if (late || silent || frozen) return this.bury("its shim does not answer");
        await Bun.sleep(ASK_AGAIN_MS);
      }
    }
  }

  /** A shim that lives and does not get on serves nobody: the rank is not ready until it does. */
  #showFrozen(): void {
    if (this.#status.phase !== "ready") return;
    this.#log.warn("a shim does not answer");
    this.#change({ phase: "starting", detail: "its shim does not answer" });
  }

  #isShimAlive(): boolean {
    if (this.#process === null) return false;
    const { pid, start_ticks } = this.#process;
    return isAlive(pid) && startTimeOf(pid) === start_ticks;
  }

  /** Tells the shim what it does not know yet. @throws when it does not answer; it is told again then */
  async #tell(): Promise<void> {
    if (this.#stop && !this.#stop.told) {
      await this.#shim.stop(this.#stop.reason);
      this.#stop.told = true;
    }
    if (!this.#trust_due) return;
    this.#trust_due = false;
    try {
      await this.#shim.trust(this.#context.revocations());
    } catch (error) {
      this.#trust_due = true;
      throw error;
    }
  }

  /** Ends the attempt; how it goes is seen in the status. Never rejects. */
  async stop(reason: string): Promise<void> {
    if (this.#status.phase === "exited" || this.#stop) return;
    this.#stop = { reason, asked: performance.now(), told: false };
    this.#log.info("stopping a rank", { reason });
    if (!this.#begun) return this.#end("stopped", reason);
    this.#fetching.abort(new Error(reason));
    if (this.#status.phase === "fetching") return;
    this.#change({ phase: "stopping", detail: reason });
    await this.#tell().catch(() => {
      // It is told when it answers, or found dead.
    });
  }

  /** Makes the shim read its certificate again and take the revocations of now, at once or when it next answers. */
  trust(): void {
    if (this.#status.phase === "exited") return;
    this.#trust_due = true;
    this.#tell().catch(() => {});
  }

  /** Ends whatever is left of the attempt and takes the exit its shim left, or makes one. Never rejects. */
  async bury(reason: string): Promise<void> {
    if (this.#process && this.#isShimAlive()) signalProcess(this.#process.pid, "SIGKILL", "leader");
    const left = await this.#context.custody.clear(this.launch.attempt);
    if (left.length > 0) this.#log.error("processes of a dead rank would not end", { pids: left.join(" ") });
    await this.clearSockets();
    await this.#takeExit(reason);
  }

  /** The end its shim wrote down; without one, what is known here. */
  async #takeExit(reason: string): Promise<void> {
    const kind = this.#stop ? "stopped" : this.#was_ready ? "died" : "start";
    try {
      const text = await readIfThere(join(this.folder, EXIT_FILE));
      if (text === null) return await this.#end(kind, this.#stop?.reason ?? reason);
      const exit = parseAs(RankExit, JSON.parse(text), EXIT_FILE);
      this.#change({ phase: "exited", detail: exit.reason, exit, engine_pid: null });
    } catch (error) {
      await this.#end(kind, `${reason}; its exit.json cannot be read: ${messageOf(error)}`);
    }
  }

  async #obtainWeights(): Promise<string | null> {
    const { weights } = this.launch;
    if (weights === null) return null;
    this.#change({ phase: "fetching", detail: "fetching weights" });
    const signal = AbortSignal.any([this.#fetching.signal, this.#context.closed]);
    let told = 0;
    let told_of = "";
    const progress = (done: number, total: number | null, doing: "fetching" | "checking") => {
      const now = performance.now();
      if (now - told < FETCH_PROGRESS_MS && doing === told_of && done !== total) return;
      [told, told_of] = [now, doing];
      const far = total === null ? `${done} bytes` : `${Math.floor((100 * done) / Math.max(total, 1))} %`;
      // The number has to go on rising while the digest is taken: it is how the server knows that something happens.
      const risen = doing === "checking" ? { done: (total ?? 0) + done, total: null } : { done, total };
      this.#change({ detail: `${doing} weights: ${far}`, progress: risen });
    };
    const path = await this.#context.weights.obtain(weights, progress, signal);
    this.#change({ phase: "starting", detail: "starting the engine", progress: null });
    return path;
  }

  /** Why the engine would refuse its arguments; null when nothing is known to speak against them. */
  async #askEngine(weights_path: string | null): Promise<string | null> {
    this.#change({ detail: "asking the engine whether it takes its arguments" });
    const signal = AbortSignal.any([this.#fetching.signal, this.#context.closed]);
    const over = new Promise<null>((resolve) => signal.addEventListener("abort", () => resolve(null), { once: true }));
    const refusal = signal.aborted ? null : await Promise.race([this.#context.refusal(this.launch, weights_path), over]);
    // Its log is where an operator looks for what an engine said.
    if (refusal !== null) new RankLog(this.folder).add(refusal);
    return refusal;
  }

  /** Waits until the attempt before has left the GPUs and ports, or this one is to stop. */
  async #takePlaces(): Promise<void> {
    const { places, closed } = this.#context;
    for (;;) {
      if (this.#stop || closed.aborted) return;
      const missing = places.take(this.launch);
      if (missing === null) return;
      if (this.#status.detail !== missing) this.#change({ detail: missing });
      await Bun.sleep(ASK_AGAIN_MS);
    }
  }

  async #startShim(weights_path: string | null): Promise<void> {
    const { node, tls, engine_user, owner_pid, socket_folder } = this.#context;
    const { engine } = this.launch;
    const program = this.#context.program(engine);
    if (program === null)
      throw new OperatorError("E_ENGINE", `cannot start ${engine}`, "this node does not offer it", "see llmgw ctl engines");
    const { path: engine_path, version: engine_version } = program;
    const sockets = socketsOf(socket_folder, this.launch.attempt);
    // An engine of another user has to come through to its own folder in it.
    const cache_folder = engineOf(engine).caches ? cacheOf(this.#context.cache_folder, engine, engine_path) : null;
    if (cache_folder !== null) await makeFolderOnce(this.#context.cache_folder, 0o711);
    const spec: WrittenShimSpec = {
      protocol: PROTOCOL,
      node,
      launch: this.launch,
      engine_path,
      engine_version,
      weights_path,
      folder: this.folder,
      ...(cache_folder !== null && { cache_folder }),
      control_socket: sockets.control,
      engine_socket: sockets.engine,
      tls,
      revocations: [...this.#context.revocations()],
      engine_user,
      owner_pid,
    };
    const file = join(this.folder, SPEC_FILE);
    await writeAtomic(file, JSON.stringify(spec), 0o600);
    this.#status = { ...this.#status, engine_version };
    const pid = await this.#context.custody.start(this.launch, [...ownProgram(), "shim", "--spec", file], this.folder);
    this.#process = { pid, start_ticks: startTimeOf(pid) };
    this.#log.info("started a rank", { shim_pid: pid, engine });
  }

  /** @throws Error when another attempt answers */
  #take({ attempt, pid, phase, since_ms, detail, engine_pid, progress, exit }: ShimStatus): void {
    if (attempt !== this.launch.attempt) throw new Error("another attempt answers");
    if (pid !== this.#process?.pid) this.#process = { pid, start_ticks: startTimeOf(pid) };
    if (phase === "ready" && !this.#was_ready) this.#log.info("rank ready", { engine_pid });
    if (phase === "exited") this.#log.info("rank ended", { kind: exit?.kind, reason: exit?.reason });
    this.#was_ready ||= phase === "ready";
    // What is to stop is not shown as starting or ready again because the shim has not heard of it.
    const shown = this.#stop && (phase === "starting" || phase === "ready") ? "stopping" : phase;
    const pid_now = phase === "exited" ? null : engine_pid;
    this.#show({ ...this.#status, phase: shown, since_ms, detail, engine_pid: pid_now, progress, exit });
  }

  /** Measures what memory its engine holds. */
  async measure(): Promise<void> {
    const { engine_pid } = this.#status;
    const memory_used = engine_pid === null ? null : await memoryOfSession(engine_pid);
    if (memory_used !== null && this.#status.engine_pid === engine_pid) this.#change({ memory_used });
  }

  async #end(kind: RankExit["kind"], reason: string): Promise<void> {
    const exit = { at_ms: Date.now(), kind, code: null, signal: null, reason, last_lines: this.#lastLines() };
    await writeAtomic(join(this.folder, EXIT_FILE), JSON.stringify(exit), 0o600).catch(() => {
      // A full disk: the report says it all the same.
    });
    this.#log.info("rank ended", { kind, reason });
    this.#change({ phase: "exited", detail: reason, exit, engine_pid: null });
  }

  #lastLines(): string[] {
    try {
      return lastLinesOf(this.folder);
    } catch {
      return [];
    }
  }

  #change(change: Partial<RankStatus>): void {
    const since_ms = change.phase === undefined || change.phase === this.#status.phase ? this.#status.since_ms : Date.now();
    this.#show({ ...this.#status, ...change, since_ms });
  }

  #show(status: RankStatus): void {
    this.#status = status;
    if (status.phase === "exited") this.#context.places.release(this.launch);
    this.#context.changed();
  }

  /** Removes the sockets of an attempt that has ended. */
  async clearSockets(): Promise<void> {
    const { control, engine } = socketsOf(this.#context.socket_folder, this.launch.attempt);
    await Promise.all([rm(control, { force: true }), rm(dirname(engine), { recursive: true, force: true })]);
  }
}
