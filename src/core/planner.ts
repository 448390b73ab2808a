import type { Refusal } from "../protocol/admin-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { NodeId, ReplicaId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { adopt } from "./adoption.ts";
import { displacedBy, type Displaced } from "./drain.ts";
import { enter, release, step } from "./lifecycle.ts";
import { placeGang } from "./gang.ts";
import { strandedBy } from "./loss.ts";
import { place, placeAgainOn } from "./placement.ts";
import { serves } from "./reasons.ts";
import { measure } from "./room.ts";
import { memoryOf } from "./memory.ts";
import { specKey } from "./spec.ts";
import { leaves, runs } from "./world.ts";
import type { Decision, Happening, Ids, NodeSeen, Replica, World } from "./world.ts";

/**
 * Decides what there is to be: follows what is observed, then what the catalog wants, then finds places.
 * Same world, time and ids: same decision. A replica that nothing happened to is the same object as before.
 */
export function plan(world: World, now_ms: number, ids: Ids): Decision {
  const events: Happening[] = [];
  const nodes = new Map(world.nodes.map((node) => [node.id, node]));
  const followed = world.replicas.map((replica) => follow(replica, world, nodes, now_ms, events));
  const adopted = adopt(world, followed, now_ms);
  events.push(...adopted.events);
  const wanted = fit(adopted.replicas, world, nodes, now_ms, ids, events);
  const placed = placeAll(wanted, world, now_ms, ids, events);
  const replicas = placed.replicas.filter((replica) => replica.state !== "gone");
  return { replicas, ranks: ranksByNode(replicas, world), refusals: placed.refusals, events };
}

/** What each node is to run, in a fixed order. A replica that stops is no longer in it: that is how it is told to stop. */
function ranksByNode(replicas: readonly Replica[], world: World): Map<NodeId, RankLaunch[]> {
  const ranks = new Map<NodeId, RankLaunch[]>(world.nodes.map((node) => [node.id, []]));
  for (const replica of replicas) {
    if (runs(replica)) for (const { node, launch } of replica.placements) ranks.get(node)?.push(launch);
  }
  for (const list of ranks.values()) list.sort((a, b) => (a.attempt < b.attempt ? -1 : 1));
  return ranks;
}

/** One replica, moved on by what is observed of it. */
function follow(replica: Replica, world: World, nodes: ReadonlyMap<NodeId, NodeSeen>, now_ms: number, events: Happening[]): Replica {
  const first = replica.placements[0]?.launch.attempt;
  const in_flight = world.in_flight === null || first === undefined ? null : (world.in_flight.get(first) ?? 0);
  const seen = { nodes: replica.placements.map(({ node }) => nodes.get(node) ?? null), in_flight };
  const next = step(replica, seen, world.policy, now_ms);
  events.push(...next.events);
  return next.replica;
}

/** Makes the number and form of replicas what the catalog says: more are made pending, those too many are released. */
function fit(
  replicas: readonly Replica[],
  world: World,
  nodes: ReadonlyMap<NodeId, NodeSeen>,
  now_ms: number,
  ids: Ids,
  events: Happening[],
): Replica[] {
  const released = new Map<ReplicaId, string>();
  const made: Replica[] = [];
  const taken = new Set(replicas.map((replica) => replica.id));
  const staying = Map.groupBy(
    replicas.filter((replica) => !leaves(replica)),
    (replica) => replica.model,
  );
  const models = new Map(world.models.map((spec) => [spec.name, spec]));
  for (const [model, group] of staying) {
    if (!models.has(model)) for (const replica of group) released.set(replica.id, "the model is no longer in the catalog");
  }
  const view: View = { nodes, stranded: strandedBy(world, nodes), displaced: displacedBy(nodes, now_ms) };
  for (const spec of world.models) {
    const change = fitModel(spec, staying.get(spec.name) ?? [], view);
    for (const [id, reason] of change.release) released.set(id, reason);
    for (let i = 0; i < change.create; i++) made.push({ ...newReplica(spec, taken, now_ms, ids), avoid: change.avoid });
  }
  for (const replica of made) {
    events.push({
      level: "info",
      kind: "replica-created",
      subject: `replica/${replica.id}`,
      text: `model ${replica.model} wants one more`,
    });
  }
  const letGo = (replica: Replica, reason: string): Replica => {
    const next = release(replica, reason, now_ms);
    events.push(...next.events);
    return next.replica;
  };
  const kept = replicas.map((replica) => {
    const reason = released.get(replica.id);
    return reason === undefined ? asked(replica, models.get(replica.model)) : letGo(replica, reason);
  });
  return [...kept, ...made];
}

