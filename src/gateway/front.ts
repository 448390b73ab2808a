import { randomUUID } from "node:crypto";
import * as v from "valibot";
import type { Log } from "../os/log.ts";
import { messageOf } from "../protocol/errors.ts";
import { GATEWAY_IN_FLIGHT_COUNT } from "../protocol/limits.ts";
import { readBody } from "./body.ts";
import type { GatewayMetrics } from "./gateway-metrics.ts";
import { ApiError } from "./openai.ts";
import type { Relay } from "./relay.ts";
import type { Routes } from "./snapshot.ts";

/** Paths that are passed on to a replica, named by the body's `model`. */
const RELAYED = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

const Named = v.object({ model: v.string() });

/** A request id of the client's is used when it is harmless. */
const REQUEST_ID = /^[A-Za-z0-9._-]{8,128}$/;

interface FrontParts {
  readonly routes: Routes;
  readonly relay: Relay;
  readonly metrics: GatewayMetrics;
  readonly log: Log;
  /** True once the process is to end: it is alive, but not ready. */
  readonly leaving: () => boolean;
  /** Whether a snapshot may let everybody in: on loopback only. */
  readonly may_be_open: boolean;
}

/** A request while it is looked at. */
interface Visit {
  readonly request: Request;
  readonly id: string;
  readonly started_ms: number;
  /** The model asked for, once it is known to exist; a label of metrics. */
  model: string;
}

/** The users' side: who may ask what. */
export class Front {
  readonly #parts: FrontParts;
  /** Requests for replicas between their head and the end of their answer. */
  #admitted = 0;

  constructor(parts: FrontParts) {
    this.#parts = parts;
  }

  /**
   * Answers one request; never rejects.
   * @param arrived called once its body has come: from then on it may take as long as an engine does
   */
  async handle(request: Request, arrived: () => void): Promise<Response> {
    const given = request.headers.get("x-request-id") ?? "";
    const id = REQUEST_ID.test(given) ? given : `req-${randomUUID()}`;
    const visit: Visit = { request, id, started_ms: Date.now(), model: "" };
    try {
      return await this.#route(visit, urlOf(request), arrived);
    } catch (error) {
      return this.#refuse(visit, error);
    }
  }

  #refuse({ request, id, model }: Visit, error: unknown): Response {
    const { metrics, log } = this.#parts;
    if (request.signal.aborted) {
      metrics.requests.add({ model, status: "499" });
      return new Response(null, { status: 499, headers: { "x-request-id": id } });
    }
    const known = error instanceof ApiError ? error : new ApiError("internal_error", "a fault in the gateway");
    const fields = { request: id, model: model === "" ? undefined : model };
    if (known !== error) log.error("a request met a fault", { ...fields, why: messageOf(error) });
    else log.info("refused a request", { ...fields, status: known.status, code: known.code });
    metrics.requests.add({ model, status: String(known.status) });
    return known.toResponse(id);
  }

  #route(visit: Visit, url: URL, arrived: () => void): Response | Promise<Response> {
    const { request, id } = visit;
    const { pathname } = url;
    const headers = { "x-request-id": id };
    if (pathname === "/livez" || pathname === "/healthz") return new Response("ok\n", { headers });
    if (pathname === "/readyz") return this.#ready(url.searchParams.has("verbose"), headers);
    const relayed = RELAYED.includes(pathname);
    const listed = pathname === "/v1/models" || pathname.startsWith("/v1/models/");
    if (!relayed && !listed && pathname !== "/metrics") throw new ApiError("not_found", "there is no such path");
    const allow = relayed ? "POST" : "GET";
    if (request.method !== allow) throw new ApiError("method_not_allowed", `${pathname} takes ${allow}`, { allow });
    this.#authenticate(request);
    if (relayed) return this.#relay(visit, url, arrived);
    if (listed) return this.#models(pathname, headers);
    return new Response(this.#parts.metrics.render(), { headers: { ...headers, "content-type": "text/plain; version=0.0.4" } });
  }

  async #relay(visit: Visit, url: URL, arrived: () => void): Promise<Response> {
    const { request, id, started_ms } = visit;
    const { routes, relay } = this.#parts;
    if (this.#admitted >= GATEWAY_IN_FLIGHT_COUNT) {
      throw new ApiError("too_many_requests", `${GATEWAY_IN_FLIGHT_COUNT} requests are in flight`, { retry_after_s: 1 });
    }
    const over = this.#admit();
    try {
      const body = await readBody(request);
      arrived();
      const model = modelOf(body);
      if (routes.route(model)) visit.model = model;
      const { method, headers, signal } = request;
      return await relay.answer({ id, model, method, path: url.pathname + url.search, headers, body, signal, started_ms, over });
    } catch (error) {
      over();
      throw error;
    }
  }

  /** Counts a request until the returned function is called, which may be called more than once. */
  #admit(): () => void {
    this.#admitted += 1;
    let left = false;
    return () => {
      if (!left) this.#admitted -= 1;
      left = true;
    };
  }

  #authenticate(request: Request): void {
    const { routes, may_be_open } = this.#parts;
    const { snapshot } = routes;
    if (!snapshot) throw new ApiError("not_ready", "the gateway has not heard from its server yet", { retry_after_s: 5 });
    if (snapshot.auth === "none" && may_be_open) return;
    const secret = /^Bearer (\S+)$/i.exec(request.headers.get("authorization") ?? "")?.[1];
    if (secret === undefined) throw new ApiError("invalid_api_key", "no API key: send it as Authorization: Bearer KEY");
    if (!routes.keyOf(secret)) throw new ApiError("invalid_api_key", "the API key is not valid");
  }

  #models(pathname: string, headers: Record<string, string>): Response {
    const documents = this.#parts.routes.models.map(({ model, created_ms }) => ({
      id: model,
      object: "model",
      created: Math.floor(created_ms / 1_000),
      owned_by: "llmgw",
    }));
    if (pathname === "/v1/models") return Response.json({ object: "list", data: documents }, { headers });
    const name = pathname.slice("/v1/models/".length);
    // Encoded in the path: compared that way, since not every path can be decoded.
    const found = documents.find((document) => document.id === name || encodeURIComponent(document.id) === name);
    if (!found) throw new ApiError("model_not_found", "there is no such model", { param: "model" });
    return Response.json(found, { headers });
  }

  #ready(verbose: boolean, headers: Record<string, string>): Response {
    const { routes, leaving } = this.#parts;
    const checks = [
      { name: "snapshot", ok: routes.snapshot !== null },
      { name: "staying", ok: !leaving() },
    ];
    const ok = checks.every((check) => check.ok);
    const text = verbose ? checks.map((check) => `[${check.ok ? "+" : "-"}] ${check.name}\n`).join("") : ok ? "ok\n" : "not ready\n";
    return new Response(text, { status: ok ? 200 : 503, headers });
  }
}

/** Only path and query count; what a client says in its host header may be no host at all. */
function urlOf(request: Request): URL {
  const path = /^https?:\/\/[^/]*(\/[^/].*|\/)$/s.exec(request.url)?.[1];
  if (path === undefined) throw new ApiError("not_found", "there is no such path");
  return new URL(path, "http://gateway");
}

function modelOf(body: Uint8Array): string {
  let document: unknown;
  try {
    document = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(body));
  } catch {
    throw new ApiError("invalid_json", "the body is not JSON");
  }
  const named = v.safeParse(Named, document);
  if (!named.success) throw new ApiError("model_required", "the body names no model", { param: "model" });
  return named.output.model;
}
