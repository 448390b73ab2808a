import type { EventEmitter } from "node:events";
import { createServer as createHttpServer } from "node:http";
import type { IncomingMessage, ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { createServer as createTlsServer } from "node:tls";
import type { TLSSocket } from "node:tls";
import type { Log } from "../os/log.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { ErrorCode } from "../protocol/errors.ts";
import type { Role } from "../protocol/ids.ts";
import * as limits from "../protocol/limits.ts";
import { readCertificate } from "./certificate.ts";
import type { Identity } from "./identity.ts";
import type { Peer, Trust } from "./trust.ts";

/** Own timers of a door, in ms; Bun applies none to sockets that are handed over. */
interface DoorTimers {
  readonly handshake_ms: number;
  readonly headers_ms: number;
  readonly body_ms: number;
  readonly idle_ms: number;
}

const TIMERS: DoorTimers = {
  handshake_ms: limits.HANDSHAKE_MS,
  headers_ms: limits.HEADERS_MS,
  body_ms: limits.BODY_MS,
  idle_ms: limits.IDLE_CONNECTION_MS,
};

export interface ListenerOptions {
  readonly host: string;
  /** 0 = any free one. */
  readonly port: number;
  readonly identity: Identity;
  readonly trust: Trust;
  readonly roles: readonly Role[];
  readonly log: Log;
  readonly now: () => number;
  readonly handle: (request: IncomingMessage, response: ServerResponse, peer: Peer) => void | Promise<void>;
  readonly timers?: DoorTimers;
  readonly max_connections?: number;
}

export interface PeerListener {
  readonly port: number;
  /** Shows another certificate from the next handshake on. */
  setIdentity(identity: Identity): void;
  /** Ends the connections of all peers that match, in the middle of what they do. */
  dropPeers(match: (peer: Peer) => boolean): void;
  close(): Promise<void>;
}

/** One connection: who it is, and the timer of what it has to do next. */
interface Connection {
  readonly socket: TLSSocket;
  peer: Peer | null;
  timer: Timer | null;
  /** Requests whose answers are not over; several when a client pipelines. */
  in_progress: number;
}

/** A connection whose TLS handshake is not over. */
interface Handshake {
  /** Taken when it came: a socket that failed no longer tells. */
  readonly address: string;
  readonly timer: Timer;
}

/**
 * A mutual TLS door. Whoever is not admitted by `trust` gets its connection ended before a request is read, with one
 * log line; admission is asked again for every request. Slow handshakes, headers, bodies and idle connections are
 * ended by own timers; a request in progress may take as long as it likes.
 * @throws OperatorError E_TLS when the environment turns verification off, E_EXISTS when the port is taken
 */
export async function listenMutualTls(options: ListenerOptions): Promise<PeerListener> {
  refuseUnsafeEnvironment();
  const { identity, log } = options;
  const door = new Door(options);
  const server = createTlsServer(
    { cert: identity.cert, key: identity.key, ca: identity.ca, requestCert: true, rejectUnauthorized: true, minVersion: "TLSv1.2" },
    (socket) => door.welcome(socket),
  );
  server.on("connection", (raw) => door.handshake(raw));
  server.on("tlsClientError", (error, socket) => door.failed(error, socket));
  await listening(server, options.host, options.port);
  server.on("error", (error) => log.error("the listener failed", { why: messageOf(error) }));
  return {
    port: (server.address() as AddressInfo).port,
    setIdentity: (next) => server.setSecureContext({ cert: next.cert, key: next.key, ca: next.ca }),
    dropPeers: (match) => door.drop(match),
    close: async () => {
      const closed = new Promise<void>((resolve) => server.close(() => resolve()));
      door.drop(() => true);
      // Bun's close waits for sockets it no longer knows; what is ours has just been ended.
      await Promise.race([closed, Bun.sleep(1_000)]);
    },
  };
}

/** NODE_TLS_REJECT_UNAUTHORIZED=0 would turn off the check of client certificates too. */
export function refuseUnsafeEnvironment(): void {
  if (process.env["NODE_TLS_REJECT_UNAUTHORIZED"] === undefined) return;
  const why = "NODE_TLS_REJECT_UNAUTHORIZED is set, which turns the check of certificates off";
  throw new OperatorError("E_TLS", "mutual TLS is not possible here", why, "unset NODE_TLS_REJECT_UNAUTHORIZED and start again");
}

async function listening(server: ReturnType<typeof createTlsServer>, host: string, port: number): Promise<void> {
  await new Promise<void>((resolve, reject) => {
    server.once("error", (error: NodeJS.ErrnoException) => {
      const taken = error.code === "EADDRINUSE";
      const remedy = taken ? `find what listens there: ss -ltnp 'sport = :${port}'` : "check that the address is one of this machine's";
      reject(
        new OperatorError(taken ? "E_EXISTS" : "E_UNREACHABLE", `cannot listen on ${host}:${port}`, messageOf(error), remedy, {
          cause: error,
        }),
      );
    });
    server.listen(port, host, resolve);
  });
}

/** What the TLS layer's codes mean at a door; other failures speak for themselves. */
const HANDSHAKE_FAILURES: Readonly<Record<string, string>> = {
  ERR_SSL_PEER_DID_NOT_RETURN_A_CERTIFICATE: "it showed no certificate",
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: "it was issued by another authority",
  UNABLE_TO_GET_ISSUER_CERT: "it was issued by another authority",
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: "it was issued by another authority",
  DEPTH_ZERO_SELF_SIGNED_CERT: "it was signed by itself",
  SELF_SIGNED_CERT_IN_CHAIN: "it was issued by another authority",
  CERT_SIGNATURE_FAILURE: "its signature is not that of the authority",
  CERT_HAS_EXPIRED: "it expired",
  CERT_NOT_YET_VALID: "it is not valid yet: check the clocks",
};

/** The certificate the far side showed, DER; there too when the handshake failed over it. */
function shownBy(socket: TLSSocket): Uint8Array | null {
  const raw: unknown = socket.getPeerCertificate()?.raw;
  return raw instanceof Uint8Array ? raw : null;
}

/** The far side went before both had agreed on a cipher: a look at the port, as load balancers and doctor take, and no refusal of ours. */
function leftUnsaid(error: Error, socket: TLSSocket): boolean {
  const cipher = socket.getCipher() as { readonly name: string | null } | null | undefined;
  return (error as NodeJS.ErrnoException).code === "ECONNRESET" && cipher?.name === null;
}

function addressOf(socket: { readonly remoteAddress?: string | undefined }): string {
  return socket.remoteAddress ?? "unknown";
}

/** The state of one door: its connections, their timers and peers. */
class Door {
  readonly #options: ListenerOptions;
  readonly #timers: DoorTimers;
  readonly #connections = new Map<EventEmitter, Connection>();
  readonly #handshakes = new Map<EventEmitter, Handshake>();
  /** Ended by this door in the middle of the handshake: the failure that follows has been told. */
  readonly #cut = new WeakSet<EventEmitter>();
  readonly #http;

  constructor(options: ListenerOptions) {
    this.#options = options;
    this.#timers = options.timers ?? TIMERS;
    this.#http = createHttpServer({ keepAliveTimeout: 0, requestTimeout: 0, headersTimeout: 0 }, (request, response) =>
      this.#request(request, response),
    );
    this.#http.on("clientError", (_error, socket) => socket.destroy());
  }

  /** A TCP connection: its handshake has to end in time. */
  handshake(raw: EventEmitter & { destroy(): void; remoteAddress?: string | undefined }): void {
    const { log, max_connections = limits.CONTROL_CONNECTIONS_COUNT } = this.#options;
    if (this.#connections.size + this.#handshakes.size >= max_connections) {
      log.warn("refused a connection: there are too many", { limit: max_connections, address: addressOf(raw) });
      this.#cut.add(raw);
      raw.destroy();
      return;
    }
    const address = addressOf(raw);
    const timer = setTimeout(() => {
      log.warn("ended a connection: its TLS handshake took too long", { address });
      this.#cut.add(raw);
      raw.destroy();
    }, this.#timers.handshake_ms);
    this.#handshakes.set(raw, { address, timer });
    raw.once("close", () => this.#shaken(raw));
  }

  /** The handshake is over, one way or the other. Under Bun the socket of the `connection` event is the TLS socket itself. */
  #shaken(socket: EventEmitter): void {
    clearTimeout(this.#handshakes.get(socket)?.timer);
    this.#handshakes.delete(socket);
  }

  /** The TLS layer refused; what the certificate says of itself goes into the log, though nothing of it is proved. */
  failed(error: Error, socket: TLSSocket): void {
    if (this.#cut.has(socket)) return;
    const address = this.#handshakes.get(socket)?.address ?? addressOf(socket);
    if (leftUnsaid(error, socket)) {
      this.#options.log.debug("a connection ended before its TLS handshake began", { address });
      socket.destroy();
      return;
    }
    const shown = shownBy(socket);
    const certificate = shown && readCertificate(shown);
    const { name, role, serial } = certificate && !("unreadable" in certificate) ? certificate : {};
    const why = HANDSHAKE_FAILURES[(error as NodeJS.ErrnoException).code ?? ""] ?? messageOf(error);
    this.#options.log.warn("refused a connection: the TLS handshake failed", { certificate: name, role, serial, why, address });
    socket.destroy();
  }

  /** A connection whose handshake is done: admitted, it may speak. */
  welcome(socket: TLSSocket): void {
    this.#shaken(socket);
    const connection: Connection = { socket, peer: null, timer: null, in_progress: 0 };
    socket.on("error", () => socket.destroy());
    if (!this.#admit(connection)) {
      socket.destroy();
      return;
    }
    this.#connections.set(socket, connection);
    socket.once("close", () => {
      this.#connections.delete(socket);
      if (connection.timer) clearTimeout(connection.timer);
    });
    this.#arm(connection, this.#timers.headers_ms, "its first request took too long");
    this.#http.emit("connection", socket);
  }

  drop(match: (peer: Peer) => boolean): void {
    for (const { socket, peer } of this.#connections.values()) if (peer && match(peer)) socket.destroy();
  }

  /**
   * Own verdict on the certificate, whatever the TLS layer thought of it; says no in the log. Bun 1.4.5 shows the
   * certificate on resumed sessions as well (tried with TLS 1.2 and 1.3), so resumption may stay on; were it hidden,
   * nobody would be admitted.
   */
  #admit(connection: Connection): boolean {
    const { trust, roles, log, now } = this.#options;
    const { socket } = connection;
    const refuse = ({ name, role, serial }: Pick<Peer, "name" | "serial"> & { role?: Role | "" }, why: string, code: ErrorCode) => {
      log.warn("refused a connection", { certificate: name, role, serial, why, code, address: addressOf(socket) });
      return false;
    };
    const verdict = trust.admit(shownBy(socket), roles, addressOf(socket), now());
    if ("refused" in verdict) return refuse(verdict, verdict.refused, verdict.code);
    if (!socket.authorized) return refuse(verdict, messageOf(socket.authorizationError), "E_TLS");
    connection.peer = verdict;
    return true;
  }

  #arm(connection: Connection, wait_ms: number, why: string | null): void {
    if (connection.timer) clearTimeout(connection.timer);
    connection.timer = setTimeout(() => {
      if (why !== null)
        this.#options.log.warn(`ended a connection: ${why}`, { certificate: connection.peer?.name, address: addressOf(connection.socket) });
      connection.socket.destroy();
    }, wait_ms);
  }

  #request(request: IncomingMessage, response: ServerResponse): void {
    const connection = this.#connections.get(request.socket);
    if (!connection || !this.#admit(connection) || connection.peer === null) {
      request.socket.destroy();
      return;
    }
    const { handle, log } = this.#options;
    connection.in_progress += 1;
    this.#arm(connection, this.#timers.body_ms, "the body of its request took too long");
    const arrived = () => {
      // The rest of a body may come after its answer was given; by then the idle timer runs.
      if (connection.in_progress === 0) return;
      if (connection.timer) clearTimeout(connection.timer);
      connection.timer = null;
    };
    request.once("end", arrived);
    if (request.headers["content-length"] === undefined && request.headers["transfer-encoding"] === undefined) arrived();
    response.once("close", () => {
      connection.in_progress -= 1;
      if (connection.in_progress === 0 && this.#connections.has(connection.socket)) this.#arm(connection, this.#timers.idle_ms, null);
    });
    Promise.resolve()
      .then(() => handle(request, response, connection.peer as Peer))
      .catch((error: unknown) => {
        // A client that went away in the middle is its own affair.
        const say = this.#connections.has(connection.socket) ? log.error : log.debug;
        say("a request failed", { why: messageOf(error), path: request.url?.split("?")[0], certificate: connection.peer?.name });
        if (response.headersSent) request.socket.destroy();
        else response.writeHead(500, { "content-type": "application/json" }).end(JSON.stringify(wireOf(error)));
      });
  }
}

function wireOf(error: unknown): unknown {
  if (error instanceof OperatorError) return error.toWire();
  return new OperatorError("E_INTERNAL", "the request failed", "a fault in llmgw itself", "see the log of the other side").toWire();
}
