import * as v from "valibot";
import { Args } from "./catalog.ts";
import { AttemptId, Bytes, Count, EngineKind, LeasedPort, ModelName, NodeId, ReplicaId, TimeMs } from "./ids.ts";

/** Orders plans: a new or restored store raises the epoch, every change raises the generation. */
export const PlanVersion = v.object({ epoch: Count, generation: Count });
export type PlanVersion = v.InferOutput<typeof PlanVersion>;

/** Negative when `a` is older than `b`, 0 when they are the same. */
export function comparePlanVersions(a: PlanVersion, b: PlanVersion): number {
  return a.epoch - b.epoch || a.generation - b.generation;
}

/** Where weights come from and how to know them. */
export const WeightsRef = v.object({
  source: v.string(),
  sha256: v.optional(v.string()),
  size: v.optional(Bytes),
});
export type WeightsRef = v.InferOutput<typeof WeightsRef>;

/** What a rank of a gang is told of the others and of the fabric they share. */
export const GangLaunch = v.object({
  /** Where rank 0 waits for the others. Never loopback unless every rank is on loopback. */
  master: v.object({ address: v.string(), port: LeasedPort }),
  /** Ports in a row on this rank's own node, for its engine's links. On rank 0 the first is the master's. */
  ports: v.object({ first: LeasedPort, count: Count }),
  /** Name of the island all ranks are in. */
  island: v.string(),
  /** This node's own names of its adapters on that fabric, `mlx5_2:1`; as many as every other rank has. */
  adapters: v.array(v.string()),
  /** NVLink between machines is not to be used, because some rank's node found IMEX broken. */
  imex_failed: v.boolean(),
});
export type GangLaunch = v.InferOutput<typeof GangLaunch>;

/**
 * One rank to run on one node: all that the agent, the shim and the engine need to know, with no choice left.
 * Immutable; a change of anything is a new attempt.
 */
export const RankLaunch = v.object({
  attempt: AttemptId,
  replica: ReplicaId,
  model: ModelName,
  rank: Count,
  ranks: v.pipe(v.number(), v.integer(), v.minValue(1)),
  engine: EngineKind,
  /** Where the shim's mutual TLS door listens. */
  door: v.object({ address: v.string(), port: LeasedPort }),
  /** UUIDs of this node's GPUs for this rank. */
  gpus: v.array(v.string()),
  weights: v.nullable(WeightsRef),
  context: v.nullable(Count),
  parallel: v.nullable(Count),
  embeddings: v.boolean(),
  args: Args,
  start_deadline_ms: Count,
  /** Only in gangs. */
  gang: v.optional(GangLaunch),
});
export type RankLaunch = v.InferOutput<typeof RankLaunch>;

/** What only one attempt at a time can hold: a node's GPUs, and the ports of its door and of its gang, as words. */
export function placesOf(node: NodeId, { door, gpus, gang }: RankLaunch): string[] {
  const { first, count } = gang?.ports ?? { first: 0, count: 0 };
  const ports = [door.port, ...Array.from({ length: count }, (_, index) => first + index)];
  return [...ports.map((port) => `port ${port} of ${door.address}`), ...gpus.map((uuid) => `GPU ${uuid} of ${node}`)];
}

/** A node's part of the plan. A rank that is not in it is to be stopped, by its engine's stop order. */
export const NodePlan = v.object({
  version: PlanVersion,
  node: NodeId,
  ranks: v.array(RankLaunch),
});
export type NodePlan = v.InferOutput<typeof NodePlan>;

/** Certificates of `name` issued at or before `until_ms` are refused everywhere. */
export const Revocation = v.object({ name: v.string(), until_ms: TimeMs });
export type Revocation = v.InferOutput<typeof Revocation>;

/** Whether a certificate of a name, by its time of issue, is among the refused. */
export function isRevoked(revocations: readonly Revocation[], { name, issued_ms }: { name: string; issued_ms: number }): boolean {
  return revocations.some((each) => each.name === name && issued_ms <= each.until_ms);
}
