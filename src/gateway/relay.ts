import { chooseTarget } from "../core/routing.ts";
import type { Log } from "../os/log.ts";
import { messageOf } from "../protocol/errors.ts";
import type { Target } from "../protocol/gateway-api.ts";
import { BUFFERED_ANSWER_BYTES, STARTING_WAIT_MS, STARTING_WAITERS_COUNT } from "../protocol/limits.ts";
import type { GatewayMetrics } from "./gateway-metrics.ts";
import type { Loads } from "./loads.ts";
import { ApiError } from "./openai.ts";
import type { Routes } from "./snapshot.ts";
import type { Upstream } from "./upstream.ts";
import { usageOf, UsageReader } from "./usage.ts";

/** One request of a user, read and allowed. */
export interface Wish {
  readonly id: string;
  readonly model: string;
  readonly method: string;
  readonly path: string;
  readonly headers: Headers;
  readonly body: Uint8Array<ArrayBuffer>;
  /** Aborts when the user is gone. */
  readonly signal: AbortSignal;
  readonly started_ms: number;
}

/** Headers of a request that end at the gateway (RFC 9110 7.6.1, and what proves the user to us alone). */
const NOT_SENT = [
  "authorization",
  "x-api-key",
  "cookie",
  "host",
  "connection",
  "keep-alive",
  "proxy-authorization",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
  "content-length",
  "expect",
];
const NOT_RETURNED = ["connection", "keep-alive", "transfer-encoding", "trailer", "upgrade", "date"];

/** Passes requests on to replicas and answers back, byte for byte. */
export class Relay {
  readonly #routes: Routes;
  readonly #loads: Loads;
  readonly #upstream: Upstream;
  readonly #metrics: GatewayMetrics;
  readonly #log: Log;
  readonly #waiters = new Map<string, number>();
  #tick = 0;

  constructor(routes: Routes, loads: Loads, upstream: Upstream, metrics: GatewayMetrics, log: Log) {
    this.#routes = routes;
    this.#loads = loads;
    this.#upstream = upstream;
    this.#metrics = metrics;
    this.#log = log;
  }

  /**
   * Answers a request. Another replica is tried only while nothing of the request can have reached an engine.
   * @throws ApiError when no replica answers
   */
  async answer(wish: Wish): Promise<Response> {
    const tried = new Set<string>();
    let why = "";
    for (;;) {
      const target = await this.#target(wish, tried, why);
      const end = this.#loads.begin(target);
      let passed = false;
      try {
        const outcome = await this.#upstream.send(target, { ...wish, headers: sentHeaders(wish) });
        if (outcome.kind === "answer") {
          passed = true;
          return await this.#pass(wish, target, outcome.response, end);
        }
        ({ why } = outcome);
        this.#loads.failed(target, outcome.unseen ? why : null, Date.now());
        this.#metrics.upstream_failures.add({ model: wish.model });
        this.#log.warn("a replica failed a request", { request: wish.id, model: wish.model, replica: target.replica, why });
        if (!outcome.unseen) throw new ApiError("upstream_failed", `the replica failed before it answered: ${why}`);
        tried.add(target.attempt);
        this.#metrics.retries.add({ model: wish.model });
      } finally {
        if (!passed) end();
      }
    }
  }

  /** Where the request goes; waits for a replica that is starting, as long and as many as the limits allow. */
  async #target(wish: Wish, tried: ReadonlySet<string>, why: string): Promise<Target> {
    const until_ms = Date.now() + STARTING_WAIT_MS;
    for (;;) {
      const route = this.#routes.route(wish.model);
      if (!route) throw new ApiError("model_not_found", `The model \`${wish.model}\` does not exist`, { param: "model" });
      this.#tick += 1;
      const target = chooseTarget(route.targets, (it) => this.#loads.stateOf(it), tried, this.#tick, Date.now());
      if (target) return target;
      const left_ms = until_ms - Date.now();
      const waiting = this.#waiters.get(wish.model) ?? 0;
      if (!route.starting || left_ms <= 0 || waiting >= STARTING_WAITERS_COUNT) throw notReady(wish.model, route.starting, why);
      this.#waiters.set(wish.model, waiting + 1);
      try {
        await this.#routes.changed(left_ms, wish.signal);
      } finally {
        this.#waiters.set(wish.model, (this.#waiters.get(wish.model) ?? 1) - 1);
      }
      wish.signal.throwIfAborted();
    }
  }

