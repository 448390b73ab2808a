import type TinyQueue from "tinyqueue";
import type { AttemptId, NodeId } from "../protocol/ids.ts";
import { FIRST_LEASED_PORT, LAST_LEASED_PORT } from "../protocol/ids.ts";
import type { Gpu } from "../protocol/inventory.ts";
import { GPU_FOREIGN_USE_SHARE } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import type { Fabrics } from "./fabrics.ts";
import { inGiB, memoryOf } from "./memory.ts";
import { specOfLaunch } from "./spec.ts";
import { holds } from "./world.ts";
import type { NodeSeen, Replica, World } from "./world.ts";

/** What one node has left while a decision is being made. The only values of core/ that change. */
export interface Room {
  readonly node: NodeSeen;
  /** Attempts that hold something here: planned, or observed and not ended. */
  readonly holders: Set<AttemptId>;
  /** UUIDs of GPUs that replicas hold. */
  readonly held_gpus: Set<string>;
  /** GPUs somebody else computes on, with the words for it. */
  readonly foreign_gpus: ReadonlyMap<string, string>;
  free_gpus: Gpu[];
  /** Measured as available, less what placed engines have not taken yet; bytes. */
  memory_measured: number;
  /** All there is, less what is promised to replicas; bytes. */
  memory_promised: number;
  disk_free: number;
  /** Sources of weights that are here or on their way. */
  readonly sources: Set<string>;
  /** Replicas per model, for spreading. */
  readonly models: Map<string, number>;
  /** Rises with each change, so that what was found out about the room can be kept until then. */
  revision: number;
}

/** What is left of all nodes, and which ports are leased per address (several nodes may share one). */
export interface Rooms {
  readonly by_node: ReadonlyMap<NodeId, Room>;
  readonly ports: Map<string, Set<number>>;
  readonly fabrics: Fabrics;
  /** Sources whose weights are just being measured. */
  readonly measuring: ReadonlySet<string>;
  /** Every room that something was taken out of, in that order, once for each time. */
  readonly touched: Room[];
  /** The rooms in order of their worth, for each kind of replica; `placement.ts` keeps it. */
  readonly rankings: Map<string, Ranking>;
}

/** What a room is worth to a kind of replica, as of one of its revisions. */
export interface Judged {
  readonly room: Room;
  readonly revision: number;
  readonly score: readonly number[];
}

/** All rooms that may take a kind of replica, best first. */
export interface Ranking {
  /** Some are out of date: the room has changed since, and is in it again. */
  readonly queue: TinyQueue<Judged>;
  /** How much of `touched` it has taken in. */
  taken_in: number;
}

/** Measures what is left for new replicas: what is there, less what planned and running attempts hold. */
export function measure(world: World, replicas: readonly Replica[], now_ms: number): Rooms {
  const rooms: Rooms = {
    by_node: new Map(world.nodes.map((node) => [node.id, emptyRoom(node)])),
    ports: new Map(),
    fabrics: world.fabrics,
    measuring: world.measuring,
    touched: [],
    rankings: new Map(),
  };
  for (const replica of replicas) {
    if (!holds(replica)) continue;
    const resident = replica.ready_since_ms !== null && now_ms - replica.ready_since_ms >= world.policy.resident_after_ms;
    for (const { node, launch } of replica.placements) {
      const room = rooms.by_node.get(node);
      if (room) hold(rooms, room, launch, { memory: memoryOf(replica.spec).system, resident, fetching: replica.state === "fetching" });
      // A node that was forgotten still keeps its ports: another node may share its address.
      else takePorts(rooms, launch);
    }
  }
  for (const room of rooms.by_node.values()) holdObserved(rooms, room);
  return rooms;
}

/** Attempts that run but are in no plan hold what they hold until they have ended. */
function holdObserved(rooms: Rooms, room: Room): void {
  for (const rank of room.node.ranks ?? []) {
    if (rank.phase === "exited" || room.holders.has(rank.attempt)) continue;
    hold(rooms, room, rank.launch, { memory: memoryOf(specOfLaunch(rank.launch)).system, resident: true, fetching: false });
  }
}

function emptyRoom(node: NodeSeen): Room {
  const { memory, disk, gpus } = node.inventory;
  const foreign = new Map<string, string>();
  for (const gpu of gpus) {
    if (!("value" in gpu.memory_used) || !("value" in gpu.memory_total)) continue;
    const { value: used } = gpu.memory_used;
    const { value: total } = gpu.memory_total;
    if (used > total * GPU_FOREIGN_USE_SHARE) foreign.set(gpu.uuid, `GPU ${gpu.index} has ${inGiB(used)} of ${inGiB(total)} in use`);
  }
  return {
    node,
    holders: new Set(),
    held_gpus: new Set(),
    foreign_gpus: foreign,
    free_gpus: gpus.filter((gpu) => !foreign.has(gpu.uuid)),
    memory_measured: memory.available,
    memory_promised: memory.total,
    disk_free: disk.free,
    sources: new Set(node.holds),
    models: new Map(),
    revision: 0,
  };
}

/**
 * Takes what one rank holds out of a node's room, and its ports out of those of its address.
 * @param use `memory` in bytes; `resident` = readings show it already; `fetching` = its weights still have to come
 */
export function hold(
  rooms: Rooms,
  room: Room,
  launch: RankLaunch,
  use: { readonly memory: number; readonly resident: boolean; readonly fetching: boolean },
): void {
  room.revision++;
  rooms.touched.push(room);
  takePorts(rooms, launch);
  room.holders.add(launch.attempt);
  if (launch.gpus.length > 0) {
    for (const uuid of launch.gpus) room.held_gpus.add(uuid);
    room.free_gpus = room.free_gpus.filter((gpu) => !room.held_gpus.has(gpu.uuid));
  }
  room.memory_promised -= use.memory;
  if (!use.resident) room.memory_measured -= use.memory;
  const { weights } = launch;
  if (weights && !room.sources.has(weights.source)) {
    room.sources.add(weights.source);
    if (use.fetching) room.disk_free -= weights.size ?? 0;
  }
  room.models.set(launch.model, (room.models.get(launch.model) ?? 0) + 1);
}

/** Takes the port of a rank's door, and those of its gang. */
function takePorts(rooms: Rooms, { door, gang }: RankLaunch): void {
  takeRow(rooms, door.address, door.port, 1);
  if (gang) takeRow(rooms, door.address, gang.ports.first, gang.ports.count);
}

/** Takes `count` ports in a row. */
export function takeRow(rooms: Rooms, address: string, first: number, count: number): void {
  let taken = rooms.ports.get(address);
  if (!taken) rooms.ports.set(address, (taken = new Set()));
  for (let port = first; port < first + count; port++) taken.add(port);
}

/**
 * The first of `count` ports in a row that nothing of ours holds, counted on from `after` and round to the first again.
 * @returns null when there is no such row
 */
export function freeRow(rooms: Rooms, address: string, after: number, count: number): number | null {
  const taken = rooms.ports.get(address);
  const isFree = (first: number) => {
    for (let port = first; port < first + count; port++) if (taken?.has(port)) return false;
    return true;
  };
  const starts = LAST_LEASED_PORT - FIRST_LEASED_PORT + 2 - count;
  for (let i = 0; i < starts; i++) {
    const first = FIRST_LEASED_PORT + ((after + 1 - FIRST_LEASED_PORT + i) % starts);
    if (isFree(first)) return first;
  }
  return null;
}
