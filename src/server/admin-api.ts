import { createHash, randomBytes, randomUUID } from "node:crypto";
import type { IncomingMessage, ServerResponse } from "node:http";
import { Readable } from "node:stream";
import type { Happening, Replica } from "../core/world.ts";
import type { Log } from "../os/log.ts";
import type { Dialer } from "../pki/dial.ts";
import type { Peer } from "../pki/trust.ts";
import { CreateKey, EngineCheckWish, NodeWish, ReplaceWish, RevokeName, ScaleWish, type CreatedKey } from "../protocol/admin-api.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { ENGINE_CHECK_MS, LISTED_EVENTS_COUNT, LOG_TAIL_LINES_COUNT, NODE_REQUEST_MS } from "../protocol/limits.ts";
import { ATTEMPT_HEADER, LOG_PATH } from "../protocol/shim-api.ts";
import type { Fleet } from "./fleet.ts";
import { engineList } from "./engine-views.ts";
import { findRoute, goneSignal, readJson, sendJson, type Route } from "./http.ts";
import type { Operations } from "./operations.ts";
import type { KeyRow, Store } from "./store.ts";
import { fabricViews, keyView, modelViews, nodeViews, replicaViews, statusView, type GatewaySeen } from "./views.ts";

interface AdminApiParts {
  readonly fleet: Fleet;
  readonly store: Store;
  readonly log: Log;
  readonly dialer: Dialer;
  readonly now: () => number;
  readonly gateway: () => GatewaySeen;
  readonly in_flight: () => ReadonlyMap<string, number> | null;
  /** What is wrong with the newest configuration; null when it is in use. */
  readonly config_fault: () => string | null;
  readonly keys: () => readonly KeyRow[];
  /** Keys changed: read them again and tell the gateway. */
  readonly keysChanged: () => Promise<void>;
  readonly reload: () => Promise<string[]>;
  readonly revoke: (name: string) => Promise<void>;
  readonly say: (event: Happening) => Promise<void>;
  readonly operations: Operations;
}

interface Call {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  readonly query: URLSearchParams;
  readonly peer: Peer;
}

const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/** `count` characters by chance; bytes beyond the last whole turn of the alphabet are thrown away. */
function randomText(count: number, alphabet = ALPHABET): string {
  let text = "";
  const bound = 256 - (256 % alphabet.length);
  while (text.length < count)
    for (const byte of randomBytes(count)) if (byte < bound && text.length < count) text += alphabet[byte % alphabet.length];
  return text;
}

/** The admins' side of the control listener. Viewers may only look. */
export class AdminApi {
  readonly #parts: AdminApiParts;
  readonly #routes: readonly Route<Call>[];

