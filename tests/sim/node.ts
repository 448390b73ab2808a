import { converge } from "../../src/agent/converge.ts";
import { Places } from "../../src/agent/places.ts";
import type { RankExit, RankStatus, SessionKey } from "../../src/protocol/agent-api.ts";
import type { Inventory } from "../../src/protocol/inventory.ts";
import { comparePlanVersions, type NodePlan, type PlanVersion, type RankLaunch } from "../../src/protocol/plan.ts";
import { inventoryOf, type NodeShape } from "../unit/core/fleet-for-tests.ts";
import type { Chance } from "./chance.ts";

type Phase = RankStatus["phase"];

/** One attempt: its shim and engine as one small machine. */
interface Rank {
  readonly launch: RankLaunch;
  phase: Phase;
  since_ms: number;
  /** When it goes on to the next phase by itself. */
  next_ms: number;
  exit: RankExit | null;
  /** Whether it has its GPUs and ports. */
  placed: boolean;
}

/** A machine: it outlives its agent, and so do the ranks on it. */
export class SimNode {
  readonly shape: NodeShape;
  /** What it has now; replaced when that changes. */
  inventory: Inventory;
  /** What it has when nothing is broken. */
  readonly #whole: Inventory;
  readonly ranks = new Map<string, Rank>();
  readonly #chance: Chance;
  #places: Places;
  /** Whether the machine is on. */
  up = true;
  /** Whether its agent runs. */
  agent = true;
  session: string | null = null;
  #starts = 0;
  seq = 0;
  /** Kept on disk: how often it has joined. */
  joins = 0;
  /** Kept on disk: the newest plan it was ever given. */
  seen: PlanVersion = { epoch: 0, generation: 0 };
  /** One start in so many fails at once; 0 = none. */
  failing_starts = 0;
  next_report_ms = 0;
  next_join_ms = 0;
  /** Engines that the agent was told to stop, with what they were doing. */
  readonly stopped: { readonly attempt: string; readonly phase: Phase }[] = [];

  /** @param fabric which of the physical fabrics that go by one declared name its adapters are on */
  constructor(shape: NodeShape, chance: Chance, fabric: "first" | "second") {
    this.shape = shape;
    const inventory = inventoryOf(shape);
    const ports = (inventory.ports ?? []).map((port) => ({ ...port, managers: [`the ${fabric} ${port.fabric}`] }));
    this.#whole = { ...inventory, ports };
    this.inventory = this.#whole;
    this.#chance = chance;
    this.#places = new Places(shape.id);
  }

