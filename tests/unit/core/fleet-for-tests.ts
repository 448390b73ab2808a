import { islandsOf } from "../../../src/core/fabrics.ts";
import { stateAfterSilence } from "../../../src/core/loss.ts";
import { nextParts, type PlanParts } from "../../../src/core/plan-parts.ts";
import { plan } from "../../../src/core/planner.ts";
import { DEFAULT_POLICY } from "../../../src/core/world.ts";
import type { Decision, Drain, Happening, Ids, NodeSeen, Replica, World } from "../../../src/core/world.ts";
import type { RankExit, RankStatus } from "../../../src/protocol/agent-api.ts";
import type { SizedModel } from "../../../src/protocol/catalog.ts";
import type { FabricPort, Inventory } from "../../../src/protocol/inventory.ts";
import { comparePlanVersions } from "../../../src/protocol/plan.ts";
import type { NodePlan, RankLaunch } from "../../../src/protocol/plan.ts";

export const GiB = 2 ** 30;

export interface NodeShape {
  readonly id: string;
  readonly address?: string;
  readonly gpus?: number;
  readonly memory?: number;
  readonly disk?: number;
  /** Adapters per fabric: `{ "ib-a": 2 }`. */
  readonly adapters?: Readonly<Record<string, number>>;
}

/** A port whose fabric's one subnet manager is named after the fabric. */
function portOf(id: string, fabric: string, index: number): FabricPort {
  return {
    device: `mlx5_${fabric}${index}`,
    port: 1,
    guid: `0x${id}${fabric}${index}`,
    fabric,
    excluded: "",
    state: "ACTIVE",
    rate_gbps: 400,
    numa: 0,
    managers: [`sm-${fabric}`],
    switches: [],
    answered_ms: 1,
    answering: true,
  };
}

export function inventoryOf({ id, gpus = 0, memory = 64 * GiB, disk = 500 * GiB, adapters = {} }: NodeShape): Inventory {
  const offer = { version: "1", path: "built in", origin: "built in" as const, offered: true, reason: "" };
  return {
    host: { hostname: id, arch: "x64", os: "", kernel: "", cpu_model: "", cpu_features: [], cores: 8 },
    memory: { total: memory, available: memory },
    disk: { path: "/state", total: disk, free: disk },
    gpus: Array.from({ length: gpus }, (_, index) => ({
      index,
      uuid: `GPU-${id}-${index}`,
      name: "test",
      memory_total: { value: 80 * GiB },
      memory_used: { value: 0 },
      driver: { absent: "" },
      compute_capability: { absent: "" },
      pci_bus_id: { absent: "" },
    })),
    ports: Object.entries(adapters).flatMap(([fabric, count]) => Array.from({ length: count }, (_, index) => portOf(id, fabric, index))),
    engines: [
      { kind: "sim", ...offer },
      { kind: "llamacpp", ...offer },
    ],
    warnings: [],
  };
}

export function modelOf(name: string, more: Partial<SizedModel> = {}): SizedModel {
  return { name, engine: "sim", replicas: 1, nodes: 1, gpus: 0, embeddings: false, args: {}, ...more };
}

/** Names counted from one, so that a run can be repeated. */
export function countedIds(start = 0): Ids {
  let count = start;
  return {
    suffix: () => (++count).toString(36).padStart(5, "0"),
    attempt: () => (++count).toString(16).padStart(16, "0"),
  };
}

interface Rank {
  readonly launch: RankLaunch;
  phase: RankStatus["phase"];
  since_ms: number;
  exit: RankExit | null;
}

/** A node, its agent and its engines as values: it does what the newest plan it got says, and nothing else. */
export class TestNode {
  readonly shape: NodeShape;
  readonly inventory: Inventory;
  readonly address: string;
  readonly ranks = new Map<string, Rank>();
  have: NodePlan | null = null;
  /** What the server last heard; null before the first report. */
  heard: RankStatus[] | null = null;
  heard_ms = 0;
  online = true;
  drain: Drain | null = null;

  constructor(shape: NodeShape) {
    this.shape = shape;
    this.address = shape.address ?? "10.0.0.1";
    this.inventory = inventoryOf(shape);
  }

  /** Takes a plan unless it is older, and starts and stops ranks as it says. @throws Error when two engines would share something */
  follow(part: NodePlan, now_ms: number): void {
    if (this.have && comparePlanVersions(part.version, this.have.version) < 0) throw new Error(`${this.shape.id} was given an older plan`);
    this.have = part;
    const wanted = new Set(part.ranks.map((rank) => rank.attempt));
    for (const [attempt, rank] of this.ranks) {
      if (wanted.has(attempt)) continue;
      if (rank.phase === "exited") this.ranks.delete(attempt);
      else if (rank.phase !== "stopping") this.#enter(rank, "stopping", now_ms);
    }
    for (const launch of part.ranks) {
      if (this.ranks.has(launch.attempt)) continue;
      for (const other of this.ranks.values()) {
        if (other.phase !== "exited") this.#refuseSharing(launch, other.launch);
      }
      this.ranks.set(launch.attempt, { launch, phase: launch.weights ? "fetching" : "starting", since_ms: now_ms, exit: null });
    }
  }

