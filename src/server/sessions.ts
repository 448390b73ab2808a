import type { SessionKey } from "../protocol/agent-api.ts";
import { OperatorError } from "../protocol/errors.ts";
import { DUPLICATE_NODE_WINDOW_MS } from "../protocol/limits.ts";

/** One agent's session with this server. */
export interface Session {
  readonly id: string;
  readonly key: SessionKey;
  readonly serial: string;
  readonly address: string;
  /** Number of the last report that counted. */
  seq: number;
  /** Number of the join it began with. */
  readonly joins: number;
  last_seen_ms: number;
  /** True once a decision has seen what this session told: before that the node's part could lack what runs there. */
  planned: boolean;
  /** Number of what all nodes are told that it was last given. */
  notices: number;
}

/** The machine that a node was last heard from. */
interface Holder {
  readonly machine_id: string;
  readonly address: string;
  readonly last_seen_ms: number;
}

/**
 * Whether a newcomer takes the place of a node's session. The same machine always does: its agent or the machine was
 * started again. Another machine with the same certificate only once the first has been silent for a while.
 * @param before null for a node that is new
 * @throws OperatorError E_DUPLICATE_NODE with both addresses
 */
export function decideJoin(
  node: string,
  before: Holder | null,
  newcomer: { readonly key: SessionKey; readonly address: string },
  now_ms: number,
): void {
  if (!before || before.machine_id === newcomer.key.machine_id) return;
  const silent_ms = now_ms - before.last_seen_ms;
  if (silent_ms >= DUPLICATE_NODE_WINDOW_MS) return;
  const why = `a machine at ${before.address} was heard ${Math.round(silent_ms / 1_000)} s ago, this one is at ${newcomer.address}`;
  throw new OperatorError(
    "E_DUPLICATE_NODE",
    `node ${node} is connected from another machine`,
    why,
    "give each machine its own name and certificate, or stop the other agent",
  );
}

/**
 * Refuses a join that was sent before the one a node's session began with and only now arrives, as after a stall: what it
 * says of the node's ranks is no longer so. Once the session is silent for long it is believed: a node whose disk was full
 * counts anew.
 * @throws OperatorError E_STALE_SESSION
 */
export function refuseOlderJoin(node: string, before: Session | null, joins: number, now_ms: number): void {
  if (!before || joins === 0 || joins > before.joins || now_ms - before.last_seen_ms >= DUPLICATE_NODE_WINDOW_MS) return;
  const why = `it is join ${joins} of the node, its session began with ${before.joins}`;
  throw new OperatorError("E_STALE_SESSION", `node ${node} has joined since`, why, "the agent joins again by itself");
}
