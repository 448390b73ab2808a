// Random fleets, catalogs, faults and operators against the planner: what must hold whatever happens.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { plan } from "../../src/core/planner.ts";
import { memoryOf } from "../../src/core/memory.ts";
import { runs } from "../../src/core/world.ts";
import type { RankExit } from "../../src/protocol/agent-api.ts";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import { comparePlanVersions } from "../../src/protocol/plan.ts";
import { countedIds, GiB, modelOf, TestFleet } from "../unit/core/fleet-for-tests.ts";

const shapes = fc.array(fc.record({ gpus: fc.nat(4), memory: fc.integer({ min: 4, max: 64 }), shared: fc.boolean() }), {
  minLength: 1,
  maxLength: 4,
});
const model = fc.record({
  replicas: fc.nat(4),
  gpus: fc.nat(2),
  memory: fc.nat(16),
  fetched: fc.boolean(),
  context: fc.constantFrom(1_024, 2_048),
});
const catalog = fc.array(model, { maxLength: 3 });
const KINDS: RankExit["kind"][] = ["fetch", "start", "died", "lease", "stopped"];

type Step =
  | { readonly do: "turn"; readonly ms: number }
  | { readonly do: "exit"; readonly at: number; readonly kind: RankExit["kind"] }
  | { readonly do: "silence" | "return" | "reboot" | "drain" | "undrain"; readonly at: number }
  | { readonly do: "lose store" | "restart server" | "keep copy" | "put copy back" }
  | { readonly do: "catalog"; readonly models: readonly ModelSpec[] };

const toModels = (entries: readonly { replicas: number; gpus: number; memory: number; fetched: boolean; context: number }[]): ModelSpec[] =>
  entries.map(({ replicas, gpus, memory, fetched, context }, index) =>
    modelOf(`m${index}`, { replicas, gpus, memory: memory * GiB, context, ...(fetched && { source: `http://x/${index}` }) }),
  );

const models = catalog.map(toModels);
const turn = fc.record({ do: fc.constant("turn" as const), ms: fc.constantFrom(100, 1_000, 5_000, 30_000, 100_000) });
const at = fc.nat(20);
const faults = [
  fc.record({ do: fc.constant("exit" as const), at, kind: fc.constantFrom(...KINDS) }),
  fc.record({ do: fc.constantFrom("silence" as const, "return" as const, "reboot" as const), at }),
];
const drains = fc.record({ do: fc.constantFrom("drain" as const, "undrain" as const), at });
const servers = fc.record({
  do: fc.constantFrom("lose store" as const, "restart server" as const, "keep copy" as const, "put copy back" as const),
});
const silences = fc.record({ do: fc.constantFrom("silence" as const, "return" as const), at });
const edits = fc.record({ do: fc.constant("catalog" as const), models });

/** A run of one fleet: does the steps and checks after each what must always hold. */
class Run {
  readonly fleet: TestFleet;
  #copy: TestFleet["replicas"] = [];
  #newest = new Map<string, { epoch: number; generation: number }>();
  /** Per model: how many replicas there were at the last check, but for those on their way out. */
  readonly #staying = new Map<string, number>();
  readonly #doors_too: boolean;

  /** @param doors_too whether a node that falls silent is out of the gateway's reach as well */
  constructor(nodes: readonly { gpus: number; memory: number; shared: boolean }[], catalog: readonly ModelSpec[], doors_too: boolean) {
    this.#doors_too = doors_too;
    const shapes = nodes.map(({ gpus, memory, shared }, index) => ({
      id: `n${index}`,
      address: shared ? "10.0.0.1" : `10.0.0.${index + 2}`,
      gpus,
      memory: memory * GiB,
    }));
    this.fleet = new TestFleet(shapes, catalog);
  }

  do(step: Step): void {
    const { fleet } = this;
    const node = "at" in step ? fleet.nodes[step.at % fleet.nodes.length] : undefined;
    if (step.do === "turn") this.#turn(step.ms);
    else if (step.do === "catalog") fleet.models = [...step.models];
    else if (step.do === "exit") {
      const running = fleet.nodes.flatMap((each) => [...each.ranks.keys()].map((attempt) => ({ each, attempt })));
      const hit = running[step.at % Math.max(1, running.length)];
      hit?.each.exit(hit.attempt, step.kind, fleet.now_ms, ["oops"]);
    } else if (step.do === "silence" && node) node.online = false;
    else if (step.do === "return" && node) node.online = true;
    else if (step.do === "reboot" && node) node.ranks.clear();
    else if (step.do === "drain" && node) node.drain = { stop_first: step.at % 3 === 0, deadline_ms: null };
    else if (step.do === "undrain" && node) node.drain = null;
    else if (step.do === "lose store") this.#newStore([]);
    else if (step.do === "keep copy") this.#copy = fleet.replicas;
    else if (step.do === "put copy back") this.#newStore(this.#copy);
    else if (step.do === "restart server") fleet.parts = new Map();
    if (step.do === "turn") this.check();
  }

