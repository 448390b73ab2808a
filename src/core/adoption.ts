import type { RankStatus } from "../protocol/agent-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { AttemptId, NodeId, ReplicaId } from "../protocol/ids.ts";
import { placesOf } from "../protocol/plan.ts";
import { enter, newReplica } from "./lifecycle.ts";
import { specKey, specOfLaunch } from "./spec.ts";
import { runs } from "./world.ts";
import type { Happening, Replica, Stage, World } from "./world.ts";

interface Found {
  readonly node: NodeId;
  readonly status: RankStatus;
}

/**
 * Takes over what runs on the nodes but is in no record: the store is new, was lost, or was put back from a
 * copy. A running attempt whose model is in the catalog becomes a replica again, as it was started; whether it
 * is one too many or outdated is then decided as for any other. What is not taken over is in no node's plan and
 * so is stopped; until then it holds its place.
 * @param records the replicas there are, moved on by what is observed
 */
export function adopt(world: World, records: readonly Replica[], now_ms: number): Stage {
  const adopted = new Map<ReplicaId, Replica>();
  const events: Happening[] = [];
  for (const ranks of startedTogether(orphans(world, records))) {
    const first = ranks[0]?.status;
    const model = world.models.find((spec) => spec.name === first?.launch.model);
    if (!first || !model || adopted.has(first.replica) || !isWhole(ranks)) continue;
    const subject = `replica/${first.replica}`;
    const where = ranks.map(({ node }) => node).join(", ");
    adopted.set(first.replica, taken(first, ranks, model, now_ms));
    events.push({ level: "warn", kind: "replica-adopted", subject, text: `found running on ${where} and taken over` });
  }
  const held = holders(world);
  const kept = records.filter((replica) => !adopted.has(replica.id)).map((replica) => makeWay(replica, held, now_ms));
  return { replicas: [...kept, ...adopted.values()], events };
}

/** Attempts that run and are in no record. Ready ones also count when their replica's record runs nothing. */
function orphans(world: World, records: readonly Replica[]): Found[] {
  const known = new Map(records.map((replica) => [replica.id, replica]));
  const found: Found[] = [];
  for (const node of world.nodes) {
    for (const status of node.ranks ?? []) {
      if (status.phase === "exited" || status.phase === "stopping") continue;
      const record = known.get(status.replica);
      if (record && (status.phase !== "ready" || !isIdle(record) || isOwn(record, status))) continue;
      found.push({ node: node.id, status });
    }
  }
  return found;
}

/** By replica and start, in order of rank: ranks of two starts of one gang know nothing of each other. */
function startedTogether(found: readonly Found[]): Found[][] {
  const master = ({ launch }: RankStatus) => (launch.gang ? `${launch.gang.master.address} ${launch.gang.master.port}` : "");
  const groups = Map.groupBy(found, ({ status }) => `${status.replica} ${master(status)}`);
  return [...groups.values()].map((ranks) => ranks.toSorted((a, b) => a.status.rank - b.status.rank));
}

const isIdle = ({ state }: Replica): boolean => state === "pending" || state === "failed";
const isOwn = ({ placements }: Replica, { attempt }: RankStatus): boolean => placements.some(({ launch }) => launch.attempt === attempt);

/** Which attempt holds what, by what the nodes say. */
function holders(world: World): Map<string, AttemptId> {
  const held = new Map<string, AttemptId>();
  for (const node of world.nodes) {
    for (const { phase, attempt, launch } of node.ranks ?? []) {
      if (phase !== "exited") for (const place of placesOf(node.id, launch)) held.set(place, attempt);
    }
  }
  return held;
}

/** A replica that was given a place but has not started there yields it to an attempt that runs. */
function makeWay(replica: Replica, held: ReadonlyMap<string, AttemptId>, now_ms: number): Replica {
  if (replica.taken_up || !runs(replica)) return replica;
  const isTaken = replica.placements.some(({ node, launch }) =>
    placesOf(node, launch).some((place) => (held.get(place) ?? launch.attempt) !== launch.attempt),
  );
  if (!isTaken) return replica;
  return { ...enter(replica, "pending", "its place is held by another that was found running", now_ms), placements: [] };
}

/** One rank of each number, and no more: half a gang serves nobody. */
function isWhole(ranks: readonly Found[]): boolean {
  return ranks.every(({ status }, index) => status.rank === index && status.launch.ranks === ranks.length);
}

function taken({ replica, launch }: RankStatus, ranks: readonly Found[], model: SizedModel, now_ms: number): Replica {
  const spec = specOfLaunch(launch);
  const ready = ranks.every(({ status }) => status.phase === "ready");
  const since_ms = Math.min(now_ms, Math.max(...ranks.map(({ status }) => status.since_ms)));
  return {
    // A launch does not tell what memory was set aside for it; the catalog does when it still means the same engine.
    ...newReplica(replica, specKey(spec) === specKey(model) ? model : spec, since_ms),
    state: ready ? "ready" : "starting",
    since_ms: ready ? since_ms : now_ms,
    reason: ready ? "" : "found running on its node",
    placements: ranks.map(({ node, status }) => ({ node, launch: status.launch })),
    taken_up: true,
    ready_since_ms: ready ? since_ms : null,
  };
}
