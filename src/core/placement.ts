import TinyQueue from "tinyqueue";
import type { Refusal } from "../protocol/admin-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { Gpu } from "../protocol/inventory.ts";
import { FIRST_LEASED_PORT, type AttemptId, type NodeId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { freeRow, hold } from "./room.ts";
import type { Judged, Ranking, Room, Rooms } from "./room.ts";
import { inGiB, memoryOf } from "./memory.ts";
import { specKey } from "./spec.ts";
import type { NodeSeen, Placement, Replica } from "./world.ts";

/** What a filter says of a node: null when it lets it pass. */
type Verdict = { readonly needed: string; readonly available: string } | null;

/** One reason for which a node may not take a rank. Stable names: people and tools read them. */
interface Filter {
  readonly name: string;
  judge(room: Room, spec: SizedModel, rooms: Rooms): Verdict;
}

/** In the order of what an operator would look at first; the first that refuses is the one that is told. */
const FILTERS: readonly Filter[] = [
  {
    name: "node-state",
    judge: ({ node }) => {
      if (node.state !== "ready") return { needed: "a ready node", available: `${node.state}: ${node.state_reason}` };
      // What runs there is not known yet: a place that looks free may be taken.
      return node.ranks === null ? { needed: "a ready node", available: "its agent has not spoken to this server yet" } : null;
    },
  },
  {
    name: "cordon",
    judge: ({ node }) =>
      node.cordon === null ? null : { needed: "a node that takes new replicas", available: `cordoned: ${node.cordon}` },
  },
  { name: "engine", judge: ({ node }, spec) => judgeEngine(node, spec) },
  { name: "weights", judge: judgeWeights },
  { name: "gpus", judge: judgeGpus },
  { name: "gpu-memory", judge: judgeGpuMemory },
  { name: "memory", judge: judgeMemory },
  { name: "disk", judge: judgeDisk },
  {
    name: "ports",
    judge: ({ node }, _spec, rooms) =>
      freeRow(rooms, node.address, FIRST_LEASED_PORT - 1, 1) === null
        ? { needed: "1 port", available: `none free on ${node.address}` }
        : null,
  },
];

function judgeEngine(node: NodeSeen, spec: SizedModel): Verdict {
  const offers = node.inventory.engines.filter((engine) => engine.kind === spec.engine);
  if (offers.some((engine) => engine.offered)) return null;
  const [refused] = offers;
  return {
    needed: `engine ${spec.engine}`,
    available: refused ? `${refused.version || refused.path}: ${refused.reason}` : "not on this node",
  };
}

function judgeGpus(room: Room, spec: SizedModel): Verdict {
  if (room.free_gpus.length >= spec.gpus) return null;
  const used = [...room.foreign_gpus].filter(([uuid]) => !room.held_gpus.has(uuid)).map(([, words]) => words);
  const total = room.node.inventory.gpus.length;
  const parts = [
    `${room.free_gpus.length} free of ${total}`,
    ...(room.held_gpus.size ? [`${room.held_gpus.size} held by replicas`] : []),
    ...used,
  ];
  return { needed: `${spec.gpus} GPUs`, available: parts.join(", ") };
}

/** Weights that are to be on the node already, or whose size is just being found out. */
function judgeWeights({ node }: Room, { source }: SizedModel, { measuring }: Rooms): Verdict {
  if (source === undefined) return null;
  if (measuring.has(source)) return { needed: "the size of its weights", available: "being read from their source" };
  const looked = node.inventory.weights;
  if (!source.startsWith("/") || looked === undefined) return null;
  const seen = looked.find(({ name }) => name === source);
  if (!seen) return { needed: source, available: "the node is just looking for it" };
  return seen.fault === "" ? null : { needed: source, available: seen.fault };
}

/** Free GPUs that are large enough. A GPU that does not tell its size is. */
function fitting(room: Room, spec: SizedModel): Gpu[] {
  const { per_gpu } = memoryOf(spec);
  return room.free_gpus.filter(({ memory_total: total }) => !("value" in total) || total.value >= per_gpu);
}

function judgeGpuMemory(room: Room, spec: SizedModel): Verdict {
  if (fitting(room, spec).length >= spec.gpus) return null;
  const sizes = room.free_gpus.map(({ memory_total: total }) => ("value" in total ? inGiB(total.value) : "?"));
  return { needed: `${inGiB(memoryOf(spec).per_gpu)} on each of ${spec.gpus} GPUs`, available: `free ones have ${sizes.join(", ")}` };
}

function judgeMemory(room: Room, spec: SizedModel): Verdict {
  const need = memoryOf(spec).system;
  const free = Math.min(room.memory_measured, room.memory_promised);
  return need === 0 || need <= free ? null : { needed: `${inGiB(need)} of memory`, available: inGiB(Math.max(0, free)) };
}

function judgeDisk(room: Room, spec: SizedModel): Verdict {
  if (spec.source === undefined || spec.size === undefined || !spec.source.startsWith("http")) return null;
  if (room.sources.has(spec.source) || spec.size <= room.disk_free) return null;
  const { path } = room.node.inventory.disk;
  return { needed: `${inGiB(spec.size)} of disk`, available: `${inGiB(Math.max(0, room.disk_free))} in ${path}` };
}

/** The first filter that refuses the node, or null when it may take a rank of this model. */
export function refusalOf(room: Room, spec: SizedModel, rooms: Rooms): Refusal | null {
  for (const filter of FILTERS) {
    const verdict = filter.judge(room, spec, rooms);
    if (verdict) return { node: room.node.id, filter: filter.name, ...verdict };
  }
  return null;
}

/**
 * How good a node is, best first by the first number that differs: spread a model's replicas over nodes; where its
 * weights are; then pack: fewest GPUs left, least memory left.
 */
function score(room: Room, spec: SizedModel): readonly number[] {
  return [
    room.models.get(spec.name) ?? 0,
    spec.source !== undefined && room.sources.has(spec.source) ? 0 : 1,
    room.free_gpus.length,
    Math.min(room.memory_measured, room.memory_promised),
  ];
}

/** What a room is worth to a kind of replica; null when it may not take one. */
function judge(room: Room, spec: SizedModel, rooms: Rooms): Judged | null {
  return refusalOf(room, spec, rooms) ? null : { room, revision: room.revision, score: score(room, spec) };
}

/** All rooms in order of their worth to replicas of a model; only those that changed are judged again. */
function rankingOf(spec: SizedModel, rooms: Rooms): Ranking {
  const { system, per_gpu } = memoryOf(spec);
  const key = `${spec.name}\n${specKey(spec)}\n${system} ${per_gpu}`;
  let ranking = rooms.rankings.get(key);
  if (!ranking) {
    const judged = [...rooms.by_node.values()].map((room) => judge(room, spec, rooms)).filter((each) => each !== null);
    ranking = { queue: new TinyQueue(judged, byWorth), taken_in: rooms.touched.length };
    rooms.rankings.set(key, ranking);
  }
  for (; ranking.taken_in < rooms.touched.length; ranking.taken_in++) {
    const room = rooms.touched[ranking.taken_in];
    const judged = room && judge(room, spec, rooms);
    if (judged) ranking.queue.push(judged);
  }
  return ranking;
}

/** The best that is not out of date, taken out of the queue; null when there is none. */
function takeBest({ queue }: Ranking): Judged | null {
  for (;;) {
    const best = queue.pop();
    if (!best) return null;
    if (best.revision === best.room.revision) return best;
  }
}

/** Best first; the node's name decides at last. */
function byWorth(a: Judged, b: Judged): number {
  for (let i = 0; i < a.score.length; i++) {
    const difference = (a.score[i] ?? 0) - (b.score[i] ?? 0);
    if (difference !== 0) return difference;
  }
  return a.room.node.id < b.room.node.id ? -1 : 1;
}

/** A place for a replica, or why no node can take it. */
export type Placed = { readonly placements: readonly Placement[] } | { readonly refusals: readonly Refusal[]; readonly reason: string };

/**
 * Finds room for a replica of one rank and takes it out of `rooms`.
 * @param attempt names the new attempt; asked only when there is room
 */
export function place(replica: Replica, rooms: Rooms, start_ms: number, attempt: () => AttemptId): Placed {
  const { spec } = replica;
  const best = bestFor(replica, rooms);
  if (best) return { placements: [lease(replica, best, rooms, start_ms, attempt)] };
  const order = [...rooms.by_node.values()];
  const refusals = order.map((room) => refusalOf(room, spec, rooms)).filter((refusal) => refusal !== null);
  refusals.sort((a, b) => (a.node < b.node ? -1 : 1));
  return { refusals, reason: reasonOf(refusals, order.length) };
}

/**
 * Why no node takes a replica, in one line. What all nodes lack alike is named when it is no matter of room; numbers are not, for
 * they change all the time, and each new reason is an event.
 */
function reasonOf(refusals: readonly Refusal[], nodes: number): string {
  const [first, ...others] = refusals;
  if (nodes === 0) return "no node has joined";
  const named = first?.filter === "engine" || first?.filter === "weights";
  const alike = others.every(({ needed, available }) => needed === first?.needed && available === first?.available);
  return named && alike ? `no node can take it: ${first.needed}: ${first.available}` : `none of ${nodes} nodes has room`;
}

/** The best room for a replica of one rank: not where it just failed to start, if there is another. */
function bestFor(replica: Replica, rooms: Rooms): Room | null {
  const ranking = rankingOf(replica.spec, rooms);
  const best = takeBest(ranking);
  if (!best) return null;
  const other = best.room.node.id === replica.avoid ? takeBest(ranking) : null;
  // Whether one is taken now or not, it stays where the next replica looks for it.
  for (const judged of [best, other]) if (judged) ranking.queue.push(judged);
  return (other ?? best).room;
}

/** Whether `a` is a better place than `b` for a rank of this replica. */
export function isBetterRoom(a: Room, b: Room, { spec, avoid }: Replica): boolean {
  if ((a.node.id === avoid) !== (b.node.id === avoid)) return b.node.id === avoid;
  const judged = (room: Room): Judged => ({ room, revision: room.revision, score: score(room, spec) });
  return byWorth(judged(a), judged(b)) < 0;
}

/** Places a replica of one rank whose port was taken on the same node again, or null when it has no room any more. */
export function placeAgainOn(node: NodeId, replica: Replica, rooms: Rooms, start_ms: number, attempt: () => AttemptId): Placement | null {
  const room = rooms.by_node.get(node);
  return room && !refusalOf(room, replica.spec, rooms) ? lease(replica, room, rooms, start_ms, attempt) : null;
}

function lease(replica: Replica, room: Room, rooms: Rooms, start_ms: number, attempt: () => AttemptId): Placement {
  const launch = launchOn(replica, room, rooms, start_ms, attempt());
  hold(rooms, room, launch, { memory: memoryOf(replica.spec).system, resident: false, fetching: true });
  return { node: room.node.id, launch };
}

/** What rank 0 of one is told on this node; nothing is taken out of `rooms` yet. */
export function launchOn(replica: Replica, room: Room, rooms: Rooms, start_ms: number, attempt: AttemptId): RankLaunch {
  const { spec } = replica;
  const { id, address } = room.node;
  const before = replica.placements.find((placement) => placement.node === id)?.launch.door.port ?? FIRST_LEASED_PORT - 1;
  const port = freeRow(rooms, address, before, 1) ?? FIRST_LEASED_PORT;
  return {
    attempt,
    replica: replica.id,
    model: spec.name,
    rank: 0,
    ranks: 1,
    engine: spec.engine,
    door: { address, port },
    gpus: fitting(room, spec)
      .slice(0, spec.gpus)
      .map((gpu) => gpu.uuid),
    weights: spec.source === undefined ? null : weightsOf(spec, spec.source),
    context: spec.context ?? null,
    parallel: spec.parallel ?? null,
    embeddings: spec.embeddings,
    args: spec.args,
    start_deadline_ms: start_ms,
  };
}

function weightsOf(spec: SizedModel, source: string): NonNullable<RankLaunch["weights"]> {
  return { source, ...(spec.sha256 !== undefined && { sha256: spec.sha256 }), ...(spec.size !== undefined && { size: spec.size }) };
}
