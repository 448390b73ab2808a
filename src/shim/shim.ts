/**
 * shim/ owns one rank: it starts the engine, opens the mutual TLS door to it, watches it, and ends it with all that
 * belongs to it. It outlives the agent and knows nothing of the server or of other ranks.
 */
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Engine } from "../engines/engine.ts";
import { engineOf } from "../engines/registry.ts";
import { writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { ownProgram } from "../os/program.ts";
import { fetchUnix, serveUnix } from "../os/unix-http.ts";
import type { UnixServer } from "../os/unix-http.ts";
import { loadIdentity } from "../pki/identity.ts";
import { listenMutualTls } from "../pki/listener.ts";
import type { PeerListener } from "../pki/listener.ts";
import { Trust } from "../pki/trust.ts";
import type { RankExit } from "../protocol/agent-api.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { EXIT_LOG_LINES_COUNT, LOG_TAIL_LINES_COUNT, PROBE_INTERVAL_MS, PROBE_MS, SHIM_FAREWELL_MS } from "../protocol/limits.ts";
import { ShimSpec, ShimTrust, StopRequest } from "../protocol/shim-api.ts";
import { Door } from "./door.ts";
import { EngineProcess } from "./engine-process.ts";
import type { EngineEnd } from "./engine-process.ts";
import { RankLog } from "./rank-log.ts";
import { RankState } from "./rank-state.ts";

/** The file an ended attempt leaves in its folder. */
export const EXIT_FILE = "exit.json";

/** Runs one rank until it has ended; resolves when nothing of it is left. */
export async function runShim(spec_file: string, log: Log): Promise<void> {
  const spec = parseAs(ShimSpec, JSON.parse(await readFile(spec_file, "utf8")), spec_file);
  await new Shim(spec, log).run();
}

class Shim {
  readonly #spec: ShimSpec;
  readonly #log: Log;
  readonly #rank_log: RankLog;
  readonly #state: RankState;
  readonly #engine: Engine;
  readonly #door: Door;
  readonly #trust: { current: Trust | null } = { current: null };
  #listener: PeerListener | null = null;
  #process: EngineProcess | null = null;
  #last_progress_ms = Date.now();
  #stopping: string | null = null;
  #askStop: (reason: string) => void = () => {};
  readonly #stop_asked = new Promise<string>((resolve) => {
    this.#askStop = resolve;
  });

  constructor(spec: ShimSpec, log: Log) {
    const { launch, folder, engine_socket } = spec;
    this.#spec = spec;
    this.#log = log.with({ component: "shim", attempt: launch.attempt, replica: launch.replica });
    this.#rank_log = new RankLog(folder);
    this.#state = new RankState(launch.attempt, Date.now);
    this.#engine = engineOf(launch.engine);
    const refusal = () => (this.#state.status.phase === "ready" ? null : `the replica is ${this.#state.status.phase}`);
    this.#door = new Door({ attempt: launch.attempt, engine_socket, log: this.#rank_log, refusal });
  }

  async run(): Promise<void> {
    const control = await serveUnix(this.#spec.control_socket, (request) => this.#control(request));
    for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => this.#stop(`the shim got ${signal}`));
    process.on("SIGHUP", () => {});
    const { owner_pid } = this.#spec;
    if (owner_pid !== null) watchOwner(owner_pid, () => this.#stop("its owner is gone"));
    const exit = await this.#live().catch((error: unknown): RankExit => this.#exit("start", explain(error), null));
    await this.#leave(exit, control);
  }

  /** From the door to the end of the engine; the exit it comes to. */
  async #live(): Promise<RankExit> {
    const taken = await this.#openDoor();
    if (taken) return taken;
    await this.#startEngine();
    const engine = this.#process as EngineProcess;
    const ended = engine.ended.then((end) => ({ end }));
    const stop = this.#stop_asked.then((reason) => ({ reason }));
    const first = await Promise.race([ended, stop, this.#becomeReady()]);
    const last = first === "ready" ? await Promise.race([ended, stop]) : first;
    if ("end" in last) return this.#engineEnded(last.end, first === "ready");
    if ("reason" in last) return this.#stopEngine(engine, last.reason);
    const end = await engine.stop(this.#engine.stop);
    return this.#exit("start", last.failed, end);
  }

  async #openDoor(): Promise<RankExit | null> {
    const { tls, launch, revocations } = this.#spec;
    const identity = await loadIdentity(tls);
    const trust = new Trust(identity.ca);
    trust.setRevocations(revocations);
    this.#trust.current = trust;
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

  async #startEngine(): Promise<void> {
    const { launch, engine_path, engine_socket, engine_user, folder, weights_path } = this.#spec;
    const program: readonly [string, ...string[]] = engine_path === "" ? ownProgram() : [engine_path];
    const command = this.#engine.command({ launch, program, weights_path, socket: engine_socket, folder });
    this.#process = await EngineProcess.start(command, {
      attempt: launch.attempt,
      scrub: this.#engine.scrub,
      env: process.env,
      user: engine_user,
      folder,
      log: this.#rank_log,
      onLine: (line) => this.#sawLine(line),
    });
    this.#state.change({ engine_pid: this.#process.pid, detail: "the engine is loading" });
    this.#log.info("engine started", { engine_pid: this.#process.pid });
  }

  #sawLine(line: string): void {
    if (this.#state.status.phase !== "starting" || !this.#engine.isProgress(line)) return;
    this.#last_progress_ms = Date.now();
    const { progress } = this.#state.status;
    this.#state.change({ progress: { done: (progress?.done ?? 0) + 1, total: null } });
  }

  /** Asks the engine's probes in order until all are content, it fails one, or its time is up. */
  async #becomeReady(): Promise<"ready" | { readonly failed: string }> {
    const { start_deadline_ms } = this.#spec.launch;
    for (const probe of this.#engine.probes) {
      for (;;) {
        const verdict = probe.judge(...(await this.#ask(probe.path)));
        if (typeof verdict === "object") return verdict;
        if (verdict === "ready") break;
        if (Date.now() - this.#last_progress_ms > start_deadline_ms) {
          return { failed: `not ready ${Math.round(start_deadline_ms / 1_000)} s after its last sign of progress` };
        }
        await Bun.sleep(PROBE_INTERVAL_MS);
      }
    }
    if (this.#stopping === null && this.#state.status.phase === "starting") this.#state.change({ phase: "ready", detail: "ready" });
    return "ready";
  }

  async #ask(path: string): Promise<[number, string]> {
    try {
      const answer = await fetchUnix(this.#spec.engine_socket, path, { signal: AbortSignal.timeout(PROBE_MS) });
      return [answer.status, await answer.text()];
    } catch {
      return [0, ""];
    }
  }

  async #engineEnded(end: EngineEnd, was_ready: boolean): Promise<RankExit> {
    this.#state.change({ phase: "stopping", detail: "the engine has ended" });
    this.#door.cut();
    await this.#process?.sweep();
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
    const last_lines = exit.kind === "stopped" ? [] : this.#rank_log.tail(EXIT_LOG_LINES_COUNT);
    const whole: RankExit = { ...exit, last_lines };
    this.#log.info("ended", { kind: exit.kind, reason: exit.reason });
    await writeAtomic(join(this.#spec.folder, EXIT_FILE), JSON.stringify(whole), 0o600).catch((error: unknown) => {
      this.#log.error("cannot leave exit.json", { why: messageOf(error) });
    });
    this.#state.change({ phase: "exited", detail: whole.reason, exit: whole });
    await this.#listener?.close();
    // Who waits for the status hears of the end before the socket goes.
    await Bun.sleep(SHIM_FAREWELL_MS);
    await control.close();
  }

  async #control(request: Request): Promise<Response> {
    const url = new URL(request.url);
    switch (`${request.method} ${url.pathname}`) {
      case "GET /status":
        return Response.json(await this.#state.next(Number(url.searchParams.get("after") ?? 0)));
      case "POST /stop": {
        const { reason } = parseAs(StopRequest, await request.json(), "the stop request");
        this.#stop(reason);
        return Response.json({});
      }
      case "POST /trust":
        await this.#renew(parseAs(ShimTrust, await request.json(), "the trust message"));
        return Response.json({});
      case "GET /log": {
        const lines = Math.min(Number(url.searchParams.get("lines") ?? 100) || 0, LOG_TAIL_LINES_COUNT);
        return new Response(
          this.#rank_log
            .tail(lines)
            .map((line) => `${line}\n`)
            .join(""),
        );
      }
      default:
        return new Response("no such path", { status: 404 });
    }
  }

  async #renew({ revocations }: ShimTrust): Promise<void> {
    this.#trust.current?.setRevocations(revocations);
    const isRevoked = (name: string, issued_ms: number) => revocations.some((entry) => entry.name === name && issued_ms <= entry.until_ms);
    this.#listener?.dropPeers((peer) => isRevoked(peer.name, peer.issued_ms));
    this.#listener?.setIdentity(await loadIdentity(this.#spec.tls));
  }
}

function explain(error: unknown): string {
  return error instanceof OperatorError ? `${error.message}: ${error.why}` : messageOf(error);
}