  #turn(ms: number): void {
    const { fleet } = this;
    const cut = this.#doors_too ? fleet.nodes.filter((node) => !node.online) : [];
    fleet.unreachable = new Set(cut.flatMap((node) => [...node.ranks.keys()]));
    fleet.turn(ms);
  }

  /** Another store: what nodes said before is not known to it. */
  #newStore(replicas: TestFleet["replicas"]): void {
    this.fleet.loseStore();
    this.fleet.replicas = replicas;
    for (const node of this.fleet.nodes) if (!node.online) node.heard = null;
  }

  check(): void {
    this.#checkHeld();
    this.#checkPlan();
    this.#checkDeterminism();
  }

  /** No GPU twice; and as long as no store was lost no port twice, and no node given more memory than it has. */
  #checkHeld(): void {
    const { fleet } = this;
    const adopted = fleet.kinds().includes("replica-adopted");
    const held = new Set<string>();
    const memory = new Map<string, number>();
    const take = (what: string) => {
      if (held.has(what)) throw new Error(`${what} is held twice`);
      held.add(what);
    };
    for (const replica of fleet.replicas) {
      if (!runs(replica) && replica.state !== "stopping") continue;
      for (const { node, launch } of replica.placements) {
        for (const gpu of launch.gpus) take(gpu);
        // After a loss a port of an address that nodes share may be given out again: the shim finds it taken and says so.
        if (!adopted) take(`port ${launch.door.address} ${launch.door.port}`);
        memory.set(node, (memory.get(node) ?? 0) + memoryOf(replica.spec).system);
      }
    }
    if (adopted) return;
    for (const node of fleet.nodes) expect(memory.get(node.shape.id) ?? 0).toBeLessThanOrEqual(node.shape.memory ?? 0);
  }

  /** Plans never grow older; a replica waits only with reasons; without a lost store one more than wanted at most. */
  #checkPlan(): void {
    const { fleet } = this;
    for (const [node, part] of fleet.parts) {
      const before = this.#newest.get(node);
      if (before && comparePlanVersions(part.version, before) < 0) throw new Error(`the part of ${node} is older`);
      this.#newest.set(node, part.version);
    }
    for (const replica of fleet.replicas) {
      if (replica.state !== "ready") expect(replica.reason).not.toBe("");
      if (replica.state === "failed") expect(replica.next_try_ms).toBeGreaterThan(fleet.now_ms);
      if (replica.state !== "pending") continue;
      const refusals = fleet.decision?.refusals.get(replica.id) ?? [];
      expect(refusals.length).toBe(fleet.nodes.length);
    }
    // What is lost with its node is replaced beside what is wanted; once it is back they only grow fewer.
    const replaces = fleet.kinds().includes("replica-adopted") || fleet.nodes.some((node) => !node.online);
    for (const spec of fleet.models) {
      const staying = fleet.replicas.filter(({ model: name, state }) => name === spec.name && state !== "draining" && state !== "stopping");
      const before = this.#staying.get(spec.name) ?? 0;
      if (!replaces) expect(staying.length).toBeLessThanOrEqual(Math.max(spec.replicas + 1, before));
      this.#staying.set(spec.name, staying.length);
    }
  }

  #checkDeterminism(): void {
    const world = this.fleet.world();
    const first = plan(world, this.fleet.now_ms, countedIds(1_000_000));
    const second = plan({ ...world, nodes: [...world.nodes].reverse() }, this.fleet.now_ms, countedIds(1_000_000));
    expect(second.replicas).toEqual(first.replicas);
  }

  /** Faults end and nodes are back. */
  settle(): void {
    for (const node of this.fleet.nodes) {
      node.online = true;
      node.drain = null;
    }
    for (let i = 0; i < 60; i++) this.do({ do: "turn", ms: 20_000 });
  }
}

test("whatever happens: nothing is held twice, plans do not age, and with room all is ready in the end", () => {
  fc.assert(
    fc.property(
      shapes,
      models,
      fc.array(fc.oneof({ weight: 4, arbitrary: turn }, ...faults, drains, servers, edits), { maxLength: 40 }),
      (nodes, catalog, steps) => {
        const run = new Run(nodes, catalog, true);
        run.fleet.decide();
        for (const step of steps) run.do(step);
        run.settle();
        const { fleet } = run;
        for (const spec of fleet.models) {
          const group = fleet.replicas.filter(({ model: name }) => name === spec.name);
          const ready = group.filter(({ state }) => state === "ready");
          const waiting = group.filter(({ state }) => state === "pending");
          // An outdated one may stand for one that has no room.
          expect(ready.length + (ready.length < spec.replicas ? waiting.length : 0)).toBeGreaterThanOrEqual(spec.replicas);
          expect(group.length).toBe(ready.length + waiting.length);
        }
        const running = fleet.nodes.flatMap((node) =>
          [...node.ranks.values()].filter(({ phase }) => phase !== "exited").map(({ launch }) => launch.attempt),
        );
        expect(running.toSorted()).toEqual(
          fleet
            .ready()
            .map(({ placements }) => placements[0]?.launch.attempt ?? "")
            .toSorted(),
        );
      },
    ),
    { numRuns: 300, includeErrorInReport: true },
  );
});

test("a healthy engine is never stopped by silence, server restarts or a lost store", () => {
  fc.assert(
    fc.property(
      shapes,
      models,
      fc.array(fc.oneof({ weight: 3, arbitrary: turn }, silences, servers), { maxLength: 40 }),
      (nodes, catalog, steps) => {
        const run = new Run(nodes, catalog, false);
        run.fleet.decide();
        for (let i = 0; i < 6; i++) run.do({ do: "turn", ms: 1_000 });
        const engines = run.fleet.ready().map(({ placements }) => placements[0]?.launch.attempt ?? "");
        const alive = () =>
          run.fleet.nodes.flatMap((node) =>
            [...node.ranks.values()].filter(({ phase }) => phase === "ready").map(({ launch }) => launch.attempt),
          );
        for (const step of steps) {
          if (step.do === "keep copy" || step.do === "put copy back") continue;
          run.do(step);
          const now = alive();
          for (const engine of engines)
            if (!now.includes(engine)) throw new Error(`engine ${engine} was stopped by: ${JSON.stringify(step)}`);
        }
      },
    ),
    { numRuns: 300, includeErrorInReport: true },
  );
});