  async #pass(wish: Wish, target: Target, response: Response, end: () => void): Promise<Response> {
    const headers = returnedHeaders(response.headers, wish.id);
    const ended = (status: number) => {
      end();
      this.#metrics.requests.add({ model: wish.model, status: String(status) });
      this.#metrics.duration.observe({ model: wish.model }, (Date.now() - wish.started_ms) / 1_000);
    };
    if (response.status >= 500) this.#loads.failed(target, null, Date.now());
    else this.#loads.answered(target);
    const { body, status } = response;
    if (body === null) {
      ended(status);
      return new Response(null, { status, headers });
    }
    if (isStream(response))
      return new Response(
        this.#stream(wish, target, body, () => ended(status)),
        { status, headers },
      );
    const length = Number(response.headers.get("content-length") ?? Number.NaN);
    if (length <= BUFFERED_ANSWER_BYTES) return this.#whole(wish, target, response, headers, ended);
    return new Response(
      this.#stream(wish, target, body, () => ended(status)),
      { status, headers },
    );
  }

  /** An answer of known and modest length is read first, so that a replica that dies on it is a clean error. */
  async #whole(wish: Wish, target: Target, response: Response, headers: Headers, ended: (status: number) => void): Promise<Response> {
    try {
      const bytes = await response.arrayBuffer();
      this.#metrics.first_byte.observe({ model: wish.model }, (Date.now() - wish.started_ms) / 1_000);
      const usage = usageOf(new TextDecoder().decode(bytes));
      if (usage) this.#metrics.countTokens(wish.model, usage);
      ended(response.status);
      return new Response(bytes, { status: response.status, headers });
    } catch (error) {
      ended(wish.signal.aborted ? 499 : 502);
      wish.signal.throwIfAborted();
      this.#broke(wish, target, error);
      throw new ApiError("upstream_failed", "the replica broke off its answer");
    }
  }

  #stream(wish: Wish, target: Target, body: ReadableStream<Uint8Array>, ended: () => void): ReadableStream<Uint8Array> {
    const reader = body.getReader();
    const usage = new UsageReader();
    let first = true;
    const finish = () => {
      if (usage.usage) this.#metrics.countTokens(wish.model, usage.usage);
      usage.usage = null;
      ended();
    };
    return new ReadableStream(
      {
        pull: async (controller) => {
          try {
            const { done, value } = await reader.read();
            if (done) {
              finish();
              controller.close();
              return;
            }
            if (first) this.#metrics.first_byte.observe({ model: wish.model }, (Date.now() - wish.started_ms) / 1_000);
            first = false;
            usage.take(value);
            controller.enqueue(value);
          } catch (error) {
            finish();
            if (wish.signal.aborted) {
              controller.error(error);
              return;
            }
            this.#broke(wish, target, error);
            // The status is long sent: the last event says what happened, never a silent end.
            const event = new ApiError("upstream_failed", "the replica broke off its answer").toEvent(wish.id);
            controller.enqueue(new TextEncoder().encode(`\n\n${event}`));
            controller.close();
          }
        },
        cancel: async (reason) => {
          finish();
          await reader.cancel(reason).catch(() => {
            // It broke at the same time.
          });
        },
      },
      { highWaterMark: 0 },
    );
  }

  #broke(wish: Wish, target: Target, error: unknown): void {
    this.#loads.failed(target, null, Date.now());
    this.#metrics.upstream_failures.add({ model: wish.model });
    this.#log.warn("a replica broke off its answer", {
      request: wish.id,
      model: wish.model,
      replica: target.replica,
      why: messageOf(error),
    });
  }
}

function notReady(model: string, starting: boolean, why: string): ApiError {
  const text = starting ? `a replica of \`${model}\` is starting` : `no replica of \`${model}\` is ready`;
  return new ApiError("no_replica_ready", why === "" ? text : `${text}; the last one tried: ${why}`, { retry_after_s: starting ? 5 : 15 });
}

function isStream(response: Response): boolean {
  return response.headers.get("content-type")?.startsWith("text/event-stream") ?? false;
}

function sentHeaders({ headers, id }: Wish): Headers {
  const sent = new Headers(headers);
  for (const name of NOT_SENT) sent.delete(name);
  if (!sent.has("accept-encoding")) sent.set("accept-encoding", "identity");
  sent.set("x-request-id", id);
  return sent;
}

function returnedHeaders(headers: Headers, id: string): Headers {
  const returned = new Headers(headers);
  for (const name of NOT_RETURNED) returned.delete(name);
  returned.set("x-request-id", id);
  return returned;
}
