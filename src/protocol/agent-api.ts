/**
 * The agent API on the control listener (mutual TLS, role node). Agent and server meet only here.
 *
 *   POST /agent/v1/join             JoinRequest   -> JoinAnswer
 *   POST /agent/v1/poll             PollRequest   -> PollAnswer     held up to BLOCKING_QUERY_MS
 *   POST /agent/v1/report           Report        -> ReportAnswer
 *   POST /agent/v1/results/<id>     ResultMessage -> {}
 *
 * Every request carries the header `x-llmgw-node: <claimed node id>`; the server compares it with the
 * certificate's common name. An error is a WireError.
 */
import * as v from "valibot";
import { EngineCheck } from "./engine-check.ts";
import { AttemptId, Bytes, Count, EngineKind, NodeId, ReplicaId, TimeMs } from "./ids.ts";
import { WantedEngine } from "./engine-release.ts";
import { Inventory } from "./inventory.ts";
import { NodePlan, PlanVersion, RankLaunch, Revocation } from "./plan.ts";

/** Header that carries the claimed node id. */
export const CLAIMED_NODE_HEADER = "x-llmgw-node";

export const RANK_PHASES = ["fetching", "starting", "ready", "stopping", "exited"] as const;

/** How an attempt ended. */
export const RankExit = v.object({
  at_ms: TimeMs,
  /**
   * `lease`: the door's port was taken (a new range, no back-off); `fetch`: weights; `start`: never became ready;
   * `died`: after ready; `stopped`: as asked.
   */
  kind: v.picklist(["lease", "fetch", "start", "died", "stopped"]),
  code: v.nullable(v.number()),
  signal: v.nullable(v.string()),
  reason: v.string(),
  last_lines: v.array(v.string()),
});
export type RankExit = v.InferOutput<typeof RankExit>;

/** What an agent observes of one attempt. */
export const RankStatus = v.object({
  attempt: AttemptId,
  replica: ReplicaId,
  rank: Count,
  phase: v.picklist(RANK_PHASES),
  since_ms: TimeMs,
  /** What it is doing or waiting for, in words. */
  detail: v.string(),
  engine_pid: v.nullable(Count),
  /** Version of the engine it was started with; absent until it is started, and from agents that do not say. */
  engine_version: v.optional(v.string()),
  /** System memory its processes hold, as measured last; absent until then. */
  memory_used: v.optional(Bytes),
  /** Raises with every sign of loading progress; extends the start deadline. */
  progress: v.nullable(v.object({ done: Count, total: v.nullable(Count) })),
  exit: v.nullable(RankExit),
  /** The launch it was started with, so that a server that lost its store can take it over. */
  launch: RankLaunch,
});
export type RankStatus = v.InferOutput<typeof RankStatus>;

/** A process incarnation of an agent on one machine. */
export const SessionKey = v.object({ machine_id: v.string(), boot_id: v.string(), agent_start_id: v.string() });
export type SessionKey = v.InferOutput<typeof SessionKey>;

export const JoinRequest = v.object({
  protocol: Count,
  node: NodeId,
  version: v.string(),
  session_key: SessionKey,
  /** Rises with each join of a node, also across restarts of its agent: an older one that comes late changes nothing. */
  joins: v.optional(Count, 0),
  address: v.string(),
  /** The node's clock when it sent this. */
  clock_ms: TimeMs,
  inventory: Inventory,
  ranks: v.array(RankStatus),
  /** The newest plan the node has seen, kept across its restarts. */
  seen: PlanVersion,
});
export type JoinRequest = v.InferOutput<typeof JoinRequest>;

export const JoinAnswer = v.object({
  protocol: Count,
  session: v.string(),
  version: v.string(),
  clock_ms: TimeMs,
});
export type JoinAnswer = v.InferOutput<typeof JoinAnswer>;

export const PollRequest = v.object({ session: v.string(), have: PlanVersion });
export type PollRequest = v.InferOutput<typeof PollRequest>;

/**
 * A question of the server to a node, answered through `/agent/v1/results/<id>`. Nothing waits for it on the node: it is
 * answered beside all else, or not at all once its deadline has passed.
 */
export const NodeRequest = v.variant("kind", [
  v.object({ kind: v.literal("log"), id: v.string(), deadline_ms: TimeMs, attempt: AttemptId, lines: Count }),
  v.object({ kind: v.literal("engine-check"), id: v.string(), deadline_ms: TimeMs, engine: EngineKind }),
]);
export type NodeRequest = v.InferOutput<typeof NodeRequest>;

export const PollAnswer = v.object({
  /** Null when nothing newer than `have` exists. */
  plan: v.nullable(NodePlan),
  /** Each is read by itself: a newer server may ask what this agent does not know, and is told so. */
  requests: v.array(v.looseObject({ kind: v.string(), id: v.string() })),
  revocations: v.array(Revocation),
  /** Paths of weights in the catalog: the node says in its inventory what it has there. */
  look_for: v.optional(v.array(v.string()), []),
  /** Versions of engines the node is to have; absent from servers that name none. */
  engines: v.optional(v.array(WantedEngine)),
});
export type PollAnswer = v.InferOutput<typeof PollAnswer>;

export const Report = v.object({
  session: v.string(),
  /** Rises by one with each report of a session; a repeat is harmless. */
  seq: Count,
  clock_ms: TimeMs,
  seen: PlanVersion,
  /** Null when unchanged since the last report. */
  inventory: v.nullable(Inventory),
  /** All attempts the node knows of, running and lately ended. */
  ranks: v.array(RankStatus),
});
export type Report = v.InferOutput<typeof Report>;

export const ReportAnswer = v.object({ clock_ms: TimeMs });
export type ReportAnswer = v.InferOutput<typeof ReportAnswer>;

export const ResultMessage = v.object({
  session: v.string(),
  result: v.union([v.object({ lines: v.array(v.string()) }), v.object({ check: EngineCheck }), v.object({ error: v.string() })]),
});
export type ResultMessage = v.InferOutput<typeof ResultMessage>;
export type NodeResult = ResultMessage["result"];
