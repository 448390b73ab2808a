import { plan } from "../core/planner.ts";
import { runs, type Happening, type World } from "../core/world.ts";
import type { DrainStep, NodeWish } from "../protocol/admin-api.ts";
import type { ModelSpec } from "../protocol/catalog.ts";
import { OperatorError } from "../protocol/errors.ts";
import type * as v from "valibot";
import type { Fleet } from "./fleet.ts";
import { IDS } from "./reconcile.ts";
import type { NodeIntent, Store } from "./store.ts";
import { worldOf, type GatewayCounts } from "./world.ts";

interface OperationsParts {
  readonly fleet: Fleet;
  readonly store: Store;
  readonly now: () => number;
  readonly counts: () => GatewayCounts;
  /** Refuses every certificate of a name issued until now, and ends its sessions. */
  readonly revoke: (name: string) => Promise<void>;
  /** Look at the fleet again. */
  readonly poke: () => void;
  readonly say: (event: Happening) => Promise<void>;
  /** The catalog as it is on disk now. */
  readonly catalog: () => Promise<readonly ModelSpec[]>;
}

/** What operators ask of nodes and replicas, and what would come of it. Wishes are stored; deciding is left to core/. */
export class Operations {
  readonly #parts: OperationsParts;

  constructor(parts: OperationsParts) {
    this.#parts = parts;
  }

  #knownNode(id: string): void {
    if (this.#parts.fleet.nodes.has(id)) return;
    throw new OperatorError("E_NOT_FOUND", `there is no node "${id}"`, "no node of that name has joined", "llmgw ctl nodes");
  }

  /** Keeps a wish for a node; what comes of it shows in its replicas. */
  async wish(node: string, { wish, stop_first, within_ms }: v.InferOutput<typeof NodeWish>, by: string): Promise<void> {
    const { fleet, store, now, poke, say } = this.#parts;
    this.#knownNode(node);
    const now_ms = now();
    const before = fleet.intents.get(node);
    const deadline_ms = within_ms === null ? null : now_ms + within_ms;
    const drain = wish === "drain" ? { since_ms: before?.drain?.since_ms ?? now_ms, stop_first, deadline_ms } : (before?.drain ?? null);
    const intent: NodeIntent | null = wish === "uncordon" ? null : { cordon: true, drain, by };
    await store.saveIntent(node, intent);
    fleet.intents = await store.intents();
    const kind = { cordon: "node-cordoned", uncordon: "node-uncordoned", drain: "node-draining" }[wish];
    await say({ level: "info", kind, subject: `node/${node}`, text: `by ${by}${stop_first ? ", stopping first" : ""}` });
    poke();
  }

  /** What a drain of a node would do to each of its replicas, as things are now. */
  drainSteps(node: string): DrainStep[] {
    const { fleet, now, counts } = this.#parts;
    this.#knownNode(node);
    const now_ms = now();
    const world = worldOf(fleet, counts(), now_ms);
    const here = fleet.replicas.filter((replica) => runs(replica) && replica.placements.some((placement) => placement.node === node));
    const later = this.#drained(world, node);
    const decision = plan(later, now_ms, IDS);
    const known = new Set(world.replicas.map((replica) => replica.id));
    const told = new Set<string>();
    return here.map(({ id, model, state }): DrainStep => {
      const step = { replica: id, model, state, to: [] };
      if (state !== "ready") return { ...step, text: "it stops, and is started elsewhere" };
      if (told.has(model)) return { ...step, text: "after the one before it of its model" };
      told.add(model);
      const next = decision.replicas.find((replica) => replica.model === model && !known.has(replica.id));
      if (!next) return { ...step, text: "it stops: others of its model are enough" };
      const to = next.placements.map((placement) => placement.node);
      return to.length > 0 ? { ...step, to, text: `to ${to.join(", ")}` } : { ...step, text: `no room: ${next.reason}` };
    });
  }

  #drained(world: World, id: string): World {
    const drain = { stop_first: false, deadline_ms: null };
    return {
      ...world,
      gathering: false,
      nodes: world.nodes.map((node) => (node.id === id ? { ...node, cordon: "it is to be drained", drain } : node)),
    };
  }

  /**
   * Takes a node out of the fleet: its certificates are refused from now on and it is forgotten, with the ports leased on it.
   * @param force also while something runs there; that is replaced, and its node is left to end it
   * @throws OperatorError E_NOT_FOUND, E_BAD_REQUEST while something runs there
   */
  async remove(node: string, force: boolean, by: string): Promise<void> {
    const { fleet, store, revoke, poke, say } = this.#parts;
    this.#knownNode(node);
    const here = fleet.replicas.filter((replica) => runs(replica) && replica.placements.some((placement) => placement.node === node));
    if (here.length > 0 && !force) {
      const why = `${here.map(({ id }) => id).join(", ")} still run there`;
      throw new OperatorError("E_BAD_REQUEST", `node ${node} is in use`, why, `llmgw ctl drain ${node}, or remove it with --force`);
    }
    await revoke(node);
    await store.removeNode(node);
    fleet.nodes.delete(node);
    fleet.intents = await store.intents();
    await say({ level: "warn", kind: "node-removed", subject: `node/${node}`, text: `by ${by}; its certificates are refused` });
    poke();
  }

  /** Asks for another replica in the place of one. */
  async replace(id: string, how: "restart" | "move", by: string): Promise<void> {
    const { fleet, poke, say } = this.#parts;
    const replica = fleet.replicas.find((each) => each.id === id);
    if (!replica) throw new OperatorError("E_NOT_FOUND", `there is no replica ${id}`, "no replica has that name", "llmgw ctl replicas");
    if (replica.state !== "ready") {
      const why = `it is ${replica.state}: ${replica.reason}`;
      throw new OperatorError(
        "E_BAD_REQUEST",
        `replica ${id} cannot be replaced now`,
        why,
        "wait until it is ready, or change the catalog",
      );
    }
    fleet.to_replace.set(id, how);
    await say({ level: "info", kind: `replica-${how}`, subject: `replica/${id}`, text: `asked for by ${by}` });
    poke();
  }

  /**
   * Keeps a number of replicas that counts instead of the catalog's.
   * @param replicas null = the catalog's counts again
   */
  async scale(model: string, replicas: number | null, by: string): Promise<void> {
    const { fleet, store, poke, say } = this.#parts;
    const spec = fleet.catalog.find(({ name }) => name === model);
    if (!spec) throw new OperatorError("E_NOT_FOUND", `there is no model "${model}"`, "the catalog names none", "llmgw ctl models");
    await store.saveScale(model, replicas === null ? null : { replicas, by });
    fleet.scales = await store.scales();
    const text = replicas === null ? `by ${by}: ${spec.replicas} again, as the catalog says` : `by ${by}: ${replicas} are wanted`;
    await say({ level: "info", kind: "model-scaled", subject: `model/${model}`, text });
    poke();
  }

  /** Nodes that are silent now do not count as vanished together any more. */
  async thaw(by: string): Promise<void> {
    const { fleet, now, poke, say } = this.#parts;
    fleet.thawed_ms = now();
    await say({ level: "warn", kind: "planner-thawed", subject: "server", text: `by ${by}: the nodes that vanished are gone` });
    poke();
  }

  /** What would happen next if the catalog on disk were read now. */
  async preview(): Promise<readonly Happening[]> {
    const { fleet, now, counts, catalog } = this.#parts;
    const now_ms = now();
    return plan({ ...worldOf(fleet, counts(), now_ms), models: fleet.wanted(await catalog()), gathering: false }, now_ms, IDS).events;
  }
}
