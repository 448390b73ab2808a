import type { Refusal } from "../protocol/admin-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import { FIRST_LEASED_PORT, type AttemptId } from "../protocol/ids.ts";
import { GANG_PORTS_COUNT } from "../protocol/limits.ts";
import type { GangLaunch, RankLaunch } from "../protocol/plan.ts";
import { fabricFault, hasImexFault, type Island } from "./fabrics.ts";
import { isBetterRoom, launchOn, refusalOf, type Placed } from "./placement.ts";
import { freeRow, hold, takeRow, type Room, type Rooms } from "./room.ts";
import { memoryOf } from "./memory.ts";
import type { Placement, Replica } from "./world.ts";

/** Why a node may not take a rank of a gang in an island, beside what may speak against it anyway; null when nothing does. */
function fabricRefusal({ node }: Room, island: Island, rooms: Rooms): Omit<Refusal, "node"> | null {
  const torn = rooms.fabrics.torn.find((each) => each.node === node.id && island.declared.includes(each.fabric));
  if (torn)
    return { filter: "fabric", needed: `adapters on one fabric under ${torn.fabric}`, available: "its adapters are on different ones" };
  const fault = fabricFault(node.inventory);
  if (fault !== null) return { filter: "fabric", needed: "a fabric that its own examination finds right", available: fault };
  if (adaptersOf(node.inventory, island).length === 0)
    return { filter: "fabric", needed: `an active adapter on ${island.name}`, available: "none" };
  return null;
}

/** The node's own names of its active ports on an island's fabric. */
function adaptersOf({ ports = [] }: Room["node"]["inventory"], { declared }: Island): string[] {
  const usable = ports.filter(
    (port) => declared.includes(port.fabric) && port.excluded === "" && (port.state ?? "ACTIVE").includes("ACTIVE"),
  );
  return usable.map(({ device, port }) => `${device}:${port}`);
}

const isLoopback = ({ node }: Room): boolean => node.address.startsWith("127.") || node.address === "::1";

/** The rooms of an island that may take a rank, best first. Ranks on loopback and others do not reach each other. */
function candidates(replica: Replica, island: Island, rooms: Rooms): Room[] {
  const { spec } = replica;
  const open = island.nodes.flatMap((id) => {
    const room = rooms.by_node.get(id);
    return room && !refusalOf(room, spec, rooms) && !fabricRefusal(room, island, rooms) && hasPorts(room, rooms) ? [room] : [];
  });
  const groups = [open.filter((room) => !isLoopback(room)), open.filter(isLoopback)];
  const fitting = groups.find((group) => group.length >= spec.nodes) ?? open;
  return fitting.sort((a, b) => (isBetterRoom(a, b, replica) ? -1 : 1));
}

function hasPorts({ node }: Room, rooms: Rooms): boolean {
  return freeRow(rooms, node.address, FIRST_LEASED_PORT - 1, GANG_PORTS_COUNT) !== null;
}

/**
 * Finds room for all ranks of a gang on distinct nodes of one island, or for none, and takes it out of `rooms`.
 * The island whose best node is best is taken; its best node serves as rank 0.
 */
export function placeGang(replica: Replica, rooms: Rooms, start_ms: number, attempt: () => AttemptId): Placed {
  const { nodes } = replica.spec;
  const islands = rooms.fabrics.islands.map((island) => ({ island, open: candidates(replica, island, rooms) }));
  let best: (typeof islands)[number] | null = null;
  for (const each of islands) {
    const [first] = each.open;
    if (!first || each.open.length < nodes || new Set(each.open.map(isLoopback)).size > 1) continue;
    const rival = best?.open[0];
    if (!rival || isBetterRoom(first, rival, replica)) best = each;
  }
  if (!best) return { refusals: gangRefusals(replica.spec, islands, rooms), reason: gangReason(nodes, islands) };
  return { placements: lease(replica, best.island, best.open.slice(0, nodes), rooms, start_ms, attempt) };
}

/** Every rank gets as many adapters as the one with the fewest: unequal counts hang at the first exchange. */
function lease(
  replica: Replica,
  island: Island,
  chosen: readonly Room[],
  rooms: Rooms,
  start_ms: number,
  attempt: () => AttemptId,
): Placement[] {
  const adapters = chosen.map((room) => adaptersOf(room.node.inventory, island));
  const count = Math.min(...adapters.map((names) => names.length));
  const imex_failed = chosen.some(({ node }) => hasImexFault(node.inventory));
  let master: GangLaunch["master"] | null = null;
  return chosen.map((room, rank) => {
    const { id, address } = room.node;
    const before = replica.placements.find((placement) => placement.node === id)?.launch.gang?.ports;
    const after = before ? before.first + before.count - 1 : FIRST_LEASED_PORT - 1;
    const first = freeRow(rooms, address, after, GANG_PORTS_COUNT) ?? FIRST_LEASED_PORT;
    master ??= { address, port: first };
    const ports = { first, count: GANG_PORTS_COUNT };
    const gang: GangLaunch = { master, ports, island: island.name, adapters: (adapters[rank] ?? []).slice(0, count), imex_failed };
    // Taken first, so that the door is none of them.
    takeRow(rooms, address, first, GANG_PORTS_COUNT);
    const launch: RankLaunch = { ...launchOn(replica, room, rooms, start_ms, attempt()), rank, ranks: chosen.length, gang };
    hold(rooms, room, launch, { memory: memoryOf(replica.spec).system, resident: false, fetching: true });
    return { node: id, launch };
  });
}

type Opened = readonly { readonly island: Island; readonly open: readonly Room[] }[];

function gangReason(nodes: number, islands: Opened): string {
  if (islands.length === 0) return `a replica over ${nodes} nodes needs a fabric, and no node is on one`;
  const counts = islands.map(({ island, open }) => `${island.name} has ${open.length} of ${island.nodes.length}`);
  return `no fabric has ${nodes} nodes with room: ${counts.join(", ")}`;
}

/** Per node, the first thing that speaks against it; a node with room says how many like it its fabric has. */
function gangRefusals(spec: SizedModel, islands: Opened, rooms: Rooms): Refusal[] {
  const refusals = [...rooms.by_node.values()].map((room): Refusal => {
    const node = room.node.id;
    const plain = refusalOf(room, spec, rooms);
    if (plain) return plain;
    const own = islands.find(({ island }) => island.nodes.includes(node));
    if (!own) return { node, filter: "fabric", needed: `a fabric with ${spec.nodes} nodes`, available: "it is on none" };
    const fabric = fabricRefusal(room, own.island, rooms);
    if (fabric) return { node, ...fabric };
    return {
      node,
      filter: "island",
      needed: `${spec.nodes} nodes of one fabric with room`,
      available: `${own.open.length} on ${own.island.name}`,
    };
  });
  return refusals.sort((a, b) => (a.node < b.node ? -1 : 1));
}