  get key(): SessionKey {
    return { machine_id: this.shape.id, boot_id: "b", agent_start_id: String(this.#starts) };
  }

  restartAgent(): void {
    this.#starts += 1;
    this.session = null;
    this.agent = true;
    this.#places = new Places(this.shape.id);
    for (const { placed, launch } of this.ranks.values()) if (placed) this.#places.take(launch);
  }

  /** Power is lost, and with it everything that ran. */
  powerOff(now_ms: number): void {
    this.up = false;
    this.session = null;
    for (const rank of this.ranks.values()) if (rank.phase !== "exited") this.#end(rank, "died", now_ms);
  }

  powerOn(): void {
    this.up = true;
    this.restartAgent();
  }

  /** A GPU is lost, and what computed on it dies; or it is back. */
  setGpu(index: number, there: boolean, now_ms: number): void {
    const lost = new Set(this.#whole.gpus.filter((gpu) => !this.inventory.gpus.includes(gpu)).map((gpu) => gpu.index));
    if (there) lost.delete(index);
    else lost.add(index);
    this.inventory = { ...this.inventory, gpus: this.#whole.gpus.filter((gpu) => !lost.has(gpu.index)) };
    if (!this.up) return;
    const there_now = new Set(this.inventory.gpus.map(({ uuid }) => uuid));
    for (const rank of this.ranks.values())
      if (rank.phase !== "exited" && rank.launch.gpus.some((uuid) => !there_now.has(uuid))) this.#end(rank, "died", now_ms);
  }

  /** A fabric's links here go down, and gangs across them die; or they come up. */
  setFabric(fabric: string, up: boolean, now_ms: number): void {
    const ports = (this.inventory.ports ?? []).map((port) => (port.fabric === fabric ? { ...port, state: up ? "ACTIVE" : "DOWN" } : port));
    this.inventory = { ...this.inventory, ports };
    if (up || !this.up) return;
    const down = new Set(ports.filter(({ state }) => state === "DOWN").map(({ device, port }) => `${device}:${port}`));
    for (const rank of this.ranks.values())
      if (rank.phase !== "exited" && rank.launch.gang?.adapters.some((name) => down.has(name))) this.#end(rank, "died", now_ms);
  }

  /** What the agent does with a plan. */
  follow(plan: NodePlan, session: string, now_ms: number): void {
    if (!this.up || !this.agent || session !== this.session || comparePlanVersions(plan.version, this.seen) < 0) return;
    this.seen = plan.version;
    const observed = [...this.ranks.values()].map(({ launch, phase }) => ({ attempt: launch.attempt, phase }));
    for (const action of converge(plan.ranks, observed)) {
      if (action.kind === "start") this.#start(action.launch, now_ms);
      else if (action.kind === "forget") this.ranks.delete(action.attempt);
      else this.#stop(action.attempt, now_ms);
    }
  }

  #start(launch: RankLaunch, now_ms: number): void {
    const phase = launch.weights === null ? "starting" : "fetching";
    const next_ms = now_ms + this.#chance.below(6_000);
    const rank: Rank = { launch, phase, since_ms: now_ms, next_ms, exit: null, placed: false };
    this.ranks.set(launch.attempt, rank);
    if (this.failing_starts > 0 && this.#chance.once(this.failing_starts)) this.#end(rank, "start", now_ms);
  }

  #stop(attempt: string, now_ms: number): void {
    const rank = this.ranks.get(attempt);
    if (!rank) return;
    this.stopped.push({ attempt, phase: rank.phase });
    Object.assign(rank, { phase: "stopping", since_ms: now_ms, next_ms: now_ms + this.#chance.below(12_000) });
  }

  #end(rank: Rank, kind: RankExit["kind"], now_ms: number): void {
    rank.exit = { at_ms: now_ms, kind, code: 1, signal: null, reason: `simulated: ${kind}`, last_lines: [] };
    Object.assign(rank, { phase: "exited", since_ms: now_ms, placed: false });
    this.#places.release(rank.launch);
  }

  /** An engine dies, or a start fails. */
  fail(attempt: string, kind: RankExit["kind"], now_ms: number): void {
    const rank = this.ranks.get(attempt);
    if (rank && rank.phase !== "exited") this.#end(rank, kind, now_ms);
  }

  /** Time passes for what runs. A rank of a gang is ready only when rank 0 says so, which `whole` tells. */
  advance(now_ms: number, whole: (launch: RankLaunch) => boolean): void {
    if (!this.up) return;
    for (const rank of this.ranks.values()) {
      if (rank.phase === "ready" || rank.phase === "exited" || now_ms < rank.next_ms) continue;
      if (rank.phase === "starting") rank.placed ||= this.agent && this.#places.take(rank.launch) === null;
      if (rank.phase === "fetching")
        Object.assign(rank, { phase: "starting", since_ms: now_ms, next_ms: now_ms + this.#chance.below(6_000) });
      else if (rank.phase === "starting" && rank.placed && whole(rank.launch)) Object.assign(rank, { phase: "ready", since_ms: now_ms });
      else if (rank.phase === "stopping") this.#end(rank, "stopped", now_ms);
    }
  }

  statuses(): RankStatus[] {
    return [...this.ranks.values()].map(({ launch, phase, since_ms, exit }) => ({
      attempt: launch.attempt,
      replica: launch.replica,
      rank: launch.rank,
      phase,
      since_ms,
      detail: phase,
      engine_pid: null,
      progress: null,
      exit,
      launch,
    }));
  }

  /** What runs or is about to. */
  running(): RankLaunch[] {
    return [...this.ranks.values()].filter(({ phase }) => phase !== "exited").map(({ launch }) => launch);
  }

  /** What holds GPUs and ports. */
  placed(): RankLaunch[] {
    return [...this.ranks.values()].filter(({ placed }) => placed).map(({ launch }) => launch);
  }
}