/** A replica that holds nothing asks for the memory that the catalog says now; one that runs holds what it was given. */
function asked(replica: Replica, spec: SizedModel | undefined): Replica {
  const waits = replica.state === "pending" || replica.state === "failed";
  if (!waits || spec === undefined || specKey(spec) !== specKey(replica.spec)) return replica;
  const [now, then] = [memoryOf(spec), memoryOf(replica.spec)];
  return now.system === then.system && now.per_gpu === then.per_gpu ? replica : { ...replica, spec };
}

/** What is asked of each replica while a model's number and form are decided. */
interface View {
  readonly nodes: ReadonlyMap<NodeId, NodeSeen>;
  readonly stranded: (replica: Replica) => boolean;
  readonly displaced: (replica: Replica) => Displaced | null;
}

interface Change {
  readonly create: number;
  readonly release: [ReplicaId, string][];
  /** Where the new ones should rather not go. */
  readonly avoid: NodeId | null;
}

/**
 * How one model's replicas change. One that is outdated (the catalog changed) or displaced (its node drains) stays until
 * a new one is ready in its place; the new ones are made with at most one replica more than wanted, so models roll
 * replica by replica. One that is lost with its node counts for nothing: it is replaced, and let go once it has been;
 * when its node is back before that, it counts again and the newest goes.
 */
function fitModel(spec: SizedModel, group: readonly Replica[], { nodes, stranded, displaced }: View): Change {
  const key = specKey(spec);
  const isServing = (replica: Replica) => serves(replica, nodes);
  const present = group.filter((replica) => !stranded(replica));
  const leaving = (replica: Replica) => specKey(replica.spec) !== key || displaced(replica) !== null;
  const fresh = present.filter((replica) => !leaving(replica));
  const old = present.filter(leaving);
  const release: [ReplicaId, string][] = [];
  const excess = worstFirst(fresh, isServing).slice(0, Math.max(0, fresh.length - spec.replicas));
  for (const replica of excess) release.push([replica.id, `${spec.replicas} of ${spec.name} are wanted`]);
  const ready = fresh.filter((replica) => isServing(replica) && !excess.includes(replica)).length;
  const keep = Math.max(0, spec.replicas - ready);
  const kept_old = worstFirst(old, isServing)
    .reverse()
    .slice(0, keep)
    .filter((replica) => replica.state === "ready" && displaced(replica)?.at_once !== true);
  for (const replica of old) {
    if (!kept_old.includes(replica)) release.push([replica.id, displaced(replica)?.reason ?? `the catalog entry of ${spec.name} changed`]);
  }
  for (const replica of group) {
    if (!stranded(replica) || (replica.state === "ready" && ready < spec.replicas)) continue;
    release.push([replica.id, "its node is lost, and it has been replaced"]);
  }
  const surge = kept_old.length > 0 ? 1 : 0;
  const create = Math.min(spec.replicas - fresh.length, spec.replicas + surge - fresh.length - kept_old.length);
  const moved = kept_old.find((replica) => replica.replace === "move");
  return { create: Math.max(0, create), release, avoid: moved?.placements[0]?.node ?? null };
}

const PROGRESS: Readonly<Record<Replica["state"], number>> = {
  gone: 0,
  stopping: 0,
  failed: 1,
  pending: 2,
  fetching: 3,
  starting: 4,
  draining: 5,
  ready: 6,
};

/** Those whose end costs least first: not serving, least far on, newest. */
function worstFirst(group: readonly Replica[], isServing: (replica: Replica) => boolean): Replica[] {
  return [...group].sort(
    (a, b) =>
      Number(isServing(a)) - Number(isServing(b)) ||
      PROGRESS[a.state] - PROGRESS[b.state] ||
      b.created_ms - a.created_ms ||
      (a.id < b.id ? 1 : -1),
  );
}

