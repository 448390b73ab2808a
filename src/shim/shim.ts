/**
 * shim/ owns one rank: it starts the engine, opens the mutual TLS door to it, watches it, and ends it with all that
 * belongs to it. It outlives the agent and knows nothing of the server or of other ranks.
 */
import { chown, mkdir, readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import type { Engine } from "../engines/engine.ts";
import { engineOf } from "../engines/registry.ts";
import { writeAtomic } from "../os/files.ts";
import { makeLog } from "../os/log.ts";
import type { Log } from "../os/log.ts";
import { intakeOf, watchOwner } from "../os/process.ts";
import { userOf } from "../os/user.ts";
import type { UnixUser } from "../os/user.ts";
import { ownProgram } from "../os/program.ts";
import { serveUnix } from "../os/unix-http.ts";
import type { UnixServer } from "../os/unix-http.ts";
import { loadIdentity } from "../pki/identity.ts";
import { listenMutualTls } from "../pki/listener.ts";
import type { PeerListener } from "../pki/listener.ts";
import { Trust } from "../pki/trust.ts";
import type { RankExit } from "../protocol/agent-api.ts";
import { messageOf, OperatorError, parseAs, explain } from "../protocol/errors.ts";
import * as limits from "../protocol/limits.ts";
import { isRevoked } from "../protocol/plan.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { EXIT_FILE, SHIM_LOG_FILE, ShimSpec } from "../protocol/shim-api.ts";
import type { Revocation } from "../protocol/plan.ts";
import type { ShimTrust } from "../protocol/shim-api.ts";
import { controlOf } from "./control.ts";
import { Door } from "./door.ts";
import { EngineLink, endpointFor } from "./engine-link.ts";
import { EngineProcess } from "./engine-process.ts";
import type { EngineEnd } from "./engine-process.ts";
import { gangEnvironment, takenPort } from "./gang-network.ts";
import { lastLinesOf, RankLog } from "./rank-log.ts";
import { RankState } from "./rank-state.ts";
import { watchVitals } from "./vitals-watch.ts";

/** Runs one rank until it has ended; resolves when nothing of it is left. */
export async function runShim(spec_file: string): Promise<void> {
  const spec = parseAs(ShimSpec, JSON.parse(await readFile(spec_file, "utf8")), spec_file);
  const lines = new RankLog(spec.folder, limits.SHIM_LOG_BYTES, SHIM_LOG_FILE);
  const log = makeLog({ level: "info", format: "text", write: (line) => lines.add(line) });
  // A fault while serving one request must not end an engine that serves others.
  for (const event of ["uncaughtException", "unhandledRejection"] as const) {
    process.removeAllListeners(event);
    process.on(event, (error: unknown) => log.error("a fault in the shim", { why: messageOf(error) }));
  }
  await new Shim(spec, log).run();
}

class Shim {
  readonly #spec: ShimSpec;
  readonly #log: Log;
  readonly #rank_log: RankLog;
  readonly #state: RankState;
  readonly #engine: Engine;
  readonly #door: Door;
  #trust: Trust | null = null;
  #revocations: readonly Revocation[];
  #listener: PeerListener | null = null;
  #process: EngineProcess | null = null;
  #link: EngineLink | null = null;
  #last_progress_ms = Date.now();
  #stopping: string | null = null;
  #askStop: (reason: string) => void = () => {};
  readonly #stop_asked = new Promise<string>((resolve) => {
    this.#askStop = resolve;
  });

  constructor(spec: ShimSpec, log: Log) {
    const { launch, folder } = spec;
    this.#spec = spec;
    this.#revocations = spec.revocations;
    this.#log = log.with({ component: "shim", attempt: launch.attempt, replica: launch.replica });
    this.#rank_log = new RankLog(folder);
    this.#state = new RankState(launch.attempt, Date.now);
    this.#engine = engineOf(launch.engine);
    const refusal = () => {
      if (launch.rank > 0) return `this is rank ${launch.rank}, which serves nobody`;
      return this.#state.status.phase === "ready" ? null : `the replica is ${this.#state.status.phase}`;
    };
    this.#door = new Door({ attempt: launch.attempt, engine: () => this.#link, log: this.#rank_log, refusal });
  }

  async run(): Promise<void> {
    const control = await serveUnix(
      this.#spec.control_socket,
      controlOf({
        spec: this.#spec,
        state: this.#state,
        log: this.#rank_log,
        stop: (reason) => this.#stop(reason),
        trust: (trust) => this.#renew(trust),
      }),
    );
    for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => this.#stop(`the shim got ${signal}`));
    process.on("SIGHUP", () => {});
    const { owner_pid } = this.#spec;
    if (owner_pid !== null) watchOwner(owner_pid, () => this.#stop("its owner is gone"));
    const exit = await this.#live().catch((error: unknown): RankExit => this.#exit("start", explain(error), null));
    await this.#leave(exit, control);
  }

  /** From the door to the end of the engine; the exit it comes to. */
  async #live(): Promise<RankExit> {
    const { protocol } = this.#spec;
    if (protocol !== PROTOCOL && protocol !== PROTOCOL - 1) {
      return this.#exit("start", `the agent speaks protocol ${protocol}, this shim ${PROTOCOL} and the one before`, null);
    }
    const taken = (await this.#openDoor()) ?? (await this.#testPorts());
    if (taken) return taken;
    await this.#startEngine();
    const engine = this.#process as EngineProcess;
    const ended = engine.ended.then((end) => ({ end }));
    const stop = this.#stop_asked.then((reason) => ({ reason }));
    const first = await Promise.race([ended, stop, this.#becomeReady(engine.pid)]);
    const last = first === "ready" ? await Promise.race([ended, stop, this.#watchVitals(engine.pid)]) : first;
    if ("stuck" in last) return this.#endStuck(engine, last.stuck);
    if ("end" in last) return this.#engineEnded(last.end, first === "ready");
    if ("reason" in last) return this.#stopEngine(engine, last.reason);
    const end = await engine.stop(this.#engine.stop);
    return this.#exit("start", last.failed, end);
  }

  async #openDoor(): Promise<RankExit | null> {
    const { tls, launch } = this.#spec;
    const identity = await loadIdentity(tls);
    const trust = new Trust(identity.ca);
    trust.setRevocations([...this.#revocations]);
    this.#trust = trust;
    try {
      this.#listener = await listenMutualTls({
        host: launch.door.address,
        port: launch.door.port,
        identity,
        trust,
        roles: ["gateway", "server"],
        log: this.#log,
        now: Date.now,
        handle: (request, response, peer) => this.#door.handle(request, response, peer),
      });
      return null;
    } catch (error) {
      if (error instanceof OperatorError && error.code === "E_EXISTS") return this.#exit("lease", explain(error), null);
      throw error;
    }
  }

  /** The leased ports of a gang are tried before its engine needs them: one that is taken wants another lease, not a failure. */
  async #testPorts(): Promise<RankExit | null> {
    const { door, gang } = this.#spec.launch;
    const taken = gang ? await takenPort(door.address, gang.ports) : null;
    return taken === null ? null : this.#exit("lease", `port ${taken} of ${door.address} is taken`, null);
  }

  async #startEngine(): Promise<void> {
    const { launch, engine_path, engine_socket, folder, weights_path } = this.#spec;
    const user = await this.#engineUser();
    // The engine's own places: to work in, for its socket, for what it compiles, so that it can write to no other.
    const work = join(folder, "work");
    const cache = this.#spec.cache_folder ?? join(folder, "cache");
    const places = [work, join(work, "tmp"), ...(this.#engine.caches ? [cache] : []), dirname(engine_socket)];
    for (const path of places) await makeFolderFor(path, user);
    const program: readonly [string, ...string[]] = engine_path === "" ? ownProgram() : [engine_path];
    const endpoint = await endpointFor(this.#engine, launch, engine_socket);
    const link = new EngineLink(endpoint);
    this.#link = link;
    const command = this.#engine.command({ launch, program, weights_path, endpoint, folder: work, cache });
    for (const { path, text } of command.files) await writeFileFor(path, text, user);
    const env = { ...command.env, ...gangEnvironment(launch) };
    this.#process = await EngineProcess.start(
      { ...command, env },
      {
        attempt: launch.attempt,
        scrub: this.#engine.scrub,
        env: process.env,
        user,
        folder: work,
        log: this.#rank_log,
        secret: link.secret,
        onLine: (line) => this.#sawLine(line),
      },
    );
    this.#state.change({ engine_pid: this.#process.pid, detail: "the engine is loading" });
    this.#log.info("engine started", { engine_pid: this.#process.pid });
  }

  async #engineUser(): Promise<UnixUser | null> {
    const { engine_user } = this.#spec;
    if (engine_user === null) return null;
    const user = await userOf(engine_user);
    if (user === null) throw new Error(`cannot run the engine as ${engine_user}: there is no such user`);
    return user;
  }

  #sawLine(line: string): void {
    if (this.#engine.isProgress(line)) this.#sawProgress();
  }

  #sawProgress(): void {
    if (this.#state.status.phase !== "starting") return;
    this.#last_progress_ms = Date.now();
    const { progress } = this.#state.status;
    this.#state.change({ progress: { done: (progress?.done ?? 0) + 1, total: null } });
  }

  /** Loading shows in what the engine takes in even where it prints nothing for a long time. */
  async #watchIntake(session: number): Promise<void> {
    let mark = 0;
    while (this.#state.status.phase === "starting") {
      const intake = await intakeOf(session);
      if (intake >= mark + limits.LOADING_STEP_BYTES) {
        mark = intake;
        this.#sawProgress();
      }
      await Bun.sleep(limits.LOADING_POLL_MS);
    }
  }

  /** Asks the engine's probes in order until all are content, it fails one, or its time is up. */
  async #becomeReady(session: number): Promise<"ready" | { readonly failed: string }> {
    const { start_deadline_ms, rank, model } = this.#spec.launch;
    void this.#watchIntake(session);
    // The other ranks of a gang serve nothing: that they have joined shows in rank 0.
    for (const probe of rank === 0 ? this.#engine.probes : []) {
      for (;;) {
        const verdict = probe.judge(...(await this.#ask(probe.path)), model);
        if (typeof verdict === "object") return verdict;
        if (verdict === "ready") break;
        if (Date.now() - this.#last_progress_ms > start_deadline_ms) {
          return { failed: `not ready ${Math.round(start_deadline_ms / 1_000)} s after its last sign of progress` };
        }
        await Bun.sleep(limits.PROBE_INTERVAL_MS);
      }
    }
    if (this.#stopping === null && this.#state.status.phase === "starting") this.#state.change({ phase: "ready", detail: "ready" });
    return "ready";
  }

  async #ask(path: string): Promise<[number, string]> {
    return (await this.#link?.ask(path, limits.PROBE_MS)) ?? [0, ""];
  }

  async #watchVitals(session: number): Promise<{ readonly stuck: string }> {
    const { stuck_ms, launch } = this.#spec;
    const { vitals } = this.#engine;
    const stuck = await watchVitals({
      vitals,
      stuck_ms,
      session: launch.gpus.length === 0 ? session : null,
      isReady: () => this.#state.status.phase === "ready",
      owed: () => this.#door.owed,
      ask: (path) => this.#ask(path),
      cannotTell: (status) => this.#log.warn("cannot tell from its metrics whether the engine gets on", { status, path: vitals.path }),
    });
    return { stuck };
  }

  async #endStuck(engine: EngineProcess, reason: string): Promise<RankExit> {
    this.#log.warn("ending a stuck engine", { reason });
    this.#state.change({ phase: "stopping", detail: reason });
    this.#door.cut();
    return this.#exit("died", reason, await engine.stop(this.#engine.stop));
  }

  async #engineEnded(end: EngineEnd, was_ready: boolean): Promise<RankExit> {
    this.#state.change({ phase: "stopping", detail: "the engine has ended" });
    this.#door.cut();
    const how = end.signal === null ? `exited with code ${end.code}` : `was killed by ${end.signal}`;
    return this.#exit(was_ready ? "died" : "start", `the engine ${how}${was_ready ? "" : " before it was ready"}`, end);
  }

  async #stopEngine(engine: EngineProcess, reason: string): Promise<RankExit> {
    this.#state.change({ phase: "stopping", detail: reason });
    this.#door.cut();
    return this.#exit("stopped", reason, await engine.stop(this.#engine.stop));
  }

  #stop(reason: string): void {
    if (this.#stopping !== null) return;
    this.#stopping = reason;
    this.#log.info("stopping", { reason });
    this.#askStop(reason);
  }

  #exit(kind: RankExit["kind"], reason: string, end: EngineEnd | null): RankExit {
    return { at_ms: Date.now(), kind, code: end?.code ?? null, signal: end?.signal ?? null, reason, last_lines: [] };
  }

  async #leave(exit: RankExit, control: UnixServer): Promise<void> {
    const left = (await this.#process?.sweep()) ?? [];
    const reason = left.length === 0 ? exit.reason : `${exit.reason}; processes that would not end: ${left.join(" ")}`;
    const last_lines = exit.kind === "stopped" ? [] : lastLinesOf(this.#spec.folder);
    const whole: RankExit = { ...exit, reason, last_lines };
    this.#log.info("ended", { kind: exit.kind, reason });
    await writeAtomic(join(this.#spec.folder, EXIT_FILE), JSON.stringify(whole), 0o600).catch((error: unknown) => {
      this.#log.error("cannot leave exit.json", { why: messageOf(error) });
    });
    this.#state.change({ phase: "exited", detail: reason, exit: whole });
    await this.#listener?.close();
    // Who waits for the status hears of the end before the socket goes.
    await Bun.sleep(limits.SHIM_FAREWELL_MS);
    await control.close();
  }

  async #renew({ revocations }: ShimTrust): Promise<void> {
    this.#revocations = revocations;
    this.#trust?.setRevocations(revocations);
    this.#listener?.dropPeers((peer) => isRevoked(revocations, peer));
    this.#listener?.setIdentity(await loadIdentity(this.#spec.tls));
  }
}

/** Makes a folder that only its user can enter, and whoever is root; one that is there stays as it is. */
async function makeFolderFor(path: string, user: UnixUser | null): Promise<void> {
  if ((await mkdir(path, { recursive: true, mode: 0o700 })) === undefined || user === null) return;
  await chown(path, user.uid, user.gid);
}

/** Writes a file that only its user can read, from its first byte on. */
async function writeFileFor(path: string, text: string, user: UnixUser | null): Promise<void> {
  await writeAtomic(path, text, 0o600);
  if (user !== null) await chown(path, user.uid, user.gid);
}
