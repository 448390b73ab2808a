import * as v from "valibot";
import type { Log } from "../os/log.ts";
import { pause } from "../os/wakeup.ts";
import type { Dialer } from "../pki/dial.ts";
import { CLAIMED_NODE_HEADER, JoinAnswer, PollAnswer, ReportAnswer } from "../protocol/agent-api.ts";
import type { JoinRequest, PollRequest, Report, ResultMessage } from "../protocol/agent-api.ts";
import type { ErrorCode } from "../protocol/errors.ts";
import { messageOf, OperatorError, parseAs, WireError } from "../protocol/errors.ts";
import { explain } from "../protocol/errors.ts";
import { BLOCKING_QUERY_MS, RECONNECT_FIRST_MS, RECONNECT_MAX_MS } from "../protocol/limits.ts";

/** A server has this long for an answer beyond any wait it was asked for, in ms. */
const PATIENCE_MS = 15_000;

/** Errors that another try in a moment will not mend: they wait the longest. */
const SLOW_CODES: readonly ErrorCode[] = ["E_IDENTITY", "E_REVOKED", "E_DUPLICATE_NODE", "E_NOT_ALLOWED", "E_PROTOCOL", "E_TLS"];

/** One server as an agent speaks to it. Every call throws an OperatorError when it fails. */
export class ServerLink {
  readonly #dialer: Dialer;
  readonly #server: string;
  readonly #node: string;

  constructor(dialer: Dialer, server: string, node: string) {
    this.#dialer = dialer;
    this.#server = server;
    this.#node = node;
  }

  join(request: JoinRequest, signal: AbortSignal): Promise<JoinAnswer> {
    return this.#post("join", request, JoinAnswer, PATIENCE_MS, signal);
  }

  poll(request: PollRequest, signal: AbortSignal): Promise<PollAnswer> {
    return this.#post("poll", request, PollAnswer, BLOCKING_QUERY_MS + PATIENCE_MS, signal);
  }

  report(request: Report, signal: AbortSignal): Promise<ReportAnswer> {
    return this.#post("report", request, ReportAnswer, PATIENCE_MS, signal);
  }

  async result(id: string, message: ResultMessage, signal: AbortSignal): Promise<void> {
    await this.#post(`results/${encodeURIComponent(id)}`, message, v.unknown(), PATIENCE_MS, signal);
  }

  async #post<S extends v.GenericSchema>(
    path: string,
    body: unknown,
    schema: S,
    within_ms: number,
    signal: AbortSignal,
  ): Promise<v.InferOutput<S>> {
    const limit = AbortSignal.timeout(within_ms);
    const url = new URL(`/agent/v1/${path}`, this.#server).href;
    let answer: Response;
    let document: unknown;
    try {
      answer = await this.#dialer.request(url, {
        method: "POST",
        headers: { "content-type": "application/json", [CLAIMED_NODE_HEADER]: this.#node },
        body: JSON.stringify(body),
        signal: AbortSignal.any([signal, limit]),
        expect: { role: "server" },
      });
      document = await answer.json();
    } catch (error) {
      if (error instanceof OperatorError) throw error;
      signal.throwIfAborted();
      const why = limit.aborted ? `no answer within ${within_ms / 1_000} s` : messageOf(error);
      throw new OperatorError("E_UNREACHABLE", `cannot reach ${this.#server}`, why, "check that the server runs");
    }
    if (answer.ok) return parseAs(schema, document, `the server's answer to ${path}`);
    const refusal = v.safeParse(WireError, document);
    if (refusal.success) throw OperatorError.fromWire(refusal.output);
    throw new OperatorError(
      "E_BAD_REQUEST",
      `${this.#server} answered ${answer.status}`,
      "it does not speak llmgw's agent API",
      "check the address",
    );
  }
}

/** Wait before try number `failures` to reach a server, in ms: doubled each time, a random half of it taken off. */
export function reconnectWait_ms(failures: number, slow: boolean, random: number): number {
  const full = slow ? RECONNECT_MAX_MS : Math.min(RECONNECT_MAX_MS, RECONNECT_FIRST_MS * 2 ** Math.min(failures, 30));
  return full * (1 - random / 2);
}

/**
 * Keeps a session with one of the servers for ever: `session` runs until it throws, then the next server is tried after
 * a wait. The first fault of each kind is a warning in the log, its repetitions are for debugging.
 * @param session resolves only when `signal` aborts
 */
export async function keepSession(
  servers: readonly string[],
  session: (server: string, joined: () => void) => Promise<void>,
  log: Log,
  signal: AbortSignal,
): Promise<void> {
  let failures = 0;
  let last = "";
  for (let turn = 0; !signal.aborted; turn += 1) {
    const server = servers[turn % servers.length] as string;
    let slow = false;
    try {
      await session(server, () => {
        failures = 0;
        last = "";
      });
    } catch (error) {
      if (signal.aborted) return;
      const known = error instanceof OperatorError ? error : null;
      slow = known !== null && SLOW_CODES.includes(known.code);
      const text = explain(error);
      if (text === last) log.debug("no session", { server, why: text });
      else log.warn("no session with the server; what runs goes on", { server, code: known?.code, why: text, try: known?.remedy });
      last = text;
    }
    await pause(reconnectWait_ms(failures, slow, Math.random()), signal);
    failures += 1;
  }
}