function newReplica(spec: SizedModel, taken: Set<ReplicaId>, now_ms: number, ids: Ids): Replica {
  let id = `${spec.name}-${ids.suffix()}`;
  while (taken.has(id)) id = `${spec.name}-${ids.suffix()}`;
  taken.add(id);
  return {
    id,
    model: spec.name,
    spec,
    created_ms: now_ms,
    state: "pending",
    since_ms: now_ms,
    reason: "waiting for a place",
    placements: [],
    taken_up: false,
    progress: null,
    ready_since_ms: null,
    failures: 0,
    next_try_ms: null,
    avoid: null,
    last_lines: [],
    replace: null,
  };
}

/** Finds places for all that wait for one: the largest first, then the oldest. */
function placeAll(
  replicas: readonly Replica[],
  world: World,
  now_ms: number,
  ids: Ids,
  events: Happening[],
): { replicas: readonly Replica[]; refusals: Map<ReplicaId, readonly Refusal[]> } {
  const refusals = new Map<ReplicaId, readonly Refusal[]>();
  const isDue = (replica: Replica) =>
    replica.state === "pending" || (replica.state === "failed" && replica.next_try_ms !== null && replica.next_try_ms <= now_ms);
  if (world.gathering) return { replicas, refusals };
  const due = replicas.filter(isDue).sort((a, b) => size(b.spec) - size(a.spec) || a.created_ms - b.created_ms || (a.id < b.id ? -1 : 1));
  if (due.length === 0) return { replicas, refusals };
  const rooms = measure(world, replicas, now_ms);
  const moved = new Map<ReplicaId, Replica>();
  const displaced = displacedBy(new Map(world.nodes.map((node) => [node.id, node])), now_ms);
  const serving = new Set(replicas.filter((replica) => isToBeReplaced(replica, world, displaced)).map((replica) => replica.model));
  for (const replica of due) {
    const { start_ms } = world.policy;
    // Waiting since this very moment and placed before: its port was taken, the node is as good as it was.
    const again = replica.state === "pending" && replica.since_ms === now_ms ? replica.placements[0]?.node : undefined;
    const same = again === undefined ? null : placeAgainOn(again, replica, rooms, start_ms, () => ids.attempt());
    const find = replica.spec.nodes > 1 ? placeGang : place;
    const placed = same ? { placements: [same] } : find(replica, rooms, start_ms, () => ids.attempt());
    if ("placements" in placed) {
      moved.set(replica.id, start(replica, placed.placements, now_ms, events));
      continue;
    }
    refusals.set(replica.id, placed.refusals);
    const reason = serving.has(replica.model) ? `${placed.reason}; the one it is to replace keeps serving` : placed.reason;
    const waits = wait(replica, reason, now_ms, events);
    if (waits !== replica) moved.set(replica.id, waits);
  }
  return { replicas: replicas.map((replica) => moved.get(replica.id) ?? replica), refusals };
}

/** Serves until another is ready in its place: its entry changed, or its node drains. */
function isToBeReplaced(replica: Replica, world: World, displaced: View["displaced"]): boolean {
  if (replica.state !== "ready") return false;
  const spec = world.models.find((model) => model.name === replica.model);
  return spec !== undefined && (specKey(spec) !== specKey(replica.spec) || displaced(replica) !== null);
}

const size = (spec: SizedModel): number => spec.gpus * spec.nodes;

function start(replica: Replica, placements: Replica["placements"], now_ms: number, events: Happening[]): Replica {
  const where = placements.map(({ node }) => node).join(", ");
  const fetches = placements.some(({ launch }) => launch.weights !== null);
  events.push({ level: "info", kind: "replica-placed", subject: `replica/${replica.id}`, text: `on ${where}` });
  return {
    ...enter(replica, fetches ? "fetching" : "starting", `waiting for ${where} to take it up`, now_ms),
    placements,
    next_try_ms: null,
    taken_up: false,
  };
}

/** The replica, waiting for room; said once, not at every step. */
function wait(replica: Replica, reason: string, now_ms: number, events: Happening[]): Replica {
  if (replica.state === "pending" && replica.reason === reason) return replica;
  events.push({ level: "warn", kind: "replica-pending", subject: `replica/${replica.id}`, text: reason });
  return { ...enter(replica, "pending", reason, replica.state === "pending" ? replica.since_ms : now_ms), next_try_ms: null };
}
