import type { Dialer } from "../pki/dial.ts";
import { OperatorError } from "../protocol/errors.ts";
import type { Target } from "../protocol/gateway-api.ts";
import { ATTEMPT_HEADER, DOOR_REFUSED_HEADER } from "../protocol/shim-api.ts";

/** A request as it goes to an engine. */
export interface UpstreamRequest {
  readonly method: string;
  /** Path and query. */
  readonly path: string;
  readonly headers: Headers;
  readonly body: Uint8Array<ArrayBuffer>;
  readonly signal: AbortSignal;
}

/** What became of it: an answer, or a failure and whether the engine can have seen the request. */
export type UpstreamOutcome =
  { readonly kind: "answer"; readonly response: Response } | { readonly kind: "failed"; readonly why: string; readonly unseen: boolean };

/** How the gateway speaks to engines. One small interface, so that a faster client can take its place. */
export interface Upstream {
  /** Never rejects but with the signal's reason. */
  send(target: Target, request: UpstreamRequest): Promise<UpstreamOutcome>;
}

/** With these nothing was sent: the connection was never made. */
const NEVER_CONNECTED: readonly unknown[] = ["ConnectionRefused", "ECONNREFUSED", "FailedToOpenSocket", "EHOSTUNREACH", "ENETUNREACH"];

/** Speaks through the mutual TLS dialer. */
export function makeUpstream(dialer: Dialer): Upstream {
  return {
    send: async (target, { method, path, headers, body, signal }) => {
      const sent = new Headers(headers);
      sent.set(ATTEMPT_HEADER, target.attempt);
      const host = target.address.includes(":") ? `[${target.address}]` : target.address;
      try {
        const response = await dialer.request(`https://${host}:${target.port}${path}`, {
          method,
          headers: sent,
          body: method === "GET" ? null : body,
          signal,
          expect: { role: "node", name: target.node },
        });
        const refused = response.headers.get(DOOR_REFUSED_HEADER);
        if (refused === null) return { kind: "answer", response };
        await response.body?.cancel();
        return { kind: "failed", why: `its door refused: ${refused}`, unseen: refused !== "engine-closed" };
      } catch (error) {
        signal.throwIfAborted();
        const known = error instanceof OperatorError ? error : null;
        const cause = (known?.cause as { readonly code?: unknown } | undefined)?.code;
        // Before the far side has proved who it is, nothing of the request leaves.
        const unseen = known?.code === "E_IDENTITY" || known?.code === "E_TLS" || NEVER_CONNECTED.includes(cause);
        return { kind: "failed", why: known ? `${known.message}: ${known.why}` : String(error), unseen };
      }
    },
  };
}
