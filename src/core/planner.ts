import type { Refusal } from "../protocol/admin-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { NodeId, ReplicaId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { adopt } from "./adoption.ts";
import { displacedBy } from "./drain.ts";
import { fit } from "./fit.ts";
import { placeGang } from "./gang.ts";
import { enter, step, type Step } from "./lifecycle.ts";
import { place, placeAgainOn, type Placed } from "./placement.ts";
import { measure, type Rooms } from "./room.ts";
import { nodesById, runs } from "./world.ts";
import type { Decision, Happening, Ids, Placement, Replica, Stage, World } from "./world.ts";

/**
 * Decides what there is to be, in four stages; each takes the replicas of the one before and says what happened:
 *
 * 1. follow: each replica goes on by what is observed of it (lifecycle.ts)
 * 2. adopt: what runs but is in no record becomes a replica again (adoption.ts)
 * 3. fit: each model gets as many replicas as are wanted, in the form that is wanted (fit.ts)
 * 4. place: those that wait get a place, or the reasons why there is none (placement.ts, gang.ts)
 *
 * Same world, time and ids: same decision. A replica that nothing happened to is the same object as before.
 */
export function plan(world: World, now_ms: number, ids: Ids): Decision {
  const followed = follow(world, now_ms);
  const adopted = adopt(world, followed.replicas, now_ms);
  const fitted = fit(world, adopted.replicas, now_ms, ids);
  const placed = placeWaiting(world, fitted.replicas, now_ms, ids);
  const replicas = placed.replicas.filter((replica) => replica.state !== "gone");
  const events = [followed, adopted, fitted, placed].flatMap((stage) => stage.events);
  return { replicas, ranks: ranksByNode(world, replicas), refusals: placed.refusals, events };
}

/** What each node is to run, in a fixed order. A replica that stops is no longer in it: that is how it is told to stop. */
function ranksByNode(world: World, replicas: readonly Replica[]): Map<NodeId, RankLaunch[]> {
  const ranks = new Map<NodeId, RankLaunch[]>(world.nodes.map((node) => [node.id, []]));
  for (const replica of replicas) {
    if (runs(replica)) for (const { node, launch } of replica.placements) ranks.get(node)?.push(launch);
  }
  for (const list of ranks.values()) list.sort((a, b) => (a.attempt < b.attempt ? -1 : 1));
  return ranks;
}

/** Every replica, moved on by what is observed of it. */
function follow(world: World, now_ms: number): Stage {
  const nodes = nodesById(world);
  const steps = world.replicas.map((replica) => {
    const first = replica.placements[0]?.launch.attempt;
    const in_flight = world.in_flight === null || first === undefined ? null : (world.in_flight.get(first) ?? 0);
    const seen = { nodes: replica.placements.map(({ node }) => nodes.get(node) ?? null), in_flight };
    return step(replica, seen, world.policy, now_ms);
  });
  return { replicas: steps.map(({ replica }) => replica), events: steps.flatMap(({ events }) => events) };
}

/** Finds places for all that wait for one: the largest first, then the oldest. */
function placeWaiting(
  world: World,
  replicas: readonly Replica[],
  now_ms: number,
  ids: Ids,
): Stage & { readonly refusals: ReadonlyMap<ReplicaId, readonly Refusal[]> } {
  const refusals = new Map<ReplicaId, readonly Refusal[]>();
  const isDue = (replica: Replica) =>
    replica.state === "pending" || (replica.state === "failed" && replica.next_try_ms !== null && replica.next_try_ms <= now_ms);
  const due = world.gathering ? [] : replicas.filter(isDue);
  if (due.length === 0) return { replicas, events: [], refusals };
  due.sort((a, b) => gpusOf(b.spec) - gpusOf(a.spec) || a.created_ms - b.created_ms || (a.id < b.id ? -1 : 1));
  const rooms = measure(world, replicas, now_ms);
  const displaced = displacedBy(world, nodesById(world), now_ms);
  const served = new Set(replicas.filter((each) => each.state === "ready" && displaced(each) !== null).map((each) => each.model));
  const next = new Map<ReplicaId, Replica>();
  const events: Happening[] = [];
  for (const replica of due) {
    const placed = findPlace(replica, rooms, world.policy.start_ms, now_ms, ids);
    if ("refusals" in placed) refusals.set(replica.id, placed.refusals);
    const taken =
      "placements" in placed
        ? begin(replica, placed.placements, now_ms)
        : wait(replica, served.has(replica.model) ? `${placed.reason}; the one it is to replace keeps serving` : placed.reason, now_ms);
    next.set(replica.id, taken.replica);
    events.push(...taken.events);
  }
  return { replicas: replicas.map((replica) => next.get(replica.id) ?? replica), events, refusals };
}

/** All GPUs of a replica: the more it needs, the harder its place is to find. */
const gpusOf = (spec: SizedModel): number => spec.gpus * spec.nodes;

function findPlace(replica: Replica, rooms: Rooms, start_ms: number, now_ms: number, ids: Ids): Placed {
  const attempt = () => ids.attempt();
  if (replica.spec.nodes > 1) return placeGang(replica, rooms, start_ms, attempt);
  // Waiting since this very moment and placed before: its port was taken, the node is as good as it was.
  const again = replica.state === "pending" && replica.since_ms === now_ms ? replica.placements[0]?.node : undefined;
  const same = again === undefined ? null : placeAgainOn(again, replica, rooms, start_ms, attempt);
  return same ? { placements: [same] } : place(replica, rooms, start_ms, attempt);
}

/** The replica in its place, for its nodes to take up. */
function begin(replica: Replica, placements: readonly Placement[], now_ms: number): Step {
  const where = placements.map(({ node }) => node).join(", ");
  const fetches = placements.some(({ launch }) => launch.weights !== null);
  const entered = enter(replica, fetches ? "fetching" : "starting", `waiting for ${where} to take it up`, now_ms);
  const event: Happening = { level: "info", kind: "replica-placed", subject: `replica/${replica.id}`, text: `on ${where}` };
  return { replica: { ...entered, placements, next_try_ms: null, taken_up: false }, events: [event] };
}

/** The replica, waiting for room; said once, not at every step. */
function wait(replica: Replica, reason: string, now_ms: number): Step {
  if (replica.state === "pending" && replica.reason === reason) return { replica, events: [] };
  const entered = enter(replica, "pending", reason, replica.state === "pending" ? replica.since_ms : now_ms);
  const event: Happening = { level: "warn", kind: "replica-pending", subject: `replica/${replica.id}`, text: reason };
  return { replica: { ...entered, next_try_ms: null }, events: [event] };
}
