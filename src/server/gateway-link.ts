import { signalProcess, spawnDetached, startTimeOf } from "../os/process.ts";
import { ownProgram } from "../os/program.ts";
import { fetchUnix, isSilence } from "../os/unix-http.ts";
import { Wakeup } from "../os/wakeup.ts";
import type { Log } from "../os/log.ts";
import { messageOf, parseAs } from "../protocol/errors.ts";
import { GatewayStatus, type Snapshot } from "../protocol/gateway-api.ts";
import {
  BACKOFF_MAX_MS,
  DRAIN_SETTLE_MS,
  GATEWAY_ANSWER_MS,
  GATEWAY_FROZEN_MS,
  GATEWAY_RESTART_MS,
  GATEWAY_STATUS_INTERVAL_MS,
} from "../protocol/limits.ts";
import type { PlanVersion } from "../protocol/plan.ts";

interface GatewayLinkOptions {
  /** The gateway's control socket. */
  readonly socket: string;
  /** server.yaml, for the gateway this server starts; null when another starts it. */
  readonly config_file: string | null;
  readonly owner_pid: number | null;
  readonly log: Log;
  /** What the gateway is to know now. */
  readonly content: () => Omit<Snapshot, "version">;
  readonly frozen_ms?: number;
}

/**
 * Keeps one gateway process supplied: starts it when nothing answers, sends it a snapshot when what it should know
 * changed, reads back what it counts. The gateway is never ended because of the server, only when it is frozen itself.
 */
export class GatewayLink {
  readonly #options: GatewayLinkOptions;
  #status: GatewayStatus | null = null;
  #routes_ms = 0;
  #why = "not asked yet";
  #sent = "";
  readonly #wakeup = new Wakeup();
  /** The process that answered last; the start time tells it from a later one of the same number. */
  #process: { readonly pid: number; readonly start_ticks: number | null } | null = null;
  #silent_since: number | null = null;
  #starts = 0;
  #next_start_ms = 0;

  constructor(options: GatewayLinkOptions) {
    this.#options = options;
  }

  /** What the gateway last said; null while it does not answer. */
  get status(): GatewayStatus | null {
    return this.#status;
  }

  /** Why it does not answer; "" when it does. */
  get trouble(): string {
    return this.#status ? "" : this.#why;
  }

  /**
   * Requests in flight per attempt; null while nobody says. They are counted by the routes of that time, and no longer fresh
   * after a while: a replica that has drained for longer than that has left those routes.
   */
  in_flight(): ReadonlyMap<string, number> | null {
    if (Date.now() - this.#routes_ms > DRAIN_SETTLE_MS - GATEWAY_STATUS_INTERVAL_MS) return null;
    return this.#status && new Map(this.#status.loads.map((load) => [load.attempt, load.in_flight]));
  }

  /** Attempts whose doors do not answer the gateway; null while nobody says. */
  unreachable(): ReadonlySet<string> | null {
    return this.#status && new Set(this.#status.loads.flatMap((load) => (load.unreachable ? [load.attempt] : [])));
  }

  /** Something may have changed: look now. */
  poke(): void {
    this.#wakeup.raise();
  }

  async run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      this.#wakeup.clear();
      await this.#turn();
      await this.#wakeup.wait(GATEWAY_STATUS_INTERVAL_MS, signal);
    }
  }

  /** Ends the gateway of a server that is only a guest on this machine, as in a demo. */
  end(): void {
    if (this.#status) signalProcess(this.#status.pid, "SIGTERM", "leader");
  }

  async #turn(): Promise<void> {
    const { log } = this.#options;
    const before = this.#status;
    try {
      let status = await this.#ask();
      this.#silent_since = null;
      if (!before || before.pid !== status.pid) {
        log.info("the gateway answers", { gateway_pid: status.pid, gateway_version: status.llmgw_version });
        this.#sent = "";
        this.#process = { pid: status.pid, start_ticks: startTimeOf(status.pid) };
        this.#starts = 0;
      }
      const routes_ms = Date.now();
      // What was counted by older routes may miss what they have let in since.
      if (await this.#send(status.snapshot)) status = await this.#ask();
      this.#status = status;
      this.#routes_ms = routes_ms;
    } catch (error) {
      this.#why = messageOf(error);
      if (this.#status) log.error("the gateway does not answer", { why: this.#why });
      this.#status = null;
      if (isSilence(error)) this.#endFrozen();
      else {
        this.#silent_since = null;
        await this.#start();
      }
    }
  }

  /** One that is there and stands still may go on any moment, and no other can serve in its place until it is gone. */
  #endFrozen(): void {
    const { config_file, frozen_ms = GATEWAY_FROZEN_MS, log } = this.#options;
    const now = performance.now();
    this.#silent_since ??= now;
    if (config_file === null || this.#process === null || now - this.#silent_since < frozen_ms) return;
    const { pid, start_ticks } = this.#process;
    if (start_ticks === null || startTimeOf(pid) !== start_ticks) return;
    log.error("killing a gateway that is frozen", { gateway_pid: pid });
    signalProcess(pid, "SIGKILL", "leader");
  }

  /** @returns whether anything was new to the gateway */
  async #send(has: PlanVersion | null): Promise<boolean> {
    const content = this.#options.content();
    const text = JSON.stringify(content);
    if (text === this.#sent) return false;
    // This server is the only one that sends, so the next number is one more than what is there.
    const version = { epoch: has?.epoch ?? 1, generation: (has?.generation ?? 0) + 1 };
    const answer = await fetchUnix(this.#options.socket, "/snapshot", {
      method: "PUT",
      body: JSON.stringify({ ...content, version }),
      signal: AbortSignal.timeout(GATEWAY_ANSWER_MS),
    });
    if (!answer.ok) throw new Error(`it did not take a snapshot: ${await answer.text()}`);
    this.#sent = text;
    return true;
  }

  async #ask(): Promise<GatewayStatus> {
    const answer = await fetchUnix(this.#options.socket, "/status", { signal: AbortSignal.timeout(GATEWAY_ANSWER_MS) });
    return parseAs(GatewayStatus, await answer.json(), "the gateway's answer");
  }

  async #start(): Promise<void> {
    const { config_file, owner_pid, log } = this.#options;
    if (config_file === null || Date.now() < this.#next_start_ms) return;
    this.#next_start_ms = Date.now() + Math.min(BACKOFF_MAX_MS, GATEWAY_RESTART_MS * 2 ** this.#starts);
    this.#starts = Math.min(this.#starts + 1, 20);
    const owner = owner_pid === null ? [] : ["--owner-pid", String(owner_pid)];
    try {
      const pid = await spawnDetached([...ownProgram(), "gateway", "--config", config_file, ...owner], process.env, 2);
      log.info("started a gateway", { gateway_pid: pid });
    } catch (error) {
      log.error("cannot start a gateway", { why: messageOf(error) });
    }
  }
}