  #refuseSharing(a: RankLaunch, b: RankLaunch): void {
    if (a.gpus.some((gpu) => b.gpus.includes(gpu))) throw new Error(`${a.replica} and ${b.replica} share a GPU of ${this.shape.id}`);
    const portsOf = ({ door, gang }: RankLaunch) => [
      door.port,
      ...Array.from({ length: gang?.ports.count ?? 0 }, (_, n) => (gang?.ports.first ?? 0) + n),
    ];
    if (portsOf(a).some((port) => portsOf(b).includes(port)))
      throw new Error(`${a.replica} and ${b.replica} share port ${a.door.port} of ${this.shape.id}`);
  }

  #enter(rank: Rank, phase: Rank["phase"], now_ms: number): void {
    rank.phase = phase;
    rank.since_ms = now_ms;
  }

  /** Every rank goes one phase on. */
  advance(now_ms: number): void {
    for (const rank of this.ranks.values()) {
      if (rank.phase === "fetching") this.#enter(rank, "starting", now_ms);
      else if (rank.phase === "starting") this.#enter(rank, "ready", now_ms);
      else if (rank.phase === "stopping") this.exit(rank.launch.attempt, "stopped", now_ms);
    }
  }

  exit(attempt: string, kind: RankExit["kind"], now_ms: number, lines: string[] = []): void {
    const rank = this.ranks.get(attempt);
    if (!rank || rank.phase === "exited") return;
    rank.exit = { at_ms: now_ms, kind, code: 1, signal: null, reason: `test: ${kind}`, last_lines: lines };
    this.#enter(rank, "exited", now_ms);
  }

  report(now_ms: number): void {
    this.heard_ms = now_ms;
    this.heard = [...this.ranks.values()].map(({ launch, phase, since_ms, exit }) => ({
      attempt: launch.attempt,
      replica: launch.replica,
      rank: launch.rank,
      phase,
      since_ms,
      detail: "",
      engine_pid: null,
      progress: null,
      exit,
      launch,
    }));
  }

  seen(now_ms: number): NodeSeen {
    const { id } = this.shape;
    return {
      id,
      address: this.address,
      ...stateAfterSilence(now_ms - this.heard_ms),
      inventory: this.inventory,
      ranks: this.heard,
      heard_ms: this.heard_ms,
      holds: [],
      cordon: this.drain ? "it drains" : null,
      drain: this.drain,
    };
  }
}

/** A whole fleet as values: the planner, nodes, and a clock that only moves when told. */
export class TestFleet {
  readonly nodes: TestNode[];
  models: SizedModel[];
  replicas: readonly Replica[] = [];
  parts: PlanParts = new Map();
  version = { epoch: 1, generation: 0 };
  now_ms = 1_000_000;
  ids: Ids = countedIds();
  in_flight: Map<string, number> | null = new Map();
  decision: Decision | null = null;
  unreachable: Set<string> | null = new Set();
  thawed_ms = 0;
  measuring: ReadonlySet<string> = new Set();
  readonly events: Happening[] = [];

  constructor(nodes: readonly NodeShape[], models: readonly SizedModel[]) {
    this.nodes = nodes.map((shape) => new TestNode(shape));
    this.models = [...models];
    for (const node of this.nodes) node.report(this.now_ms);
  }

  world(): World {
    const nodes = this.nodes.map((node) => node.seen(this.now_ms));
    return {
      models: this.models,
      nodes,
      replicas: this.replicas,
      in_flight: this.in_flight,
      unreachable: this.unreachable,
      thawed_ms: this.thawed_ms,
      policy: DEFAULT_POLICY,
      fabrics: islandsOf(nodes.flatMap(({ id, inventory }) => (inventory.ports ?? []).map((port) => ({ ...port, node: id })))),
      measuring: this.measuring,
      gathering: false,
    };
  }

  node(id: string): TestNode {
    const node = this.nodes.find(({ shape }) => shape.id === id);
    if (!node) throw new Error(`no node ${id}`);
    return node;
  }

  only(): Replica {
    if (this.replicas.length !== 1) throw new Error(`${this.replicas.length} replicas`);
    return this.replicas[0] as Replica;
  }

  /** Decides, and gives the parts out to the nodes that are online. */
  decide(): Decision {
    const decision = plan(this.world(), this.now_ms, this.ids);
    this.replicas = decision.replicas;
    const next = { epoch: this.version.epoch, generation: this.version.generation + 1 };
    const { parts, changed } = nextParts(this.parts, decision.ranks, next);
    this.parts = parts;
    if (changed.length > 0) this.version = next;
    for (const node of this.nodes) {
      const part = parts.get(node.shape.id);
      if (node.online && part) node.follow(part, this.now_ms);
    }
    this.decision = decision;
    this.events.push(...decision.events);
    return decision;
  }

  /** Time passes, nodes work and report, and the planner decides. */
  turn(ms = 1_000): Decision {
    this.now_ms += ms;
    for (const node of this.nodes) {
      node.advance(this.now_ms);
      if (node.online) node.report(this.now_ms);
    }
    return this.decide();
  }

  turns(count: number, ms = 1_000): void {
    for (let i = 0; i < count; i++) this.turn(ms);
  }

  /** The server lost its store: it knows nothing but what nodes tell, and begins a new epoch. */
  loseStore(): void {
    this.replicas = [];
    this.parts = new Map();
    this.version = { epoch: this.version.epoch + 1, generation: 0 };
  }

  ready(model?: string): Replica[] {
    return this.replicas.filter((replica) => replica.state === "ready" && (model === undefined || replica.model === model));
  }

  kinds(): string[] {
    return this.events.map(({ kind }) => kind);
  }
}
