import { judge } from "../pki/dial.ts";
import type { Identity } from "../pki/identity.ts";
import { messageOf, explain } from "../protocol/errors.ts";
import type { Target } from "../protocol/gateway-api.ts";
import { UPSTREAM_IDLE_COUNT, UPSTREAM_IDLE_MS } from "../protocol/limits.ts";
import type { Revocation } from "../protocol/plan.ts";
import { isRevoked } from "../protocol/plan.ts";
import { ATTEMPT_HEADER, DOOR_REFUSED_HEADER } from "../protocol/shim-api.ts";
import { DoorConnection } from "./door-connection.ts";
import type { Answer } from "./exchange.ts";

/** A request as it goes to an engine. */
interface UpstreamRequest {
  readonly method: string;
  /** Path and query. */
  readonly path: string;
  readonly headers: Headers;
  readonly body: Uint8Array;
  readonly signal: AbortSignal;
}

/** What became of it: an answer, or a failure and whether the engine can have seen the request. */
export type UpstreamOutcome =
  { readonly kind: "answer"; readonly answer: Answer } | { readonly kind: "failed"; readonly why: string; readonly unseen: boolean };

/** How the gateway speaks to engines. One small interface, so that another client can take its place. */
export interface Upstream {
  /** Never rejects but with the signal's reason. */
  send(target: Target, request: UpstreamRequest): Promise<UpstreamOutcome>;
}

interface DoorsOptions {
  readonly identity: Identity;
  /** Names whose certificates are trusted no longer; asked at each request. */
  readonly revocations: () => readonly Revocation[];
}

interface Kept {
  readonly connection: DoorConnection;
  readonly timer: Timer;
}

/** Speaks to the doors of shims over mutual TLS connections that are kept for the next request. */
export class Doors implements Upstream {
  readonly #revocations: () => readonly Revocation[];
  #identity: Identity;
  /** Unused connections by address, the last used last. */
  readonly #kept = new Map<string, Kept[]>();

  constructor({ identity, revocations }: DoorsOptions) {
    this.#identity = identity;
    this.#revocations = revocations;
  }

  /** Shows another certificate from the next request on. */
  setIdentity(identity: Identity): void {
    this.#identity = identity;
    this.close();
  }

  /** Ends the connections no request is on. */
  close(): void {
    for (const kept of [...this.#kept.values()].flat()) this.#drop(kept);
    this.#kept.clear();
  }

  async send(target: Target, request: UpstreamRequest): Promise<UpstreamOutcome> {
    const { signal } = request;
    signal.throwIfAborted();
    let connection = this.#take(target);
    if (!connection) {
      try {
        connection = await this.#connect(target);
      } catch (error) {
        signal.throwIfAborted();
        return { kind: "failed", why: explain(error), unseen: true };
      }
    }
    const { identity, used } = { identity: this.#identity, used: connection };
    try {
      const head = headOf(request, target);
      const answer = await connection.send(head, request.body, signal, () => this.#keep(target, used, identity));
      const refused = answer.headers.get(DOOR_REFUSED_HEADER);
      if (refused === null) return { kind: "answer", answer };
      // A door's own words are few: the connection is good for the next request once they are read.
      while ((await answer.body.read()) !== null);
      return { kind: "failed", why: `its door refused: ${refused}`, unseen: refused !== "engine-closed" };
    } catch (error) {
      signal.throwIfAborted();
      return { kind: "failed", why: messageOf(error), unseen: false };
    }
  }

  #connect(target: Target): Promise<DoorConnection> {
    const { ca } = this.#identity;
    const expected = { role: "node", name: target.node } as const;
    return DoorConnection.connect(target.address, target.port, this.#identity, (der) =>
      judge(der, ca, expected, addressOf(target), { now_ms: Date.now(), revocations: this.#revocations() }),
    );
  }

  /** A kept connection to the target, still trusted to be it. */
  #take(target: Target): DoorConnection | null {
    const address = addressOf(target);
    const list = this.#kept.get(address);
    for (;;) {
      const kept = list?.pop();
      if (list?.length === 0) this.#kept.delete(address);
      if (!kept) return null;
      clearTimeout(kept.timer);
      const { connection } = kept;
      if (connection.idle && this.#trusts(connection, target.node)) return connection;
      connection.close();
    }
  }

  #trusts({ peer }: DoorConnection, name: string): boolean {
    if (peer.name !== name || peer.expires_ms <= Date.now()) return false;
    return !isRevoked(this.#revocations(), peer);
  }

  #keep(target: Target, connection: DoorConnection, identity: Identity): void {
    const address = addressOf(target);
    const list = this.#kept.get(address) ?? [];
    if (identity !== this.#identity || list.length >= UPSTREAM_IDLE_COUNT) return connection.close();
    this.#kept.set(address, list);
    const kept: Kept = {
      connection,
      timer: setTimeout(() => {
        list.splice(list.indexOf(kept), 1);
        if (list.length === 0) this.#kept.delete(address);
        connection.close();
      }, UPSTREAM_IDLE_MS),
    };
    kept.timer.unref();
    list.push(kept);
  }

  #drop({ connection, timer }: Kept): void {
    clearTimeout(timer);
    connection.close();
  }
}

function addressOf({ address, port }: Target): string {
  return address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`;
}

/** The head of a request; what Headers holds has no line ends. */
function headOf({ method, path, headers, body }: UpstreamRequest, target: Target): string {
  const lines = [`${method} ${path} HTTP/1.1`, `host: ${addressOf(target)}`];
  headers.forEach((value, name) => lines.push(`${name}: ${value}`));
  lines.push(`${ATTEMPT_HEADER}: ${target.attempt}`, `content-length: ${body.byteLength}`, "", "");
  return lines.join("\r\n");
}
