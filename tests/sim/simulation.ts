import { runs, type Replica } from "../../src/core/world.ts";
import type { RankExit } from "../../src/protocol/agent-api.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import type { RankLaunch } from "../../src/protocol/plan.ts";
import { modelOf, type NodeShape } from "../unit/core/fleet-for-tests.ts";
import { Chance } from "./chance.ts";
import { Network } from "./network.ts";
import { SimNode } from "./node.ts";
import { brokenByDecision, brokenOnMachine } from "./promises.ts";
import { emptyStore, SimServer, type SimStore } from "./server.ts";

const STEP_MS = 1_000;
const REPORT_MS = 5_000;

/** `calm`: only servers, agents and the network fail. `rough`: everything may. */
export type Mood = "calm" | "rough";

/** A whole fleet in one process from one seed: what happens is chance, what must hold is checked after every step. */
export class Simulation {
  readonly nodes: SimNode[];
  readonly log: string[] = [];
  readonly #chance: Chance;
  readonly #network: Network;
  readonly #mood: Mood;
  #store: SimStore;
  #old_store: SimStore | null = null;
  #server: SimServer | null;
  #models: readonly ModelSpec[];
  #starts = 0;
  /** Attempts the server ever knew to be ready. One whose node fell silent before may be replaced unheard. */
  readonly #known_ready = new Set<string>();
  now_ms = 1_700_000_000_000;

  constructor(seed: number, mood: Mood) {
    this.#chance = new Chance(seed);
    this.#mood = mood;
    this.#network = new Network(this.#chance);
    const chance = this.#chance;
    const count = 2 + chance.below(5);
    this.nodes = Array.from({ length: count }, (_, index) => {
      const shape: NodeShape = {
        id: `n${index}`,
        address: `10.0.0.${index + 2}`,
        gpus: chance.below(5),
        adapters: { ...(chance.once(2) && { "ib-a": 1 + chance.below(2) }), ...(chance.once(3) && { "ib-b": 1 + chance.below(2) }) },
      };
      return new SimNode(shape, chance, chance.once(4) ? "second" : "first");
    });
    if (mood === "rough") for (const node of this.nodes) node.failing_starts = 6;
    this.#models = this.#catalog();
    this.#store = emptyStore(this.now_ms);
    this.#server = this.#startServer();
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

  #startServer(): SimServer {
    this.#starts += 1;
    return new SimServer(this.#store, this.#models, this.nodes, this.#starts * 1_000_000, this.now_ms);
  }

  #say(text: string): void {
    this.log.push(`${(this.now_ms - 1_700_000_000_000) / 1_000} ${text}`);
  }

  /** One second: something may happen, letters are carried, agents and server do their part, promises are checked. */
  step(): void {
    if (this.#chance.once(4)) this.#happen();
    this.#pass();
  }

  #pass(): void {
    this.now_ms += STEP_MS;
    for (const node of this.nodes) node.advance(this.now_ms, (launch) => this.#isWhole(launch));
    this.#endBrokenGangs();
    for (const node of this.nodes) this.#agentTurn(node);
    this.#network.deliver(this.now_ms);
    if (this.#server) this.#decide(this.#server);
    this.#network.deliver(this.now_ms);
    this.#checkMachines();
  }

  #happen(): void {
    const calm = [this.#serverFaults, this.#agentFault, this.#linkFault];
    const rough = [...calm, this.#engineFault, this.#engineFault, this.#powerFault, this.#operator, this.#catalogEdit];
    this.#chance.pick(this.#mood === "calm" ? calm : rough)?.call(this);
  }

  #serverFaults(): void {
    const chance = this.#chance;
    if (this.#server && chance.once(3)) {
      this.#say("server dies");
      this.#server = null;
    } else if (!this.#server) {
      // A store put back from a copy may know less than nodes do; a calm operator keeps the store there is.
      if (this.#old_store && this.#mood === "rough" && chance.once(8)) {
        this.#say("an old store is put back");
        this.#store = this.#old_store;
        this.#old_store = null;
      }
      this.#say("server starts");
      this.#server = this.#startServer();
    } else if (chance.once(10)) this.#old_store = structuredClone(this.#store);
  }

  #agentFault(): void {
    const node = this.#chance.pick(this.nodes);
    if (!node?.up) return;
    if (node.agent && this.#chance.once(2)) {
      this.#say(`agent of ${node.shape.id} dies`);
      node.agent = false;
    } else node.restartAgent();
  }

  #linkFault(): void {
    const id = this.#chance.pick(this.nodes)?.shape.id ?? "";
    if (this.#network.cut.delete(id)) return this.#say(`link of ${id} is back`);
    this.#say(`link of ${id} is cut`);
    this.#network.cut.add(id);
  }

  #engineFault(): void {
    const node = this.#chance.pick(this.nodes);
    const attempt = this.#chance.pick([...(node?.ranks.keys() ?? [])]);
    const kind = this.#chance.pick<RankExit["kind"]>(["died", "start", "fetch", "lease"]) ?? "died";
    if (!node || attempt === undefined) return;
    this.#say(`${attempt} on ${node.shape.id} ends: ${kind}`);
    node.fail(attempt, kind, this.now_ms);
  }

