import { request as httpRequest } from "node:http";
import type { ClientRequest, IncomingMessage, ServerResponse } from "node:http";
import type { Socket } from "node:net";
import type { Peer } from "../pki/trust.ts";
import { ENGINE_CONNECT_MS, ENGINE_CONNECT_PAUSE_MS, LOG_FOLLOW_BACKLOG_BYTES } from "../protocol/limits.ts";
import { ALIVE_PATH, ATTEMPT_HEADER, DOOR_REFUSED_HEADER, LOG_PATH } from "../protocol/shim-api.ts";
import type { DoorRefusal } from "../protocol/shim-api.ts";
import type { EngineLink } from "./engine-link.ts";
import type { RankLog } from "./rank-log.ts";

/** Headers that belong to one link and are not passed on (RFC 9110 7.6.1), and what is llmgw's own. */
const NOT_PASSED_ON = new Set([
  "connection",
  "keep-alive",
  "proxy-authenticate",
  "proxy-authorization",
  "te",
  "trailer",
  "upgrade",
  "authorization",
  ATTEMPT_HEADER,
  DOOR_REFUSED_HEADER,
]);

/** What the door needs of its rank. */
interface DoorRank {
  readonly attempt: string;
  /** Null until the engine's place is known. */
  readonly engine: () => EngineLink | null;
  readonly log: RankLog;
  /** Why no request is taken now; null when the engine is ready. */
  refusal(): string | null;
}

/** One request on its way through the door. */
interface Passage {
  readonly end: () => void;
  /** Whether the next step is the engine's, and not the client's. */
  readonly isOwed: () => boolean;
}

/** The rank's side of its mutual TLS door: passes requests on to the engine, both ways as they come. */
export class Door {
  readonly #rank: DoorRank;
  readonly #open = new Set<Passage>();

  constructor(rank: DoorRank) {
    this.#rank = rank;
  }

  handle(request: IncomingMessage, response: ServerResponse, peer: Peer): void {
    const meant = request.headers[ATTEMPT_HEADER];
    if (meant !== this.#rank.attempt) {
      refuse(response, "other-attempt", "this door belongs to another attempt");
      return;
    }
    const url = new URL(request.url ?? "/", "http://door");
    if (url.pathname === ALIVE_PATH) {
      response.writeHead(204).end();
      return;
    }
    if (url.pathname === LOG_PATH) {
      if (peer.role === "server") this.#showLog(url, response);
      else refuse(response, "not-allowed", "the log is for the server");
      return;
    }
    const refusal = this.#rank.refusal();
    if (refusal === null) void this.#forward(request, response);
    else refuse(response, "not-ready", refusal);
  }

  /** Cuts off every request that is being answered. */
  cut(): void {
    for (const { end } of this.#open) end();
  }

  /** How many answers the engine owes. */
  get owed(): number {
    return [...this.#open].filter(({ isOwed }) => isOwed()).length;
  }

  async #forward(request: IncomingMessage, response: ServerResponse): Promise<void> {
    let upstream: ClientRequest | null = null;
    let answer: IncomingMessage | null = null;
    let over = false;
    const end = () => {
      upstream?.destroy();
      request.socket.destroy();
    };
    // The engine has the request, or will not take it; and its answer neither ends nor waits for the client.
    const isOwed = () =>
      upstream !== null &&
      (request.readableEnded || upstream.writableNeedDrain) &&
      (answer === null || (!answer.readableEnded && answer.readableFlowing === true));
    const passage = { end, isOwed };
    this.#open.add(passage);
    response.once("close", () => {
      over = true;
      this.#open.delete(passage);
      // The client is gone before the answer was whole: so is its wish.
      if (!response.writableFinished) upstream?.destroy();
    });
    // A stream's error that nobody listens to would end the shim, and the engine with it.
    request.on("error", end);
    response.on("error", end);
    const link = await this.#connect(() => over);
    if (over || link === null) {
      link?.destroy();
      if (!over) refuse(response, "not-ready", "the engine takes no connection");
      return;
    }
    upstream = this.#send(request, link);
    upstream.once("response", (given) => {
      answer = given;
      const passed = Object.fromEntries(Object.entries(given.headers).filter(([name]) => !NOT_PASSED_ON.has(name)));
      response.writeHead(given.statusCode ?? 502, passed);
      response.flushHeaders();
      // An engine that dies in the middle must never look like one that ended well.
      given.on("aborted", end);
      given.on("error", end);
      given.pipe(response);
    });
    upstream.on("error", () => {
      if (over || response.writableEnded) return;
      if (response.headersSent) end();
      else refuse(response, "engine-closed", "the engine closed the connection");
    });
    request.pipe(upstream);
  }

  /**
   * A connection for each request: one that an engine closes while it idles would fail the request that comes just then.
   * An engine whose queue of new connections is full is tried again for a while. Null when it takes none.
   */
  async #connect(isOver: () => boolean): Promise<Socket | null> {
    const deadline = performance.now() + ENGINE_CONNECT_MS;
    while (!isOver() && this.#rank.refusal() === null) {
      const link = (await this.#rank.engine()?.connect()) ?? null;
      if (link !== null || performance.now() > deadline) return link;
      await Bun.sleep(ENGINE_CONNECT_PAUSE_MS);
    }
    return null;
  }

  #send({ method = "GET", url = "/", headers }: IncomingMessage, link: Socket): ClientRequest {
    const passed = Object.fromEntries(Object.entries(headers).filter(([name]) => !NOT_PASSED_ON.has(name)));
    const own = { host: "engine", connection: "close", ...this.#rank.engine()?.headers };
    return httpRequest({ createConnection: () => link, method, path: url, headers: { ...passed, ...own } });
  }

  #showLog(url: URL, response: ServerResponse): void {
    const lines = Number(url.searchParams.get("lines") ?? 100);
    const follow = url.searchParams.get("follow") === "1";
    response.writeHead(200, { "content-type": "text/plain; charset=utf-8" });
    response.flushHeaders();
    for (const line of this.#rank.log.tail(lines)) response.write(`${line}\n`);
    if (!follow) {
      response.end();
      return;
    }
    response.on("error", () => {});
    const stop = this.#rank.log.follow((line) => {
      if (response.writableLength > LOG_FOLLOW_BACKLOG_BYTES) response.destroy();
      else response.write(`${line}\n`);
    });
    response.once("close", stop);
  }
}

const REFUSALS: Readonly<Record<DoorRefusal, number>> = {
  "other-attempt": 421,
  "not-allowed": 403,
  "not-ready": 503,
  "engine-closed": 502,
};

function refuse(response: ServerResponse, refusal: DoorRefusal, message: string): void {
  const status = REFUSALS[refusal];
  const headers = { "content-type": "application/json", [DOOR_REFUSED_HEADER]: refusal, ...(status === 503 && { "retry-after": "1" }) };
  response.writeHead(status, headers).end(JSON.stringify({ error: { message, type: "server_error", param: null, code: refusal } }));
}
