import { freezeOf } from "../../src/core/loss.ts";
import { DEFAULT_POLICY, runs, type Replica } from "../../src/core/world.ts";
import type { RankExit } from "../../src/protocol/agent-api.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import type { RankLaunch } from "../../src/protocol/plan.ts";
import type { NodeIntent } from "../../src/server/store.ts";
import type { NodeShape } from "../unit/core/fleet-for-tests.ts";
import type { Chance } from "./chance.ts";
import { Network } from "./network.ts";
import { SimNode } from "./node.ts";
import { brokenByDecision, brokenOnMachine } from "./promises.ts";
import { emptyStore, SimServer, type SimStore, type Turn } from "./server.ts";

const STEP_MS = 1_000;
const REPORT_MS = 5_000;
const BEGIN_MS = 1_700_000_000_000;

export interface SimFleetOptions {
  readonly nodes: readonly { readonly shape: NodeShape; readonly fabric: "first" | "second" }[];
  readonly models: readonly ModelSpec[];
  /** How long starts take, and what the network does to letters. */
  readonly chance: Chance;
  /** How much goes wrong on the network: 0 = nothing. */
  readonly trouble: number;
  /** Only servers, agents and the network fail: then no healthy engine may ever be stopped. */
  readonly calm: boolean;
  /** What is decided is said, too. */
  readonly tells: boolean;
}

/** A whole fleet in one process: time passes in steps of a second, and what must hold is checked after each. */
export class SimFleet {
  readonly nodes: SimNode[];
  /** What was done to it and what it decided, one line each, for people. */
  readonly log: string[] = [];
  readonly #chance: Chance;
  readonly #network: Network;
  readonly #calm: boolean;
  readonly #tells: boolean;
  #store: SimStore;
  #server: SimServer | null;
  #models: readonly ModelSpec[];
  #starts = 0;
  /** Attempts the server ever knew to be ready. One whose node fell silent before may be replaced unheard. */
  readonly #known_ready = new Set<string>();
  #frozen = "";
  now_ms = BEGIN_MS;

  constructor({ nodes, models, chance, trouble, calm, tells }: SimFleetOptions) {
    this.#chance = chance;
    this.#calm = calm;
    this.#tells = tells;
    this.#network = new Network(chance);
    this.#network.trouble = trouble;
    this.nodes = nodes.map(({ shape, fabric }) => new SimNode(shape, chance, fabric));
    this.#models = models;
    this.#store = emptyStore(this.now_ms);
    this.#server = this.#newServer();
  }

  get replicas(): readonly Replica[] {
    return this.#store.replicas;
  }

  get serverRuns(): boolean {
    return this.#server !== null;
  }

  node(id: string): SimNode {
    const node = this.nodes.find(({ shape }) => shape.id === id);
    if (!node) throw new Error(`there is no node ${id}`);
    return node;
  }

  say(text: string): void {
    this.log.push(`${String((this.now_ms - BEGIN_MS) / 1_000).padStart(5)} s  ${text}`);
  }

  #newServer(): SimServer {
    this.#starts += 1;
    return new SimServer(this.#store, this.#models, this.nodes, this.#starts * 1_000_000, this.now_ms);
  }

  startServer(): void {
    this.say("the server starts");
    this.#server ??= this.#newServer();
  }

  killServer(): void {
    this.say("the server dies");
    this.#server = null;
  }