  #powerFault(): void {
    const node = this.#chance.pick(this.nodes);
    if (!node) return;
    this.#say(`${node.shape.id} ${node.up ? "loses power" : "boots"}`);
    if (node.up) node.powerOff(this.now_ms);
    else node.powerOn();
  }

  #operator(): void {
    if (!this.#server) return;
    const id = this.#chance.pick(this.nodes)?.shape.id ?? "";
    if (this.#store.intents.has(id)) {
      this.#say(`uncordon ${id}`);
      this.#store.intents.delete(id);
      return;
    }
    const drain = this.#chance.once(3) ? null : { since_ms: this.now_ms, stop_first: this.#chance.once(6), deadline_ms: null };
    this.#say(`${drain ? "drain" : "cordon"} ${id}`);
    this.#store.intents.set(id, { cordon: true, drain, by: "chance" });
    const ready = this.#store.replicas.filter(({ state }) => state === "ready");
    const replaced = this.#chance.once(3) ? this.#chance.pick(ready) : undefined;
    if (replaced) this.#server.fleet.to_replace.set(replaced.id, "restart");
  }

  #catalogEdit(): void {
    this.#say("catalog edited");
    this.#models = this.#catalog();
    if (this.#server) this.#server.models = this.#models;
  }

  /** A gang is whole while all its ranks have started. */
  #isWhole({ replica, ranks, gang }: RankLaunch): boolean {
    if (ranks === 1) return true;
    const there = this.nodes.flatMap((node) => (node.up ? node.running() : [])).filter((each) => each.replica === replica);
    return there.filter((each) => each.gang?.master.port === gang?.master.port).length === ranks;
  }

  /** Rank 0 of a real gang ends when it loses a rank, and the others when they lose rank 0. */
  #endBrokenGangs(): void {
    for (const node of this.nodes) {
      for (const [attempt, rank] of node.ranks) {
        if (rank.launch.ranks > 1 && rank.phase === "ready" && !this.#isWhole(rank.launch)) node.fail(attempt, "died", this.now_ms);
      }
    }
  }

  #agentTurn(node: SimNode): void {
    const server = this.#server;
    if (!node.up || !node.agent || !server) return;
    const { id } = node.shape;
    const { key } = node;
    if (node.session === null) {
      if (this.now_ms < node.next_join_ms) return;
      node.next_join_ms = this.now_ms + 2_000;
      node.joins += 1;
      const [joins, seen, ranks] = [node.joins, node.seen, node.statuses()];
      this.#network.send(id, this.now_ms, () => {
        // The server takes what arrives; whether the agent still waits for the answer is another matter.
        const session = this.#server === server ? server.join(node, joins, seen, ranks, this.now_ms) : null;
        const waits = node.key.agent_start_id === key.agent_start_id && node.agent && node.up && node.joins === joins;
        if (session !== null && waits) Object.assign(node, { session, seq: 0 });
      });
      return;
    }
    if (this.now_ms < node.next_report_ms) return;
    node.next_report_ms = this.now_ms + this.#chance.below(REPORT_MS);
    node.seq += 1;
    const { session, seq, seen } = node;
    const ranks = node.statuses();
    this.#network.send(id, this.now_ms, () => {
      if (!this.#server?.report(id, session, seq, seen, ranks, this.now_ms) && node.session === session) node.session = null;
    });
  }

  #giveOut(): void {
    for (const node of this.nodes) {
      const { id } = node.shape;
      const part = this.#server?.partFor(id);
      const session = this.#server?.fleet.nodes.get(id)?.session?.id;
      if (part && session !== undefined) this.#network.send(id, this.now_ms, () => node.follow(part, session, this.now_ms));
    }
  }

  /** Doors of machines that are off do not answer the gateway; a cut link is the server's alone. */
  #unreachable(): Set<string> {
    return new Set(this.nodes.filter((node) => !node.up).flatMap((node) => [...node.ranks.keys()]));
  }

  #fail(what: string): never {
    throw new Error(`${what}\n${this.log.slice(-40).join("\n")}`);
  }

  #checkMachines(): void {
    for (const node of this.nodes) {
      const broken = brokenOnMachine(node);
      if (broken !== null) this.#fail(broken);
      if (this.#mood === "calm") {
        for (const { attempt, phase } of node.stopped)
          if (phase === "ready" && this.#known_ready.has(attempt)) this.#fail(`healthy engine ${attempt} on ${node.shape.id} was stopped`);
      }
      node.stopped.length = 0;
    }
  }

  #decide(server: SimServer): void {
    const turn = server.turn({ in_flight: new Map(), unreachable: this.#unreachable() }, this.now_ms);
    for (const { state, placements } of turn.after)
      if (state === "ready") for (const { launch } of placements) this.#known_ready.add(launch.attempt);
    const broken = brokenByDecision({ turn, fleet: server.fleet, models: this.#models, nodes: this.nodes });
    if (broken !== null) this.#fail(broken);
    this.#giveOut();
  }

  /** Faults end; everything wanted must be ready in the end, or wait with a reason, and nothing else run. */
  settle(): void {
    this.#say("faults end");
    this.#network.trouble = 0;
    this.#network.cut.clear();
    this.#store.intents.clear();
    // One machine may stay off for good: what ran there has to be ready elsewhere.
    const dead = this.#mood === "rough" && this.#chance.once(2) ? this.#chance.pick(this.nodes) : undefined;
    for (const node of this.nodes) {
      node.failing_starts = 0;
      if (node === dead) node.powerOff(this.now_ms);
      else if (!node.up) node.powerOn();
      else if (!node.agent) node.restartAgent();
    }
    this.#server ??= this.#startServer();
    for (let i = 0; i < 900 && !this.#isSettled(); i++) this.#pass();
    if (!this.#isSettled())
      this.#fail(`it does not settle: ${this.#store.replicas.map(({ id, state, reason }) => `${id} ${state} ${reason}`).join("; ")}`);
  }

  #isSettled(): boolean {
    // What is on a machine that is off counts for nothing, whatever its record says.
    const off = new Set(this.nodes.flatMap(({ up, shape }) => (up ? [] : [shape.id])));
    const isLost = (replica: Replica) => replica.state !== "pending" && replica.placements.some(({ node }) => off.has(node));
    const replicas = this.#store.replicas.filter((replica) => !isLost(replica));
    const planned = new Set(replicas.filter(runs).flatMap(({ placements }) => placements.map(({ launch }) => launch.attempt)));
    const running = this.nodes.flatMap((node) => node.running().map(({ attempt }) => attempt));
    if (running.length !== planned.size || running.some((attempt) => !planned.has(attempt))) return false;
    return this.#models.every((spec) => {
      const group = replicas.filter(({ model }) => model === spec.name);
      const ready = group.filter(({ state }) => state === "ready").length;
      const waiting = group.filter(
        ({ id, state }) => state === "pending" && (this.#server?.fleet.refusals.get(id)?.length ?? 0) > 0,
      ).length;
      return group.length === ready + waiting && (ready === spec.replicas || (ready < spec.replicas && ready + waiting >= spec.replicas));
    });
  }
}
