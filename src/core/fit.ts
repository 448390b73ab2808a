import type { SizedModel } from "../protocol/catalog.ts";
import type { NodeId, ReplicaId } from "../protocol/ids.ts";
import { displacedBy, type Displaced } from "./drain.ts";
import { newReplica, release } from "./lifecycle.ts";
import { strandedBy } from "./loss.ts";
import { memoryOf } from "./memory.ts";
import { serves } from "./reasons.ts";
import { specKey } from "./spec.ts";
import { leaves, nodesById } from "./world.ts";
import type { Happening, Ids, Replica, Stage, World } from "./world.ts";

/** Makes the number and form of replicas what the catalog says: more are made pending, those too many are released. */
export function fit(world: World, replicas: readonly Replica[], now_ms: number, ids: Ids): Stage {
  const nodes = nodesById(world);
  const view: View = {
    serving: (replica) => serves(replica, nodes),
    stranded: strandedBy(world, nodes),
    displaced: displacedBy(world, nodes, now_ms),
  };
  const models = new Map(world.models.map((spec) => [spec.name, spec]));
  const staying = replicas.filter((replica) => !leaves(replica));
  const groups = Map.groupBy(staying, (replica) => replica.model);
  const unwanted = staying.filter((replica) => !models.has(replica.model));
  const released = new Map<ReplicaId, string>(unwanted.map(({ id }) => [id, "the model is no longer in the catalog"]));
  const taken = new Set(replicas.map((replica) => replica.id));
  const made: Replica[] = [];
  for (const spec of world.models) {
    const change = fitModel(spec, groups.get(spec.name) ?? [], view);
    for (const [id, reason] of change.release) released.set(id, reason);
    for (let i = 0; i < change.create; i++) made.push({ ...newReplica(freshId(spec, taken, ids), spec, now_ms), avoid: change.avoid });
  }
  const events: Happening[] = made.map(({ id, model }) => {
    return { level: "info", kind: "replica-created", subject: `replica/${id}`, text: `model ${model} wants one more` };
  });
  const kept = replicas.map((replica) => {
    const reason = released.get(replica.id);
    if (reason === undefined) return withMemoryOfNow(replica, models.get(replica.model));
    const next = release(replica, reason, now_ms);
    events.push(...next.events);
    return next.replica;
  });
  return { replicas: [...kept, ...made], events };
}

/** A name that no replica has. */
function freshId(spec: SizedModel, taken: Set<ReplicaId>, ids: Ids): ReplicaId {
  let id = `${spec.name}-${ids.suffix()}`;
  while (taken.has(id)) id = `${spec.name}-${ids.suffix()}`;
  taken.add(id);
  return id;
}

/** A replica that holds nothing asks for the memory that the catalog says now; one that runs holds what it was given. */
function withMemoryOfNow(replica: Replica, spec: SizedModel | undefined): Replica {
  const waits = replica.state === "pending" || replica.state === "failed";
  if (!waits || spec === undefined || specKey(spec) !== specKey(replica.spec)) return replica;
  const [now, then] = [memoryOf(spec), memoryOf(replica.spec)];
  return now.system === then.system && now.per_gpu === then.per_gpu ? replica : { ...replica, spec };
}

/** What is asked of each replica while a model's number and form are decided. */
interface View {
  readonly serving: (replica: Replica) => boolean;
  readonly stranded: (replica: Replica) => boolean;
  readonly displaced: (replica: Replica) => Displaced | null;
}

interface Change {
  readonly create: number;
  readonly release: readonly (readonly [ReplicaId, string])[];
  /** Where the new ones should rather not go. */
  readonly avoid: NodeId | null;
}

/**
 * How one model's replicas change. Each of them is one of three:
 *
 * - lost with its node: it counts for nothing. It is replaced, and let go once it has been; when its node is back before
 *   that, it counts again and the newest goes.
 * - old: it is to be replaced, because its entry changed, its node drains, or an operator asked. It stays until a new one
 *   is ready in its place; there is at most one replica more than wanted meanwhile, so models roll replica by replica.
 * - new: as many of them are to be there as are wanted.
 */
function fitModel(spec: SizedModel, group: readonly Replica[], { serving, stranded, displaced }: View): Change {
  const lost = group.filter(stranded);
  const present = group.filter((replica) => !stranded(replica));
  const old = present.filter((replica) => displaced(replica) !== null);
  const fresh = present.filter((replica) => displaced(replica) === null);
  const excess = worstFirst(fresh, serving).slice(0, Math.max(0, fresh.length - spec.replicas));
  const ready = fresh.filter((replica) => serving(replica) && !excess.includes(replica)).length;
  const kept_old = worstFirst(old, serving)
    .reverse()
    .slice(0, Math.max(0, spec.replicas - ready))
    .filter((replica) => replica.state === "ready" && displaced(replica)?.at_once !== true);
  const release = [
    ...excess.map(({ id }) => [id, `${spec.replicas} of ${spec.name} are wanted`] as const),
    ...old.filter((replica) => !kept_old.includes(replica)).map((replica) => [replica.id, displaced(replica)?.reason ?? ""] as const),
    ...lost.filter(({ state }) => state !== "ready").map(({ id }) => [id, "its node is lost"] as const),
    ...lost
      .filter(({ state }) => state === "ready" && ready >= spec.replicas)
      .map(({ id }) => [id, "its node is lost, and it has been replaced"] as const),
  ];
  // Each old one that stays stands for a new one, but for the one that is being replaced.
  const create = spec.replicas - fresh.length - Math.max(0, kept_old.length - 1);
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
function worstFirst(group: readonly Replica[], serving: View["serving"]): Replica[] {
  return [...group].sort(
    (a, b) =>
      Number(serving(a)) - Number(serving(b)) ||
      PROGRESS[a.state] - PROGRESS[b.state] ||
      b.created_ms - a.created_ms ||
      (a.id < b.id ? 1 : -1),
  );
}
