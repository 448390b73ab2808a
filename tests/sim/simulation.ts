import type { RankExit } from "../../src/protocol/agent-api.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import { modelOf, type NodeShape } from "../unit/core/fleet-for-tests.ts";
import { Chance } from "./chance.ts";
import type { SimStore } from "./server.ts";
import { SimFleet } from "./sim-fleet.ts";

/** `calm`: only servers, agents and the network fail. `rough`: everything may. */
export type Mood = "calm" | "rough";

/** A fleet from one seed to which things happen by chance. */
export class Simulation {
  readonly #chance: Chance;
  readonly #fleet: SimFleet;
  readonly #mood: Mood;
  #models: readonly ModelSpec[];
  #old_store: SimStore | null = null;

  constructor(seed: number, mood: Mood) {
    const chance = (this.#chance = new Chance(seed));
    this.#mood = mood;
    const nodes = Array.from({ length: 2 + chance.below(5) }, (_, index) => {
      const shape: NodeShape = {
        id: `n${index}`,
        address: `10.0.0.${index + 2}`,
        gpus: chance.below(5),
        adapters: { ...(chance.once(2) && { "ib-a": 1 + chance.below(2) }), ...(chance.once(3) && { "ib-b": 1 + chance.below(2) }) },
      };
      return { shape, fabric: chance.once(4) ? ("second" as const) : ("first" as const) };
    });
    this.#models = this.#catalog();
    this.#fleet = new SimFleet({ nodes, models: this.#models, chance, trouble: 1, calm: mood === "calm", tells: false });
    if (mood === "rough") for (const node of this.#fleet.nodes) node.failing_starts = 6;
  }

  get log(): readonly string[] {
    return this.#fleet.log;
  }

  #catalog(): ModelSpec[] {
    const chance = this.#chance;
    return Array.from({ length: 1 + chance.below(3) }, (_, index) =>
      modelOf(`m${index}`, {
        replicas: chance.below(4),
        gpus: chance.below(3),
        nodes: chance.once(3) ? 2 : 1,
        ...(chance.once(2) && { source: `https://x/${index}` }),
        context: chance.once(2) ? 1_024 : 2_048,
      }),
    );
  }

  /** One second, in which something may happen. */
  step(): void {
    if (this.#chance.once(4)) this.#happen();
    this.#fleet.pass();
  }

  #happen(): void {
    const calm = [this.#serverFault, this.#agentFault, this.#linkFault];
    const machines = [this.#engineFault, this.#engineFault, this.#powerFault, this.#gpuFault, this.#fabricFault];
    const rough = [...calm, ...machines, this.#operator, this.#catalogEdit, this.#scale];
    this.#chance.pick(this.#mood === "calm" ? calm : rough)?.call(this);
  }

  #anyNode(): string {
    return this.#chance.pick(this.#fleet.nodes)?.shape.id ?? "";
  }

  #serverFault(): void {
    const [chance, fleet] = [this.#chance, this.#fleet];
    if (fleet.serverRuns && chance.once(3)) fleet.killServer();
    else if (!fleet.serverRuns) {
      // A store put back from a copy may know less than nodes do; a calm operator keeps the store there is.
      if (this.#old_store && this.#mood === "rough" && chance.once(8)) {
        fleet.putBack(this.#old_store);
        this.#old_store = null;
      }
      fleet.startServer();
    } else if (chance.once(10)) this.#old_store = fleet.copyStore();
  }

  #agentFault(): void {
    const id = this.#anyNode();
    const { up, agent } = this.#fleet.node(id);
    if (!up) return;
    if (agent && this.#chance.once(2)) this.#fleet.killAgent(id);
    else this.#fleet.startAgent(id);
  }

  #linkFault(): void {
    const id = this.#anyNode();
    if (!this.#fleet.mendLink(id)) this.#fleet.cutLink(id);
  }

  #engineFault(): void {
    const id = this.#anyNode();
    const attempt = this.#chance.pick([...this.#fleet.node(id).ranks.keys()]);
    const kind = this.#chance.pick<RankExit["kind"]>(["died", "start", "fetch", "lease"]) ?? "died";
    if (attempt !== undefined) this.#fleet.failEngine(id, attempt, kind);
  }

  #powerFault(): void {
    const id = this.#anyNode();
    this.#fleet.power(id, !this.#fleet.node(id).up);
  }

  #gpuFault(): void {
    const id = this.#anyNode();
    const { shape, inventory } = this.#fleet.node(id);
    if (!shape.gpus) return;
    const index = this.#chance.below(shape.gpus);
    this.#fleet.setGpu(id, index, !inventory.gpus.some((gpu) => gpu.index === index));
  }

  #fabricFault(): void {
    const id = this.#anyNode();
    const port = this.#chance.pick(this.#fleet.node(id).inventory.ports ?? []);
    if (port) this.#fleet.setFabric(id, port.fabric, port.state !== "ACTIVE");
  }

  #operator(): void {
    const [chance, fleet] = [this.#chance, this.#fleet];
    if (!fleet.serverRuns) return;
    const id = this.#anyNode();
    if (fleet.intentOf(id)) return fleet.uncordon(id);
    if (chance.once(3)) fleet.cordon(id);
    else fleet.drain(id, chance.once(6));
    const ready = fleet.replicas.filter(({ state }) => state === "ready");
    const replaced = chance.once(3) ? chance.pick(ready) : undefined;
    if (replaced) fleet.restart(replaced.id);
  }

  #catalogEdit(): void {
    this.#models = this.#catalog();
    this.#fleet.edit(this.#models);
  }

  #scale(): void {
    const model = this.#chance.pick(this.#models);
    if (model) this.#fleet.scale(model.name, this.#chance.once(3) ? null : this.#chance.below(5));
  }

  /** Faults end, but for what is broken for good; the fleet has to come to rest as it should be. */
  settle(): void {
    const fleet = this.#fleet;
    fleet.calmDown();
    // One machine may stay off for good: what ran there has to be ready elsewhere.
    const dead = this.#mood === "rough" && this.#chance.once(2) ? this.#chance.pick(fleet.nodes) : undefined;
    for (const node of fleet.nodes) {
      node.failing_starts = 0;
      if (node === dead) fleet.power(node.shape.id, false);
      else if (!node.up) fleet.power(node.shape.id, true);
      else if (!node.agent) fleet.startAgent(node.shape.id);
    }
    fleet.settle();
  }
}
