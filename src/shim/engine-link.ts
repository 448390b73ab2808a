import { randomBytes } from "node:crypto";
import { connect } from "node:net";
import type { Socket } from "node:net";
import type { Endpoint, Engine } from "../engines/engine.ts";
import { fetchUnix } from "../os/unix-http.ts";
import { FIRST_LEASED_PORT, LAST_LEASED_PORT } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { isFree } from "./gang-network.ts";
import type { Secret } from "./rank-log.ts";

/** What stands in the log where an engine printed its key. */
const HIDDEN = "(key)";

/**
 * Where the engine of a rank is to listen. Ports of loopback are looked for from a place that follows from the door's port,
 * so that two ranks of a node that start at once do not look at the same ones.
 * @throws Error when none are free
 */
export async function endpointFor(
  { listens, spare_ports }: Pick<Engine, "listens" | "spare_ports">,
  { door, gang }: RankLaunch,
  socket: string,
): Promise<Endpoint> {
  if (listens === "socket") return { kind: "socket", path: socket };
  const wanted = 1 + spare_ports;
  const range = LAST_LEASED_PORT - FIRST_LEASED_PORT + 1;
  const { first, count } = gang?.ports ?? { first: 0, count: 0 };
  const ports: number[] = [];
  for (let step = 0; step < range && ports.length < wanted; step += 1) {
    const port = FIRST_LEASED_PORT + (((door.port - FIRST_LEASED_PORT) * wanted + step) % range);
    const own = port >= first && port < first + count;
    if (!own && (await isFree("127.0.0.1", port))) ports.push(port);
  }
  const [port, ...rest] = ports;
  if (port === undefined || ports.length < wanted) throw new Error(`${wanted} ports of 127.0.0.1 are needed, and not so many are free`);
  return { kind: "loopback", port, spare_ports: rest, key: randomBytes(32).toString("hex") };
}

/** How the shim reaches its engine, wherever that listens. */
export class EngineLink {
  readonly #endpoint: Endpoint;

  constructor(endpoint: Endpoint) {
    this.#endpoint = endpoint;
  }

  /** Headers the engine wants of whoever it is to answer. */
  get headers(): Readonly<Record<string, string>> {
    return this.#endpoint.kind === "loopback" ? { authorization: `Bearer ${this.#endpoint.key}` } : {};
  }

  /** A fresh connection; null when nobody takes it now. */
  connect(): Promise<Socket | null> {
    const { promise, resolve } = Promise.withResolvers<Socket | null>();
    const link = this.#endpoint.kind === "socket" ? connect(this.#endpoint.path) : connect(this.#endpoint.port, "127.0.0.1");
    link.once("error", () => resolve(null));
    link.once("connect", () => resolve(link));
    return promise;
  }

  /** Status and body of a GET; status 0 when there is no answer in time. */
  async ask(path: string, within_ms: number): Promise<[number, string]> {
    const init = { headers: this.headers, signal: AbortSignal.timeout(within_ms) };
    try {
      const endpoint = this.#endpoint;
      const answer =
        endpoint.kind === "socket"
          ? await fetchUnix(endpoint.path, path, init)
          : await fetch(`http://127.0.0.1:${endpoint.port}${path}`, { ...init, redirect: "error" });
      return [answer.status, await answer.text()];
    } catch {
      return [0, ""];
    }
  }

  /** The key, which engines print among the arguments they were given. */
  get secret(): Secret {
    const endpoint = this.#endpoint;
    if (endpoint.kind === "socket") return { hide: (text) => text, held_chars: 0 };
    return { hide: (text) => text.replaceAll(endpoint.key, HIDDEN), held_chars: endpoint.key.length - 1 };
  }
}