  constructor(parts: AdminApiParts) {
    this.#parts = parts;
    const { fleet, now } = parts;
    const list = (items: () => unknown) => (call: Call) => Promise.resolve(sendJson(call.response, { items: items() }));
    this.#routes = [
      { method: "GET", path: "/admin/v1/status", run: (call) => this.#status(call) },
      { method: "GET", path: "/admin/v1/nodes", run: list(() => nodeViews(fleet, now())) },
      { method: "GET", path: "/admin/v1/fabrics", run: list(() => fabricViews(fleet, now())) },
      {
        method: "GET",
        path: "/admin/v1/engines",
        run: async ({ response }) => sendJson(response, engineList(nodeViews(fleet, now()), fleet.engines())),
      },
      { method: "GET", path: "/admin/v1/models", run: list(() => modelViews(fleet, now())) },
      { method: "GET", path: "/admin/v1/replicas", run: list(() => replicaViews(fleet, parts.in_flight(), now())) },
      { method: "GET", path: "/admin/v1/replicas/:id/log", run: (call, { id = "" }) => this.#showLog(call, id) },
      { method: "GET", path: "/admin/v1/events", run: (call) => this.#events(call) },
      { method: "GET", path: "/admin/v1/keys", run: list(() => parts.keys().map(keyView)) },
      { method: "POST", path: "/admin/v1/keys", run: (call) => this.#createKey(call) },
      { method: "DELETE", path: "/admin/v1/keys/:id", run: (call, { id = "" }) => this.#revokeKey(call, id) },
      { method: "POST", path: "/admin/v1/nodes/:id/intent", run: (call, { id = "" }) => this.#wish(call, id) },
      { method: "DELETE", path: "/admin/v1/nodes/:id", run: (call, { id = "" }) => this.#removeNode(call, id) },
      {
        method: "GET",
        path: "/admin/v1/nodes/:id/drain",
        run: async ({ response }, { id = "" }) => sendJson(response, { items: parts.operations.drainSteps(id) }),
      },
      { method: "POST", path: "/admin/v1/nodes/:id/engine-check", run: (call, { id = "" }) => this.#checkEngine(call, id) },
      { method: "POST", path: "/admin/v1/replicas/:id/replace", run: (call, { id = "" }) => this.#replace(call, id) },
      { method: "POST", path: "/admin/v1/models/:id/scale", run: (call, { id = "" }) => this.#scale(call, id) },
      { method: "POST", path: "/admin/v1/thaw", run: (call) => this.#thaw(call) },
      { method: "GET", path: "/admin/v1/plan", run: (call) => this.#plan(call) },
      { method: "POST", path: "/admin/v1/reload", run: (call) => this.#reload(call) },
      { method: "POST", path: "/admin/v1/revoke", run: (call) => this.#revoke(call) },
    ];
  }

  async handle(request: IncomingMessage, response: ServerResponse, peer: Peer): Promise<void> {
    const url = new URL(request.url ?? "/", "https://server");
    const found = findRoute(this.#routes, request.method ?? "", url.pathname);
    if (!found)
      throw new OperatorError(
        "E_NOT_FOUND",
        `no ${request.method} ${url.pathname}`,
        "the admin API has no such call",
        "update the older side",
      );
    if (peer.role !== "admin" && request.method !== "GET") {
      throw new OperatorError(
        "E_NOT_ALLOWED",
        `${peer.name} may not do this`,
        "its certificate is a viewer's, which may only look",
        "use an admin's certificate: llmgw ca issue-admin",
      );
    }
    await found.route.run({ request, response, query: url.searchParams, peer }, found.params);
  }

  async #status({ response }: Call): Promise<void> {
    const { fleet, gateway, config_fault, now } = this.#parts;
    sendJson(response, statusView(fleet, gateway(), config_fault(), now()));
  }

  async #events({ response, query }: Call): Promise<void> {
    const number = (name: string, otherwise: number) => Math.max(0, Math.floor(Number(query.get(name) ?? otherwise)) || 0);
    const items = await this.#parts.store.events(number("after", 0), Math.min(number("limit", 100), LISTED_EVENTS_COUNT));
    sendJson(response, { items });
  }

  async #createKey({ request, response, peer }: Call): Promise<void> {
    const { store, now, keysChanged, say } = this.#parts;
    const { name } = await readJson(request, CreateKey, "the key to create");
    const id = randomText(8, "0123456789abcdefghijklmnopqrstuvwxyz");
    const key = `llmgw_${id}_${randomText(40)}`;
    const view = { id, name, created_ms: now(), revoked_ms: null };
    await store.addKey(view, createHash("sha256").update(key).digest("hex"));
    await say({ level: "info", kind: "key-created", subject: `key/${id}`, text: `"${name}", by ${peer.name}` });
    await keysChanged();
    sendJson(response, { ...view, key } satisfies CreatedKey, 201);
  }

  async #revokeKey({ response, peer }: Call, id: string): Promise<void> {
    const { store, now, keys, keysChanged, say } = this.#parts;
    const known = keys().find((key) => key.id === id);
    if (!known) throw new OperatorError("E_NOT_FOUND", `there is no key ${id}`, "no key has that id", "llmgw ctl keys");
    if (known.revoked_ms === null) {
      await store.revokeKey(id, now());
      await say({ level: "info", kind: "key-revoked", subject: `key/${id}`, text: `"${known.name}", by ${peer.name}` });
      await keysChanged();
    }
    sendJson(response, {});
  }

  async #removeNode({ response, query, peer }: Call, id: string): Promise<void> {
    await this.#parts.operations.remove(id, query.get("force") === "1", peer.name);
    sendJson(response, {});
  }

  async #wish({ request, response, peer }: Call, id: string): Promise<void> {
    await this.#parts.operations.wish(id, await readJson(request, NodeWish, "the wish for a node"), peer.name);
    sendJson(response, {});
  }

  async #replace({ request, response, peer }: Call, id: string): Promise<void> {
    const { how } = await readJson(request, ReplaceWish, "the wish for a replica");
    await this.#parts.operations.replace(id, how, peer.name);
    sendJson(response, {});
  }

  async #scale({ request, response, peer }: Call, model: string): Promise<void> {
    const { replicas } = await readJson(request, ScaleWish, "the number of replicas");
    await this.#parts.operations.scale(model, replicas, peer.name);
    sendJson(response, {});
  }

  async #thaw({ response, peer }: Call): Promise<void> {
    await this.#parts.operations.thaw(peer.name);
    sendJson(response, {});
  }

  async #plan({ response }: Call): Promise<void> {
    const at_ms = this.#parts.now();
    const events = await this.#parts.operations.preview();
    sendJson(response, { items: events.map((event, id) => ({ id, at_ms, ...event })) });
  }

  async #reload({ response }: Call): Promise<void> {
    sendJson(response, { changed: await this.#parts.reload() });
  }

  async #revoke({ request, response, peer }: Call): Promise<void> {
    const { name } = await readJson(request, RevokeName, "the name to revoke");
    await this.#parts.revoke(name);
    await this.#parts.say({
      level: "warn",
      kind: "certificate-revoked",
      subject: `node/${name}`,
      text: `every certificate of ${name} issued until now, by ${peer.name}`,
    });
    sendJson(response, {});
  }

  /** Lets a node check one of its engines: as long as its slowest answer may take. */
  async #checkEngine({ request, response }: Call, node: string): Promise<void> {
    const { fleet, now } = this.#parts;
    const { engine } = await readJson(request, EngineCheckWish, "the engine to check");
    if (!fleet.nodes.has(node))
      throw new OperatorError("E_NOT_FOUND", `there is no node "${node}"`, "no node of that name has joined", "llmgw ctl nodes");
    const deadline_ms = now() + ENGINE_CHECK_MS;
    const result = await fleet.ask(node, { kind: "engine-check", id: randomUUID(), deadline_ms, engine }, ENGINE_CHECK_MS);
    if (!("check" in result))
      throw new OperatorError("E_BAD_REQUEST", `node ${node} answered something else`, "it is no check", "update it");
    sendJson(response, result.check);
  }

  /** The log of a rank: from its shim's door while it lives, else what its node kept. */
  async #showLog({ response, query }: Call, id: string): Promise<void> {
    const { fleet, now } = this.#parts;
    const replica = fleet.replicas.find((candidate) => candidate.id === id);
    const rank = Number(query.get("rank") ?? 0);
    const placement = replica?.placements[rank];
    if (!replica) throw new OperatorError("E_NOT_FOUND", `there is no replica ${id}`, "no replica has that name", "llmgw ctl replicas");
    if (!placement)
      throw new OperatorError(
        "E_NOT_FOUND",
        `replica ${id} has no log of rank ${rank}`,
        replica.reason ? `it is ${replica.state}: ${replica.reason}` : `it is ${replica.state}`,
        "llmgw ctl replicas",
      );
    const lines = Math.min(Math.max(Math.floor(Number(query.get("lines") ?? 100)) || 0, 0), LOG_TAIL_LINES_COUNT);
    if (await this.#fromDoor(response, placement, lines, query.get("follow") === "1")) return;
    const deadline_ms = now() + NODE_REQUEST_MS;
    const request = { kind: "log" as const, id: randomUUID(), deadline_ms, attempt: placement.launch.attempt, lines };
    const result = await fleet.ask(placement.node, request, NODE_REQUEST_MS);
    const text = "lines" in result ? result.lines.map((line) => `${line}\n`).join("") : "";
    response.writeHead(200, { "content-type": "text/plain; charset=utf-8" }).end(text);
  }

  async #fromDoor(
    response: ServerResponse,
    { node, launch }: Replica["placements"][number],
    lines: number,
    follow: boolean,
  ): Promise<boolean> {
    const { dialer, log } = this.#parts;
    const { address, port } = launch.door;
    const host = address.includes(":") ? `[${address}]` : address;
    try {
      const answer = await dialer.request(`https://${host}:${port}${LOG_PATH}?lines=${lines}${follow ? "&follow=1" : ""}`, {
        headers: { [ATTEMPT_HEADER]: launch.attempt },
        signal: goneSignal(response),
        expect: { role: "node", name: node },
      });
      if (!answer.ok || !answer.body) return false;
      response.writeHead(200, { "content-type": "text/plain; charset=utf-8" });
      response.flushHeaders();
      Readable.fromWeb(answer.body as never)
        .on("error", () => response.destroy())
        .pipe(response);
      return true;
    } catch (error) {
      log.debug("a door does not show its log; asking the agent", { node, why: messageOf(error) });
      return false;
    }
  }
}
