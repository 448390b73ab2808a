import type { RankStatus } from "../protocol/agent-api.ts";
import type { NodeId, ReplicaId } from "../protocol/ids.ts";
import { specOfLaunch } from "./spec.ts";
import type { Happening, Replica, World } from "./world.ts";

interface Found {
  readonly node: NodeId;
  readonly status: RankStatus;
}

/**
 * Takes over what runs on the nodes but is in no record: the store is new, was lost, or was put back from a
 * copy. A running attempt whose model is in the catalog becomes a replica again, as it was started; whether it
 * is one too many or outdated is then decided as for any other. What is not taken over is in no node's plan and
 * so is stopped.
 */
export function adopt(world: World, now_ms: number): { replicas: Replica[]; events: Happening[] } {
  const models = new Map(world.models.map((spec) => [spec.name, spec]));
  const known = new Set(world.replicas.map((replica) => replica.id));
  const found = new Map<ReplicaId, Found[]>();
  for (const node of world.nodes) {
    for (const status of node.ranks ?? []) {
      if (status.phase === "exited" || status.phase === "stopping" || known.has(status.replica) || !models.has(status.launch.model))
        continue;
      const ranks = found.get(status.replica) ?? [];
      ranks.push({ node: node.id, status });
      found.set(status.replica, ranks);
    }
  }
  const replicas: Replica[] = [];
  const events: Happening[] = [];
  for (const [id, ranks] of found) {
    ranks.sort((a, b) => a.status.rank - b.status.rank);
    if (!isWhole(ranks)) continue;
    const where = ranks.map(({ node }) => node).join(", ");
    replicas.push(taken(id, ranks, models.get(ranks[0]?.status.launch.model ?? "")?.memory, now_ms));
    events.push({ level: "warn", kind: "replica-adopted", subject: `replica/${id}`, text: `found running on ${where} and taken over` });
  }
  return { replicas, events };
}

/** One rank of each number, and no more: half a gang serves nobody. */
function isWhole(ranks: readonly Found[]): boolean {
  return ranks.every(({ status }, index) => status.rank === index && status.launch.ranks === ranks.length);
}

function taken(id: ReplicaId, ranks: readonly Found[], memory: number | undefined, now_ms: number): Replica {
  const first = ranks[0]?.status;
  if (!first) throw new Error("a replica without ranks");
  const ready = ranks.every(({ status }) => status.phase === "ready");
  const since_ms = Math.min(now_ms, Math.max(...ranks.map(({ status }) => status.since_ms)));
  return {
    id,
    model: first.launch.model,
    spec: { ...specOfLaunch(first.launch), ...(memory !== undefined && { memory }) },
    created_ms: since_ms,
    state: ready ? "ready" : "starting",
    since_ms: ready ? since_ms : now_ms,
    reason: ready ? "" : "found running on its node",
    placements: ranks.map(({ node, status }) => ({ node, launch: status.launch })),
    taken_up: true,
    progress: null,
    ready_since_ms: ready ? since_ms : null,
    failures: 0,
    next_try_ms: null,
    avoid: null,
    last_lines: [],
  };
}
