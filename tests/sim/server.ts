import { plan } from "../../src/core/planner.ts";
import type { Happening, Ids, Replica } from "../../src/core/world.ts";
import type { RankStatus } from "../../src/protocol/agent-api.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import type { Inventory } from "../../src/protocol/inventory.ts";
import type { NodePlan, PlanVersion } from "../../src/protocol/plan.ts";
import { Fleet } from "../../src/server/fleet.ts";
import type { ModelScale, NodeIntent } from "../../src/server/store.ts";
import { refuseOlderJoin } from "../../src/server/sessions.ts";
import { worldOf, type GatewayCounts } from "../../src/server/world.ts";
import { countedIds } from "../unit/core/fleet-for-tests.ts";
import type { SimNode } from "./node.ts";

/** What survives the server: a store as a value. */
export interface SimStore {
  version: PlanVersion;
  replicas: readonly Replica[];
  intents: Map<string, NodeIntent>;
  scales: Map<string, ModelScale>;
  nodes: Map<string, { address: string; last_seen_ms: number }>;
}

export const emptyStore = (now_ms: number): SimStore => ({
  version: { epoch: Math.floor(now_ms / 1_000), generation: 0 },
  replicas: [],
  intents: new Map(),
  scales: new Map(),
  nodes: new Map(),
});

/** What a decision changed, for the invariants. */
export interface Turn {
  readonly before: readonly Replica[];
  readonly after: readonly Replica[];
  readonly events: readonly Happening[];
}

/** The server: the real fleet, world and planner over a store that is a value. It can die between any two turns. */
export class SimServer {
  readonly store: SimStore;
  readonly fleet: Fleet;
  readonly #ids: Ids;
  models: readonly ModelSpec[];
  #sessions = 0;

  constructor(store: SimStore, models: readonly ModelSpec[], nodes: readonly SimNode[], id_start: number, now_ms: number) {
    this.store = store;
    this.models = models;
    this.#ids = countedIds(id_start);
    this.fleet = new Fleet(store.version, now_ms);
    this.fleet.replicas = store.replicas;
    this.fleet.intents = store.intents;
    this.fleet.scales = store.scales;
    for (const node of nodes) {
      const kept = store.nodes.get(node.shape.id);
      if (kept) this.#keep(node, kept.last_seen_ms, null, null);
    }
  }

  #keep(
    node: SimNode,
    now_ms: number,
    begun: { readonly session: string; readonly joins: number } | null,
    ranks: readonly RankStatus[] | null,
  ): void {
    const { id, address = "" } = node.shape;
    const about = {
      agent_version: "1",
      joined_ms: 0,
      clock_offset_ms: 0,
      certificate_expires_ms: 0,
      machine_id: id,
      peer_address: address,
    };
    this.fleet.nodes.set(id, {
      kept: { id, address, last_seen_ms: now_ms, inventory: node.inventory, ...about },
      session: begun && {
        id: begun.session,
        joins: begun.joins,
        key: node.key,
        serial: "",
        address,
        seq: 0,
        last_seen_ms: now_ms,
        planned: false,
        notices: 0,
      },
      ranks,
    });
    this.store.nodes.set(id, { address, last_seen_ms: now_ms });
  }

  /** @returns the session's name; null for a join that is older than the session */
  join(node: SimNode, joins: number, seen: PlanVersion, ranks: readonly RankStatus[], now_ms: number): string | null {
    try {
      refuseOlderJoin(node.shape.id, this.fleet.nodes.get(node.shape.id)?.session ?? null, joins, now_ms);
    } catch {
      return null;
    }
    this.#sessions += 1;
    const session = `${this.fleet.started_ms}-${this.#sessions}`;
    this.#keep(node, now_ms, { session, joins }, ranks);
    this.fleet.noteJoin(now_ms);
    this.fleet.raiseEpoch(seen);
    return session;
  }

  /** @returns false when the session is not the newest */
  report(
    node: string,
    session: string,
    seq: number,
    seen: PlanVersion,
    ranks: readonly RankStatus[],
    inventory: Inventory,
    now_ms: number,
  ): boolean {
    const entry = this.fleet.nodes.get(node);
    if (entry?.session?.id !== session) return false;
    if (seq <= entry.session.seq) return true;
    Object.assign(entry.session, { seq, last_seen_ms: now_ms });
    entry.ranks = ranks;
    entry.kept = { ...entry.kept, inventory, last_seen_ms: now_ms };
    this.fleet.raiseEpoch(seen);
    return true;
  }

  partFor(node: string): NodePlan | null {
    return this.fleet.part(node);
  }

  turn(counts: GatewayCounts, now_ms: number): Turn {
    const { fleet, store } = this;
    fleet.catalog = this.models;
    const before = fleet.replicas;
    const sessions = [...fleet.nodes.values()].flatMap(({ session }) => session ?? []);
    const decision = plan(worldOf(fleet, counts, now_ms), now_ms, this.#ids);
    const { parts, version } = fleet.preview(decision.ranks);
    store.version = version;
    store.replicas = decision.replicas;
    fleet.replicas = decision.replicas;
    fleet.refusals = decision.refusals;
    fleet.publish(parts, version, sessions);
    return { before, after: decision.replicas, events: [...fleet.transitions(now_ms), ...decision.events] };
  }
}
