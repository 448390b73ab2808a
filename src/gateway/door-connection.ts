import { readCertificate } from "../pki/certificate.ts";
import type { Certificate } from "../pki/certificate.ts";
import type { Identity } from "../pki/identity.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { UPSTREAM_CONNECT_MS, UPSTREAM_PROBE_MS } from "../protocol/limits.ts";
import { Exchange } from "./exchange.ts";
import type { Answer } from "./exchange.ts";

type Socket = Bun.Socket<undefined>;

/**
 * One mutual TLS connection to a door, open only once the far side has proved who it is. Carries one request at a time.
 */
export class DoorConnection {
  /** Whom the far side's certificate names. */
  readonly peer: Certificate;
  readonly #socket: Socket;
  #exchange: Exchange | null = null;
  #open = true;

  private constructor(socket: Socket, peer: Certificate) {
    this.#socket = socket;
    this.peer = peer;
  }

  /**
   * Connects as `identity`. Nothing is sent before `judge` has agreed.
   * @throws OperatorError E_UNREACHABLE, E_TLS, or what `judge` says
   */
  static connect(
    hostname: string,
    port: number,
    { ca, cert, key }: Identity,
    judge: (der: Uint8Array | null) => OperatorError | null,
  ): Promise<DoorConnection> {
    const door = `${hostname}:${port}`;
    return new Promise((resolve, reject) => {
      let connection: DoorConnection | null = null;
      let raw: Socket | null = null;
      let over = false;
      const fail = (error: OperatorError) => {
        over = true;
        clearTimeout(timer);
        // First, since ending the connection calls `close` at once.
        reject(error);
        raw?.terminate();
      };
      const unreachable = (error: unknown) => fail(cannotReach(door, messageOf(error)));
      const timer = setTimeout(() => fail(cannotReach(door, `no connection within ${UPSTREAM_CONNECT_MS} ms`)), UPSTREAM_CONNECT_MS);
      Bun.connect<undefined>({
        hostname,
        port,
        // Decided below: Bun's own decision takes in host names, and a node is who its certificate names, wherever it is.
        tls: { ca, cert, key, rejectUnauthorized: false },
        socket: {
          binaryType: "uint8array",
          open: (socket) => {
            raw = socket;
            if (over) socket.terminate();
          },
          handshake: (socket, _success, fault) => {
            if (over) return;
            const shown: unknown = socket.getPeerCertificate()?.raw;
            const der = shown instanceof Uint8Array ? shown : null;
            const verdict = judge(der) ?? (isFault(fault) ? notTrusted(door, messageOf(fault)) : null);
            const peer = der && readCertificate(der);
            if (verdict || !peer || "unreadable" in peer) return fail(verdict ?? notTrusted(door, "its certificate cannot be read"));
            over = true;
            clearTimeout(timer);
            socket.setKeepAlive(true, UPSTREAM_PROBE_MS);
            socket.setNoDelay(true);
            connection = new DoorConnection(socket, peer);
            resolve(connection);
          },
          data: (_socket, bytes) => connection?.take(bytes),
          drain: () => connection?.flush(),
          error: (_socket, error) => connection?.closed(error),
          // Half a connection is of no use: who has ended has nothing more to answer.
          end: (socket) => void socket.end(),
          close: () => (connection ? connection.closed(null) : unreachable("it closed the connection during the handshake")),
          connectError: (_socket, error) => unreachable(error),
        },
      }).catch(unreachable);
    });
  }

  /** Whether it may carry a request now. */
  get idle(): boolean {
    return this.#open && this.#exchange === null;
  }

  close(): void {
    this.#open = false;
    this.#socket.terminate();
  }

  /**
   * Sends a request and waits for the head of its answer.
   * @param head the request's head, with its empty line
   * @param released called once the connection may carry another request; not when it is closed
   * @throws the signal's reason, or Error when the connection broke: the engine may have seen the request
   */
  send(head: string, body: Uint8Array, signal: AbortSignal, released: () => void): Promise<Answer> {
    return new Promise((resolve, reject) => {
      const exchange = new Exchange(this.#socket, { signal, resolve, reject }, (reusable) => {
        this.#exchange = null;
        if (!reusable) this.close();
        else if (this.#open) released();
      });
      this.#exchange = exchange;
      exchange.start(head, body);
    });
  }

  private take(bytes: Uint8Array): void {
    // An answer nobody asked for.
    if (this.#exchange === null) this.close();
    else this.#exchange.take(bytes);
  }

  private flush(): void {
    this.#exchange?.flush();
  }

  private closed(error: Error | null): void {
    this.#open = false;
    this.#exchange?.closed(error);
  }
}

/** What Bun found wrong with the certificate, less that it may not list the address. */
function isFault(fault: Error | null | undefined): boolean {
  return !!fault && (fault as NodeJS.ErrnoException).code !== "ERR_TLS_CERT_ALTNAME_INVALID";
}

const cannotReach = (door: string, why: string) =>
  new OperatorError("E_UNREACHABLE", `cannot reach ${door}`, why, "check that it runs, its address and the firewall");
const notTrusted = (door: string, why: string) =>
  new OperatorError("E_TLS", `${door} is not trusted`, why, "check the address, the CA file and both clocks");
