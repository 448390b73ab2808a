import type { IncomingMessage, ServerResponse } from "node:http";
import { makeLog } from "../../../src/os/log.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import type { Target } from "../../../src/protocol/gateway-api.ts";

/** A door without an engine behind it: the test says what it answers. */
export interface StandIn {
  readonly target: Target;
  /** The connections requests came on so far, each once. */
  readonly connections: ReadonlySet<unknown>;
  /** Ends every connection, in the middle of what it does. */
  cut(): void;
  close(): Promise<void>;
}

export type Behaviour = (request: IncomingMessage, response: ServerResponse, body: Buffer) => void;

let next = 0;

export async function standIn(identity: Identity, behave: Behaviour, more: Partial<Target> = {}): Promise<StandIn> {
  const connections = new Set<unknown>();
  const listener = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity,
    trust: new Trust(identity.ca),
    roles: ["gateway"],
    log: makeLog({ level: "error", format: "text" }),
    now: Date.now,
    handle: (request, response) => {
      connections.add(request.socket);
      const pieces: Buffer[] = [];
      request.on("data", (piece: Buffer) => pieces.push(piece));
      request.on("end", () => behave(request, response, Buffer.concat(pieces)));
    },
  });
  next += 1;
  const attempt = next.toString(16).padStart(16, "0");
  return {
    target: { replica: "demo-sssss", attempt, node: identity.name, address: "127.0.0.1", port: listener.port, state: "ready", ...more },
    connections,
    cut: () => listener.dropPeers(() => true),
    close: () => listener.close(),
  };
}

/** Bytes that no encoding leaves alone by chance. */
export function oddBytes(length: number): Buffer {
  const bytes = Buffer.alloc(length);
  for (let at = 0; at < length; at++) bytes[at] = (at * 31 + (at >> 8)) & 0xff;
  return bytes;
}
