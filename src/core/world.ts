/**
 * core/ decides: which replicas there are, where they run, when they are started, stopped and tried again.
 * Every function here is pure: the world, the time and a source of ids come in, a decision comes out, and
 * the same input gives the same output. No clock, no random numbers, no I/O; it imports protocol/ alone.
 */
import type { NODE_STATES, Refusal, ReplicaState } from "../protocol/admin-api.ts";
import type { RankStatus } from "../protocol/agent-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { AttemptId, ModelName, NodeId, ReplicaId } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import * as limits from "../protocol/limits.ts";
import type { Fabrics } from "./fabrics.ts";
import type { RankLaunch } from "../protocol/plan.ts";

type NodeState = (typeof NODE_STATES)[number];

/** A node as the planner sees it. */
export interface NodeSeen {
  readonly id: NodeId;
  readonly address: string;
  readonly state: NodeState;
  /** Why it is in that state; empty when ready. */
  readonly state_reason: string;
  readonly inventory: Inventory;
  /** Sources of the catalog whose weights it keeps. */
  readonly holds: readonly string[];
  /** What its agent last reported; null when it has not spoken since the server started. */
  readonly ranks: readonly RankStatus[] | null;
  /** When it reported that. */
  readonly heard_ms: number;
  /** Why nothing new may be placed here; null when it may. */
  readonly cordon: string | null;
  /** Everything here is to move elsewhere; null when it may stay. A node that drains is cordoned too. */
  readonly drain: Drain | null;
}

/** An operator's wish that a node be emptied. */
export interface Drain {
  /** Replicas stop before their replacements are ready. */
  readonly stop_first: boolean;
  /** From then on they stop whether replaced or not; null = never. */
  readonly deadline_ms: number | null;
}

/** One rank in its place: the node, and all that the node is told. The launch never changes. */
export interface Placement {
  readonly node: NodeId;
  readonly launch: RankLaunch;
}

/** One replica as the store keeps it. Values of this type are never changed, only replaced. */
export interface Replica {
  readonly id: ReplicaId;
  readonly model: ModelName;
  /** The catalog entry it was made from, frozen; {@link specKey} tells whether the catalog still says the same. */
  readonly spec: SizedModel;
  readonly created_ms: number;
  readonly state: ReplicaState;
  readonly since_ms: number;
  /** Why it is in this state, in words; it changes only when something happens, never with a reading. */
  readonly reason: string;
  /** In order of rank. While pending or failed: where it ran last, which it no longer holds. */
  readonly placements: readonly Placement[];
  /** True once its node has reported the present attempt. */
  readonly taken_up: boolean;
  /** The last sign of loading progress, kept roughly (it extends deadlines). */
  readonly progress: { readonly done: number; readonly at_ms: number } | null;
  readonly ready_since_ms: number | null;
  readonly failures: number;
  readonly next_try_ms: number | null;
  /** Where it failed to start last, to try elsewhere first. */
  readonly avoid: NodeId | null;
  /** The last lines of the engine that failed first. */
  readonly last_lines: readonly string[];
  /** An operator asked for another in its place: anywhere (`restart`) or on another node (`move`). */
  readonly replace: "restart" | "move" | null;
}

/** Times and waits the decisions use, in ms. */
export interface Policy {
  readonly start_ms: number;
  readonly take_up_ms: number;
  readonly report_ms: number;
  readonly fetch_stall_ms: number;
  readonly margin_ms: number;
  readonly drain_requests_ms: number;
  readonly drain_settle_ms: number;
  readonly resident_after_ms: number;
  readonly backoff_first_ms: number;
  readonly backoff_max_ms: number;
  readonly backoff_forget_ms: number;
  readonly freeze_nodes: number;
  readonly freeze_share: number;
  readonly freeze_window_ms: number;
}

export const DEFAULT_POLICY: Policy = {
  start_ms: limits.ENGINE_START_MS,
  take_up_ms: limits.TAKE_UP_MS,
  report_ms: limits.REPORT_INTERVAL_MS,
  fetch_stall_ms: limits.FETCH_STALL_MS,
  margin_ms: limits.DEADLINE_MARGIN_MS,
  drain_requests_ms: limits.DRAIN_REQUESTS_MS,
  drain_settle_ms: limits.DRAIN_SETTLE_MS,
  resident_after_ms: limits.RESIDENT_AFTER_MS,
  backoff_first_ms: limits.BACKOFF_FIRST_MS,
  backoff_max_ms: limits.BACKOFF_MAX_MS,
  backoff_forget_ms: limits.BACKOFF_FORGET_MS,
  freeze_nodes: limits.FREEZE_NODES_COUNT,
  freeze_share: limits.FREEZE_SHARE,
  freeze_window_ms: limits.FREEZE_WINDOW_MS,
};

/** All that a decision is made from. */
export interface World {
  readonly models: readonly SizedModel[];
  readonly nodes: readonly NodeSeen[];
  readonly replicas: readonly Replica[];
  /** Requests in flight per attempt by the gateway's own count; null while the gateway does not say. */
  readonly in_flight: ReadonlyMap<AttemptId, number> | null;
  /** Attempts whose doors the gateway cannot reach; null while the gateway does not say. */
  readonly unreachable: ReadonlySet<AttemptId> | null;
  /** Nodes that fell silent before then do not count as vanished together: an operator has looked. */
  readonly thawed_ms: number;
  readonly policy: Policy;
  /** Which nodes share which fabric. */
  readonly fabrics: Fabrics;
  /** Sources whose weights are just being measured: what they need is not known yet, and will be in a moment. */
  readonly measuring: ReadonlySet<string>;
  /** True while nodes are still coming back or joining together: nothing new is placed, so that all of them count. */
  readonly gathering: boolean;
}

/** Where new names come from: core/ itself knows no chance. */
export interface Ids {
  /** Five of a-z0-9. */
  suffix(): string;
  /** 16 lower-case hex digits. */
  attempt(): AttemptId;
}

/** Something that happened, for the list of events. */
export interface Happening {
  readonly level: "info" | "warn" | "error";
  /** Kebab-case, stable. */
  readonly kind: string;
  /** `node/a`, `replica/x`, `model/y`. */
  readonly subject: string;
  readonly text: string;
}

/** What a decision says. */
export interface Decision {
  /** All replicas there are now; one that did not change is the same object as before. */
  readonly replicas: readonly Replica[];
  /** What each known node is to run. */
  readonly ranks: ReadonlyMap<NodeId, readonly RankLaunch[]>;
  /** Per pending replica: why each node cannot take it. */
  readonly refusals: ReadonlyMap<ReplicaId, readonly Refusal[]>;
  readonly events: readonly Happening[];
}

/** What one stage of a decision gives: all replicas after it, and what happened in it. */
export interface Stage {
  readonly replicas: readonly Replica[];
  readonly events: readonly Happening[];
}

export function nodesById({ nodes }: World): ReadonlyMap<NodeId, NodeSeen> {
  return new Map(nodes.map((node) => [node.id, node]));
}

/** True while the replica's ranks belong into their nodes' plans. */
export function runs(replica: Replica): boolean {
  return replica.state === "fetching" || replica.state === "starting" || replica.state === "ready" || replica.state === "draining";
}

/** True while the replica's ranks hold GPUs, memory and ports of their nodes, or may. */
export function holds(replica: Replica): boolean {
  return runs(replica) || replica.state === "stopping";
}

/** True once the replica is on its way out and counts for nothing. */
export function leaves(replica: Replica): boolean {
  return replica.state === "draining" || replica.state === "stopping" || replica.state === "gone";
}