  copyStore(): SimStore {
    return structuredClone(this.#store);
  }

  /** Only while no server runs. */
  putBack(store: SimStore): void {
    this.say("an old store is put back");
    this.#store = store;
  }

  killAgent(id: string): void {
    this.say(`the agent of ${id} dies`);
    this.node(id).agent = false;
  }

  startAgent(id: string): void {
    this.node(id).restartAgent();
  }

  cutLink(id: string): void {
    this.say(`the link of ${id} is cut`);
    this.#network.cut.add(id);
  }

  /** @returns false when it was not cut */
  mendLink(id: string): boolean {
    if (!this.#network.cut.delete(id)) return false;
    this.say(`the link of ${id} is back`);
    return true;
  }

  power(id: string, on: boolean): void {
    this.say(on ? `${id} boots` : `${id} loses power`);
    if (on) this.node(id).powerOn();
    else this.node(id).powerOff(this.now_ms);
  }

  failEngine(id: string, attempt: string, kind: RankExit["kind"]): void {
    this.say(`${attempt} on ${id} ends: ${kind}`);
    this.node(id).fail(attempt, kind, this.now_ms);
  }

  /** A GPU falls off the bus, or is back. */
  setGpu(id: string, index: number, there: boolean): void {
    this.say(`GPU ${index} of ${id} is ${there ? "back" : "lost"}`);
    this.node(id).setGpu(index, there, this.now_ms);
  }

  /** A fabric's links of one node go down, or come up. */
  setFabric(id: string, fabric: string, up: boolean): void {
    this.say(`${fabric} of ${id} is ${up ? "up" : "down"}`);
    this.node(id).setFabric(fabric, up, this.now_ms);
  }

  intentOf(id: string): NodeIntent | undefined {
    return this.#store.intents.get(id);
  }

  cordon(id: string): void {
    this.say(`operator: cordon ${id}`);
    this.#store.intents.set(id, { cordon: true, drain: null, by: "operator" });
  }

  drain(id: string, stop_first = false): void {
    this.say(`operator: drain ${id}${stop_first ? " --stop-first" : ""}`);
    this.#store.intents.set(id, { cordon: true, drain: { since_ms: this.now_ms, stop_first, deadline_ms: null }, by: "operator" });
  }

  uncordon(id: string): void {
    this.say(`operator: uncordon ${id}`);
    this.#store.intents.delete(id);
  }

  restart(replica: string): void {
    this.say(`operator: restart ${replica}`);
    this.#server?.fleet.to_replace.set(replica, "restart");
  }

  /** @param replicas null = the catalog's number counts again */
  scale(model: string, replicas: number | null): void {
    this.say(`operator: scale ${model} ${replicas ?? "--catalog"}`);
    if (replicas === null) this.#store.scales.delete(model);
    else this.#store.scales.set(model, { replicas, by: "operator" });
  }

  edit(models: readonly ModelSpec[]): void {
    this.say("operator: the catalog is edited");
    this.#models = models;
    if (this.#server) this.#server.models = models;
  }

  thaw(): void {
    this.say("operator: thaw");
    if (this.#server) this.#server.fleet.thawed_ms = this.now_ms;
  }

  /** What is wanted, by the catalog and by operators. */
  #wanted(): ModelSpec[] {
    return this.#models.map((spec) => ({ ...spec, replicas: this.#store.scales.get(spec.name)?.replicas ?? spec.replicas }));
  }

  /** One second: agents and server do their part, letters are carried, promises are checked. */
  pass(): void {
    this.now_ms += STEP_MS;
    for (const node of this.nodes) node.advance(this.now_ms, (launch) => this.#isWhole(launch));
    this.#endBrokenGangs();
    for (const node of this.nodes) this.#agentTurn(node);
    this.#network.deliver(this.now_ms);
    if (this.#server) this.#decide(this.#server);
    this.#network.deliver(this.now_ms);
    this.#checkMachines();
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
    const [ranks, { inventory }] = [node.statuses(), node];
    this.#network.send(id, this.now_ms, () => {
      if (!this.#server?.report(id, session, seq, seen, ranks, inventory, this.now_ms) && node.session === session) node.session = null;
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

  fail(what: string): never {
    throw new Error(`${what}\n${this.log.slice(-40).join("\n")}`);
  }

  #checkMachines(): void {
    for (const node of this.nodes) {
      const broken = brokenOnMachine(node);
      if (broken !== null) this.fail(broken);
      if (this.#calm) {
        for (const { attempt, phase } of node.stopped)
          if (phase === "ready" && this.#known_ready.has(attempt)) this.fail(`healthy engine ${attempt} on ${node.shape.id} was stopped`);
      }
      node.stopped.length = 0;
    }
  }

  #decide(server: SimServer): void {
    const turn = server.turn({ in_flight: new Map(), unreachable: this.#unreachable() }, this.now_ms);
    for (const { state, placements } of turn.after)
      if (state === "ready") for (const { launch } of placements) this.#known_ready.add(launch.attempt);
    if (this.#tells) for (const line of [...toldBy(turn), ...this.#freezeOf(server)]) this.say(line);
    const broken = brokenByDecision({ turn, fleet: server.fleet, models: this.#wanted(), nodes: this.nodes });
    if (broken !== null) this.fail(broken);
    this.#giveOut();
  }

  /** A freeze is told when it begins, grows or ends. */
  #freezeOf({ fleet }: SimServer): string[] {
    const freeze = freezeOf({ nodes: fleet.seen(this.now_ms), policy: DEFAULT_POLICY, thawed_ms: fleet.thawed_ms });
    const frozen = freeze?.nodes.join(", ") ?? "";
    if (frozen === this.#frozen) return [];
    this.#frozen = frozen;
    return [frozen === "" ? "  nothing is frozen any more" : `  frozen: ${frozen} vanished together`];
  }

  /** Faults of servers, agents and the network end, and no operator wants anything of a node any more. */
  calmDown(): void {
    this.say("faults end");
    this.#network.trouble = 0;
    this.#network.cut.clear();
    this.#store.intents.clear();
    this.#server ??= this.#newServer();
  }

  /** Everything wanted must be ready in the end, or wait with a reason, and nothing else run. @throws Error when not */
  settle(): void {
    for (let i = 0; i < 900 && !this.isSettled(); i++) this.pass();
    if (!this.isSettled())
      this.fail(`it does not settle: ${this.replicas.map(({ id, state, reason }) => `${id} ${state} ${reason}`).join("; ")}`);
  }

  isSettled(): boolean {
    // What is on a machine that is off counts for nothing, whatever its record says.
    const off = new Set(this.nodes.flatMap(({ up, shape }) => (up ? [] : [shape.id])));
    const isLost = (replica: Replica) => replica.state !== "pending" && replica.placements.some(({ node }) => off.has(node));
    const replicas = this.#store.replicas.filter((replica) => !isLost(replica));
    const planned = new Set(replicas.filter(runs).flatMap(({ placements }) => placements.map(({ launch }) => launch.attempt)));
    const running = this.nodes.flatMap((node) => node.running().map(({ attempt }) => attempt));
    if (running.length !== planned.size || running.some((attempt) => !planned.has(attempt))) return false;
    return this.#wanted().every((spec) => {
      const group = replicas.filter(({ model }) => model === spec.name);
      const ready = group.filter(({ state }) => state === "ready").length;
      const waiting = group.filter(
        ({ id, state }) => state === "pending" && (this.#server?.fleet.refusals.get(id)?.length ?? 0) > 0,
      ).length;
      return group.length === ready + waiting && (ready === spec.replicas || (ready < spec.replicas && ready + waiting >= spec.replicas));
    });
  }
}

/** A decision for people: what became of each replica, and why. */
function toldBy({ before, after, events }: Turn): string[] {
  const was = new Map(before.map((replica) => [replica.id, replica]));
  const now = new Map(after.map((replica) => [replica.id, replica]));
  const place = ({ placements }: Replica) => (placements.length === 0 ? "" : ` on ${placements.map(({ node }) => node).join(", ")}`);
  const changes = [...new Set([...was.keys(), ...now.keys()])].flatMap((id) => {
    const [old, next] = [was.get(id), now.get(id)];
    if (!next) return [`  ${id} is gone`];
    if (old?.state === next.state) return [];
    return [`  ${id} is ${next.state}${place(next)}${next.reason === "" ? "" : `: ${next.reason}`}`];
  });
  const said = events
    .filter(({ level, kind }) => level !== "info" || kind === "node-ready")
    .map(({ subject, text }) => `  ${subject}: ${text}`);
  return [...changes, ...said.filter((line) => !changes.some((change) => change.endsWith(line.split(": ").slice(1).join(": "))))];
}
