import { chooseTarget } from "../core/routing.ts";
import type { Target } from "../protocol/gateway-api.ts";
import { STARTING_WAIT_MS, STARTING_WAITERS_COUNT } from "../protocol/limits.ts";
import { ApiError } from "./openai.ts";
import { namedBy, Passage } from "./passage.ts";
import type { Asked, PassageParts } from "./passage.ts";
import type { Routes } from "./snapshot.ts";
import type { Upstream } from "./upstream.ts";

/** One request of a user, read and allowed. */
interface Wish extends Asked {
  readonly method: string;
  readonly path: string;
  readonly headers: Headers;
  readonly body: Uint8Array;
  /** Called once its answer has ended, however it ended; not when `answer` throws. */
  readonly over: () => void;
}

interface RelayParts extends PassageParts {
  readonly routes: Routes;
  readonly upstream: Upstream;
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
  "proxy-connection",
  "te",
  "trailer",
  "transfer-encoding",
  "upgrade",
  "content-length",
  "expect",
];

/** Passes requests on to replicas and answers back, byte for byte. */
export class Relay {
  readonly #parts: RelayParts;
  readonly #waiters = new Map<string, number>();
  #tick = 0;

  constructor(parts: RelayParts) {
    this.#parts = parts;
  }

  /**
   * Answers a request. Another replica is tried only while nothing of the request can have reached an engine.
   * @throws ApiError when no replica answers; the signal's reason when the user is gone
   */
  async answer(wish: Wish): Promise<Response> {
    const { loads, metrics, log, upstream } = this.#parts;
    const { id, model, signal, started_ms, over } = wish;
    const request = { method: wish.method, path: wish.path, headers: sentHeaders(wish), body: wish.body, signal };
    const tried = new Set<string>();
    for (;;) {
      const target = await this.#target(wish, tried);
      if (tried.size > 0) metrics.retries.add({ model });
      const end = loads.begin(target);
      let passed = false;
      try {
        const outcome = await upstream.send(target, request);
        if (outcome.kind === "answer") {
          const release = () => {
            end();
            over();
          };
          const passage = new Passage(this.#parts, { id, model, signal, started_ms }, target, outcome.answer, release);
          passed = true;
          return await passage.respond();
        }
        const { why } = outcome;
        loads.failed(target, outcome.unseen ? why : null, Date.now());
        metrics.upstream_failures.add({ model });
        log.warn("a replica failed a request", { request: id, model, replica: target.replica, why });
        if (!outcome.unseen) throw new ApiError("upstream_failed", "the replica failed before it answered");
        tried.add(target.attempt);
      } finally {
        if (!passed) end();
      }
    }
  }

  /** Where the request goes; waits for a replica that is starting, as long and as many as the limits allow. */
  async #target(wish: Wish, tried: ReadonlySet<string>): Promise<Target> {
    const { routes, loads } = this.#parts;
    const until_ms = Date.now() + STARTING_WAIT_MS;
    for (;;) {
      const route = routes.route(wish.model);
      if (!route) throw new ApiError("model_not_found", `The model \`${wish.model}\` does not exist`, { param: "model" });
      this.#tick += 1;
      const target = chooseTarget(route.targets, (it) => loads.stateOf(it), tried, this.#tick, Date.now());
      if (target) return target;
      const left_ms = until_ms - Date.now();
      const waiting = this.#waiters.get(wish.model) ?? 0;
      if (!route.starting || left_ms <= 0 || waiting >= STARTING_WAITERS_COUNT) throw notReady(wish.model, route.starting, tried.size);
      this.#waiters.set(wish.model, waiting + 1);
      await routes.changed(left_ms, wish.signal);
      const still = (this.#waiters.get(wish.model) ?? 1) - 1;
      if (still > 0) this.#waiters.set(wish.model, still);
      else this.#waiters.delete(wish.model);
      wish.signal.throwIfAborted();
    }
  }
}

/** Addresses and reasons are for the log: a user has no use for them. */
function notReady(model: string, starting: boolean, tried: number): ApiError {
  const text = starting ? `a replica of \`${model}\` is starting` : `no replica of \`${model}\` is ready`;
  const more = tried === 0 ? "" : `; ${tried} could not be reached`;
  return new ApiError("no_replica_ready", text + more, { retry_after_s: starting ? 5 : 15 });
}

function sentHeaders({ headers, id }: Wish): Headers {
  const sent = new Headers(headers);
  for (const name of [...NOT_SENT, ...namedBy(headers)]) sent.delete(name);
  const ours = [...sent.keys()].filter((name) => name.startsWith("x-llmgw-"));
  for (const name of ours) sent.delete(name);
  if (!sent.has("accept-encoding")) sent.set("accept-encoding", "identity");
  sent.set("x-request-id", id);
  return sent;
}
