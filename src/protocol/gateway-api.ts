/**
 * Between `llmgw server` and its `llmgw gateway`, over the gateway's unix socket (mode 0600, HTTP/1.1):
 *
 *   PUT /snapshot   Snapshot       -> { accepted: boolean }    an older version is refused
 *   GET /status     GatewayStatus
 *
 * The gateway keeps the last snapshot on disk, starts from it and serves on without the server.
 */
import * as v from "valibot";
import { AttemptId, Count, ModelName, NodeId, ReplicaId, TimeMs } from "./ids.ts";
import { PlanVersion, Revocation } from "./plan.ts";

/** A place that answers for a model: rank 0 of a replica. */
export const Target = v.object({
  replica: ReplicaId,
  attempt: AttemptId,
  node: NodeId,
  address: v.string(),
  port: Count,
  /** `draining` finishes what it has and gets nothing new. */
  state: v.picklist(["ready", "draining"]),
});
export type Target = v.InferOutput<typeof Target>;

export const ModelRoute = v.object({
  model: ModelName,
  created_ms: TimeMs,
  targets: v.array(Target),
  /** True while a replica is on its way: requests wait a little instead of failing. */
  starting: v.boolean(),
});
export type ModelRoute = v.InferOutput<typeof ModelRoute>;

/** An API key as the gateway knows it: never the key itself. */
export const KeyRecord = v.object({ id: v.string(), name: v.string(), sha256: v.string() });
export type KeyRecord = v.InferOutput<typeof KeyRecord>;

export const Snapshot = v.object({
  version: PlanVersion,
  auth: v.picklist(["keys", "none"]),
  routes: v.array(ModelRoute),
  keys: v.array(KeyRecord),
  revocations: v.array(Revocation),
});
export type Snapshot = v.InferOutput<typeof Snapshot>;

const TargetLoad = v.object({
  replica: ReplicaId,
  attempt: AttemptId,
  in_flight: Count,
  /** Null = reachable at the last try; else since when and why not. */
  unreachable: v.nullable(v.object({ since_ms: TimeMs, reason: v.string() })),
});

export const GatewayStatus = v.object({
  protocol: Count,
  pid: Count,
  started_ms: TimeMs,
  llmgw_version: v.string(),
  /** Null before the first snapshot. */
  snapshot: v.nullable(PlanVersion),
  in_flight: Count,
  loads: v.array(TargetLoad),
});
export type GatewayStatus = v.InferOutput<typeof GatewayStatus>;
