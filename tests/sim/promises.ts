import { runs, type Replica } from "../../src/core/world.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import { placesOf } from "../../src/protocol/plan.ts";
import type { Fleet } from "../../src/server/fleet.ts";
import type { SimNode } from "./node.ts";
import type { Turn } from "./server.ts";

/** What a decision is judged by. */
export interface Judged {
  readonly turn: Turn;
  readonly fleet: Fleet;
  readonly models: readonly ModelSpec[];
  readonly nodes: readonly SimNode[];
}

type Broken = string | null;

/** The first promise that a decision breaks, in words; null when it keeps them all. */
export function brokenByDecision(judged: Judged): Broken {
  return (
    sharedPlaces(judged) ??
    blindPlacing(judged) ??
    endedTakenForRunning(judged) ??
    lostHardware(judged) ??
    brokenGang(judged) ??
    hastyDrain(judged)
  );
}

/** No GPU and no port is planned twice. */
function sharedPlaces({ turn }: Judged): Broken {
  const planned = new Set<string>();
  for (const { node, launch } of turn.after.filter(runs).flatMap(({ placements }) => placements)) {
    for (const place of placesOf(node, launch)) {
      if (planned.has(place)) return `${place} is planned twice`;
      planned.add(place);
    }
  }
  return null;
}

/** Nothing new is planned where the server has not heard since its start, nor on a place that it heard is held. */
function blindPlacing({ turn, fleet }: Judged): Broken {
  const old = new Set(turn.before.flatMap(({ placements }) => placements.map(({ launch }) => launch.attempt)));
  for (const { node, launch } of turn.after.filter(runs).flatMap(({ placements }) => placements)) {
    const heard = fleet.nodes.get(node)?.ranks ?? null;
    if (old.has(launch.attempt) || heard?.some(({ attempt }) => attempt === launch.attempt)) continue;
    if (heard === null) return `${launch.attempt} was placed on ${node}, which has not spoken`;
    const places = new Set(placesOf(node, launch));
    for (const other of heard) {
      const shared = other.phase !== "exited" && placesOf(node, other.launch).find((place) => places.has(place));
      if (shared) return `${launch.attempt} was given ${shared}, which ${other.attempt} holds`;
    }
  }
  return null;
}

/** A replica one of whose ranks is known to have ended is neither ready nor on its way. */
function endedTakenForRunning({ turn, fleet }: Judged): Broken {
  for (const { id, state, placements } of turn.after) {
    if (state !== "ready" && state !== "starting" && state !== "fetching") continue;
    for (const { node, launch } of placements) {
      const heard = fleet.nodes.get(node)?.ranks?.find(({ attempt }) => attempt === launch.attempt);
      if (heard?.phase === "exited") return `${id} is ${state} though its rank on ${node} has ended`;
    }
  }
  return null;
}

/** Nothing new is given a GPU that its node no longer has, or an adapter whose link is down, as far as the server has heard. */
function lostHardware({ turn, fleet }: Judged): Broken {
  const old = new Set(turn.before.flatMap(({ placements }) => placements.map(({ launch }) => launch.attempt)));
  for (const { node, launch } of turn.after.filter(runs).flatMap(({ placements }) => placements)) {
    const kept = fleet.nodes.get(node);
    // What was found running is not given anything.
    if (old.has(launch.attempt) || !kept || kept.ranks?.some(({ attempt }) => attempt === launch.attempt)) continue;
    const { gpus, ports = [] } = kept.kept.inventory;
    const gone = launch.gpus.find((uuid) => !gpus.some((gpu) => gpu.uuid === uuid));
    if (gone) return `${launch.attempt} was given ${gone}, which ${node} has lost`;
    const down = ports.find(({ device, port, state }) => state === "DOWN" && launch.gang?.adapters.includes(`${device}:${port}`));
    if (down) return `${launch.attempt} was given ${down.device} of ${node}, which is down`;
  }
  return null;
}

/** A gang is whole, on distinct nodes, with as many adapters each, all of them on one physical fabric. */
function brokenGang({ turn, nodes }: Judged): Broken {
  for (const { id, spec, placements, state } of turn.after) {
    if (spec.nodes === 1 || placements.length === 0 || state === "gone") continue;
    if (new Set(placements.map(({ node }) => node)).size !== spec.nodes) return `gang ${id} is not on ${spec.nodes} nodes`;
    const managers = new Set<string>();
    for (const { node, launch } of placements) {
      const ports = nodes.find(({ shape }) => shape.id === node)?.inventory.ports ?? [];
      const adapters = launch.gang?.adapters ?? [];
      if (adapters.length === 0 || adapters.length !== placements[0]?.launch.gang?.adapters.length)
        return `gang ${id} has unequal adapters`;
      for (const name of adapters) managers.add(ports.find(({ device, port }) => `${device}:${port}` === name)?.managers[0] ?? "nowhere");
    }
    if (managers.size !== 1) return `gang ${id} is on the fabrics of ${[...managers].join(" and ")}`;
  }
  return null;
}

/** A drain lets a ready replica go only when it has been replaced. */
function hastyDrain({ turn, fleet, models }: Judged): Broken {
  const was = new Map(turn.before.map((replica) => [replica.id, replica]));
  const letGo = (replica: Replica) => replica.state === "draining" && was.get(replica.id)?.state === "ready";
  for (const gone of turn.after.filter(letGo)) {
    const drain = gone.placements.map(({ node }) => fleet.intents.get(node)?.drain ?? null).find((each) => each !== null);
    if (!drain || drain.stop_first || !gone.reason.includes("drained")) continue;
    const wanted = models.find(({ name }) => name === gone.model)?.replicas ?? 0;
    const serving = turn.after.filter((replica) => replica.model === gone.model && replica.state === "ready").length;
    if (serving < wanted) return `${gone.id} was let go by a drain with ${serving} of ${wanted} ready`;
  }
  return null;
}

/** On the machines: no GPU and no port is held twice. */
export function brokenOnMachine(node: SimNode): Broken {
  const held = new Set<string>();
  for (const launch of node.placed()) {
    for (const place of placesOf(node.shape.id, launch)) {
      if (held.has(place)) return `${place} is held twice`;
      held.add(place);
    }
  }
  return null;
}
