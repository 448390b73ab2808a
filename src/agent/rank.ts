import { closeSync, openSync } from "node:fs";
import { mkdir, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { spawnDetached, sweepAttempt, waitGone } from "../os/process.ts";
import { ownProgram } from "../os/program.ts";
import { RankExit } from "../protocol/agent-api.ts";
import type { RankStatus } from "../protocol/agent-api.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { EXIT_LOG_LINES_COUNT, SHIM_START_MS } from "../protocol/limits.ts";
import type { RankLaunch, Revocation } from "../protocol/plan.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import type { ShimSpec, ShimStatus } from "../protocol/shim-api.ts";
import { tailOf } from "../shim/rank-log.ts";
import type { WeightStore } from "../weights/store.ts";
import { ShimClient } from "./shim-client.ts";

/** How long a sweep of a dead shim's processes may take, in ms. */
const SWEEP_MS = 10_000;

/** What all ranks of a node share. */
export interface RankContext {
  readonly node: string;
  readonly log: Log;
  readonly weights: WeightStore;
  readonly tls: ShimSpec["tls"];
  /** Where attempts have their folders. */
  readonly ranks_folder: string;
  /** Where sockets lie; short. */
  readonly socket_folder: string;
  readonly engine_user: string | null;
  readonly owner_pid: number | null;
  enginePath(kind: RankLaunch["engine"]): string;
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

/** One attempt as the agent follows it: its weights are fetched, its shim started, or found running, and watched. */
export class Rank {
  readonly launch: RankLaunch;
  readonly folder: string;
  readonly #context: RankContext;
  readonly #client: ShimClient;
  readonly #log: Log;
  #status: RankStatus;
  #shim_pid: number | null = null;
  readonly #fetching = new AbortController();
  #stop_reason: string | null = null;

  constructor(launch: RankLaunch, context: RankContext) {
    this.launch = launch;
    this.folder = join(context.ranks_folder, launch.attempt);
    this.#context = context;
    this.#client = new ShimClient(socketsOf(context.socket_folder, launch.attempt).control);
    this.#log = context.log.with({ attempt: launch.attempt, replica: launch.replica });
    const { attempt, replica, rank } = launch;
    const phase = launch.weights === null ? "starting" : "fetching";
    this.#status = {
      attempt,
      replica,
      rank,
      phase,
      since_ms: Date.now(),
      detail: "",
      engine_pid: null,
      progress: null,
      exit: null,
      launch,
    };
  }

  get status(): RankStatus {
    return this.#status;
  }

  get shim(): ShimClient {
    return this.#client;
  }

  /** Fetches the weights and starts the shim; then follows it to its end. Never rejects. */
  async start(): Promise<void> {
    try {
      await mkdir(this.folder, { recursive: true, mode: 0o711 });
      await writeAtomic(join(this.folder, "launch.json"), JSON.stringify(this.launch), 0o600);
      const weights_path = await this.#obtainWeights();
      if (this.#stop_reason !== null) return this.#end("stopped", this.#stop_reason);
      await this.#startShim(weights_path);
    } catch (error) {
      const why = error instanceof OperatorError ? `${error.message}: ${error.why}` : messageOf(error);
      if (this.#stop_reason !== null) return this.#end("stopped", this.#stop_reason);
      return this.#end(this.#status.phase === "fetching" ? "fetch" : "start", why);
    }
    await this.follow();
  }

  /** Follows a shim that runs, until it has ended. Never rejects. */
  async follow(): Promise<void> {
    let revision = 0;
    const started = performance.now();
    for (;;) {
      try {
        const status = await this.#client.status(revision);
        if (status.attempt !== this.launch.attempt) throw new Error("another attempt answers");
        ({ revision } = status);
        this.#shim_pid = status.pid;
        this.#take(status);
        if (status.phase === "exited") return;
      } catch {
        // Nobody answers: it has not opened its socket yet, has left its exit behind, or died without.
        const patience = this.#shim_pid !== null && revision === 0 ? SHIM_START_MS : 0;
        const alive = this.#shim_pid !== null && !(await waitGone(this.#shim_pid, 50));
        if (alive && (revision > 0 || performance.now() - started < patience)) {
          await Bun.sleep(50);
          continue;
        }
        return this.bury("its shim is gone");
      }
    }
  }

  /** Ends the attempt; how it goes is seen in the status. */
  async stop(reason: string): Promise<void> {
    this.#stop_reason = reason;
    this.#log.info("stopping a rank", { reason });
    this.#fetching.abort(new Error(reason));
    if (this.#status.phase === "fetching") return;
    this.#change({ phase: "stopping", detail: reason });
    await this.#client.stop(reason).catch(() => {
      // It has ended, or will be found dead.
    });
  }

  /** Takes the exit a dead shim left, or makes one; ends whatever is left of the attempt. */
  async bury(reason: string): Promise<void> {
    const left = await sweepAttempt(this.launch.attempt, null, SWEEP_MS);
    if (left.length > 0) this.#log.error("processes of a dead rank would not end", { pids: left.join(" ") });
    const text = await readIfThere(join(this.folder, "exit.json"));
    if (text === null) return this.#end(this.#stop_reason === null ? "died" : "stopped", this.#stop_reason ?? reason);
    try {
      const exit = parseAs(RankExit, JSON.parse(text), "exit.json");
      this.#change({ phase: "exited", detail: exit.reason, exit, engine_pid: null });
    } catch (error) {
      await this.#end("died", `${reason}; its exit.json cannot be read: ${messageOf(error)}`);
    }
  }

  async #obtainWeights(): Promise<string | null> {
    const { weights } = this.launch;
    if (weights === null) return null;
    this.#change({ phase: "fetching", detail: "fetching weights" });
    const path = await this.#context.weights.obtain(weights, (done, total) => this.#fetched(done, total), this.#fetching.signal);
    this.#change({ phase: "starting", detail: "starting the engine", progress: null });
    return path;
  }

  #fetched(done: number, total: number | null): void {
    const before = this.#status.progress?.done ?? 0;
    // Said each hundredth, or each 64 MiB where the whole is not known.
    if (done !== total && done - before < (total ?? 6.4e9) / 100) return;
    const detail = total === null ? `fetching weights: ${done} bytes` : `fetching weights: ${Math.floor((100 * done) / total)} %`;
    this.#change({ detail, progress: { done, total } });
  }

  async #startShim(weights_path: string | null): Promise<void> {
    const { node, tls, engine_user, owner_pid, socket_folder } = this.#context;
    const sockets = socketsOf(socket_folder, this.launch.attempt);
    const spec: ShimSpec = {
      protocol: PROTOCOL,
      node,
      launch: this.launch,
      engine_path: this.#context.enginePath(this.launch.engine),
      weights_path,
      folder: this.folder,
      control_socket: sockets.control,
      engine_socket: sockets.engine,
      tls,
      revocations: [...this.#context.revocations()],
      engine_user,
      owner_pid,
    };
    const file = join(this.folder, "spec.json");
    await writeAtomic(file, JSON.stringify(spec), 0o600);
    const log = openSync(join(this.folder, "shim.log"), "a", 0o600);
    try {
      this.#shim_pid = await spawnDetached([...ownProgram(), "shim", "--spec", file], process.env, log);
    } finally {
      closeSync(log);
    }
    await writeFile(join(this.folder, "shim.pid"), `${this.#shim_pid}\n`);
    this.#log.info("started a rank", { shim_pid: this.#shim_pid, engine: this.launch.engine });
  }

  #take({ phase, since_ms, detail, engine_pid, progress, exit }: ShimStatus): void {
    if (phase === "ready" && this.#status.phase !== "ready") this.#log.info("rank ready", { engine_pid });
    if (phase === "exited") this.#log.info("rank ended", { kind: exit?.kind, reason: exit?.reason });
    this.#status = { ...this.#status, phase, since_ms, detail, engine_pid, progress, exit };
    this.#context.changed();
  }

  async #end(kind: RankExit["kind"], reason: string): Promise<void> {
    const exit: RankExit = {
      at_ms: Date.now(),
      kind,
      code: null,
      signal: null,
      reason,
      last_lines: tailOf(this.folder, EXIT_LOG_LINES_COUNT),
    };
    await writeAtomic(join(this.folder, "exit.json"), JSON.stringify(exit), 0o600).catch(() => {
      // A full disk: the report says it all the same.
    });
    this.#log.info("rank ended", { kind, reason });
    this.#change({ phase: "exited", detail: reason, exit, engine_pid: null });
  }

  #change(change: Partial<RankStatus>): void {
    const since_ms = change.phase === undefined || change.phase === this.#status.phase ? this.#status.since_ms : Date.now();
    this.#status = { ...this.#status, ...change, since_ms };
    this.#context.changed();
  }

  /** Removes the sockets and, when asked, the folder of an attempt that has ended. */
  async clear(folder_too: boolean): Promise<void> {
    const sockets = socketsOf(this.#context.socket_folder, this.launch.attempt);
    await Promise.all([rm(sockets.control, { force: true }), rm(dirname(sockets.engine), { recursive: true, force: true })]);
    if (folder_too) await rm(this.folder, { recursive: true, force: true });
  }
}
