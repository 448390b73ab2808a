import { randomUUID } from "node:crypto";
import * as v from "valibot";
import type { Log } from "../os/log.ts";
import { messageOf } from "../protocol/errors.ts";
import { GATEWAY_IN_FLIGHT_COUNT, REQUEST_BODY_BYTES } from "../protocol/limits.ts";
import type { GatewayMetrics } from "./gateway-metrics.ts";
import type { Loads } from "./loads.ts";
import { ApiError } from "./openai.ts";
import type { Relay } from "./relay.ts";
import type { Routes } from "./snapshot.ts";

/** Paths that are passed on to a replica, named by the body's `model`. */
const RELAYED = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

const Named = v.object({ model: v.string() });

/** A request id of the client's is used when it is harmless. */
const REQUEST_ID = /^[A-Za-z0-9._-]{8,128}$/;

export interface FrontParts {
  readonly routes: Routes;
  readonly relay: Relay;
  readonly loads: Loads;
  readonly metrics: GatewayMetrics;
  readonly log: Log;
  /** True once the process is to end: it is alive, but not ready. */
  readonly leaving: () => boolean;
}

/** The users' side: who may ask what. */
export class Front {
  readonly #parts: FrontParts;

  constructor(parts: FrontParts) {
    this.#parts = parts;
  }

  /** Answers one request; never rejects. */
  async handle(request: Request): Promise<Response> {
    const started_ms = Date.now();
    const given = request.headers.get("x-request-id") ?? "";
    const id = REQUEST_ID.test(given) ? given : `req-${randomUUID()}`;
    const url = new URL(request.url);
    try {
      return await this.#route(request, url, id, started_ms);
    } catch (error) {
      if (request.signal.aborted) {
        this.#parts.metrics.requests.add({ model: "", status: "499" });
        return new Response(null, { status: 499 });
      }
      const known = error instanceof ApiError ? error : new ApiError("internal_error", "a fault in the gateway");
      if (known !== error) this.#parts.log.error("a request met a fault", { request: id, path: url.pathname, why: messageOf(error) });
      else this.#parts.log.info("refused a request", { request: id, path: url.pathname, status: known.status, code: known.code });
      this.#parts.metrics.requests.add({ model: "", status: String(known.status) });
      return known.toResponse(id);
    }
  }

  async #route(request: Request, url: URL, id: string, started_ms: number): Promise<Response> {
    const { pathname } = url;
    if (pathname === "/livez" || pathname === "/healthz") return new Response("ok\n");
    if (pathname === "/readyz") return this.#ready(url.searchParams.has("verbose"));
    const relayed = RELAYED.includes(pathname);
    const listed = pathname === "/v1/models" || pathname.startsWith("/v1/models/");
    if (!relayed && !listed && pathname !== "/metrics") throw new ApiError("not_found", `there is no ${pathname}`);
    const method = relayed ? "POST" : "GET";
    if (request.method !== method) throw new ApiError("method_not_allowed", `${pathname} takes ${method}`);
    this.#authenticate(request);
    if (pathname === "/metrics")
      return new Response(this.#parts.metrics.render(), { headers: { "content-type": "text/plain; version=0.0.4" } });
    if (listed) return this.#models(pathname, id);
    if (this.#parts.loads.in_flight >= GATEWAY_IN_FLIGHT_COUNT) {
      throw new ApiError("too_many_requests", `${GATEWAY_IN_FLIGHT_COUNT} requests are in flight`, { retry_after_s: 1 });
    }
    const body = await readBody(request);
    const wish = {
      id,
      model: modelOf(body),
      method,
      path: pathname + url.search,
      headers: request.headers,
      body,
      signal: request.signal,
      started_ms,
    };
    return this.#parts.relay.answer(wish);
  }

  #authenticate(request: Request): void {
    const { routes } = this.#parts;
    if (routes.snapshot?.auth === "none") return;
    const secret = /^Bearer (\S+)$/i.exec(request.headers.get("authorization") ?? "")?.[1];
    if (secret === undefined) throw new ApiError("invalid_api_key", "no API key: send it as Authorization: Bearer KEY");
    if (!routes.keyOf(secret)) throw new ApiError("invalid_api_key", "the API key is not valid");
  }

  #models(pathname: string, id: string): Response {
    const documents = this.#parts.routes.models.map(({ model, created_ms }) => ({
      id: model,
      object: "model",
      created: Math.floor(created_ms / 1_000),
      owned_by: "llmgw",
    }));
    const headers = { "x-request-id": id };
    if (pathname === "/v1/models") return Response.json({ object: "list", data: documents }, { headers });
    const name = decodeURIComponent(pathname.slice("/v1/models/".length));
    const found = documents.find((document) => document.id === name);
    if (!found) throw new ApiError("model_not_found", `The model \`${name}\` does not exist`, { param: "model" });
    return Response.json(found, { headers });
  }

  #ready(verbose: boolean): Response {
    const { routes, leaving } = this.#parts;
    const checks = [
      { name: "snapshot", ok: routes.snapshot !== null },
      { name: "staying", ok: !leaving() },
    ];
    const ok = checks.every((check) => check.ok);
    const text = verbose ? checks.map((check) => `[${check.ok ? "+" : "-"}] ${check.name}\n`).join("") : ok ? "ok\n" : "not ready\n";
    return new Response(text, { status: ok ? 200 : 503 });
  }
}

async function readBody(request: Request): Promise<Uint8Array<ArrayBuffer>> {
  const announced = Number(request.headers.get("content-length") ?? 0);
  const tooLarge = () => new ApiError("request_too_large", `a request may have ${REQUEST_BODY_BYTES} bytes`);
  if (announced > REQUEST_BODY_BYTES) throw tooLarge();
  const body = new Uint8Array(await request.arrayBuffer());
  if (body.byteLength > REQUEST_BODY_BYTES) throw tooLarge();
  return body;
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
