import { expect, test } from "bun:test";
import { reasonOfModel } from "../../../src/core/reasons.ts";
import type { NodePlan } from "../../../src/protocol/plan.ts";
import { GiB, modelOf, TestFleet } from "./fleet-for-tests.ts";

const NODES = [{ id: "a" }, { id: "b" }];
const attempts = (fleet: TestFleet) => fleet.ready().map((replica) => replica.placements[0]?.launch.attempt);

test("scaling up adds, scaling down takes what serves least and is newest", () => {
  const fleet = new TestFleet(NODES, [modelOf("m", { replicas: 2 })]);
  fleet.turns(3);
  const first = fleet.ready().map(({ id }) => id);
  expect(first).toHaveLength(2);
  fleet.models = [modelOf("m", { replicas: 4 })];
  fleet.turns(3);
  expect(fleet.ready()).toHaveLength(4);
  fleet.models = [modelOf("m", { replicas: 2 })];
  fleet.turns(10);
  expect(fleet.replicas.map(({ id }) => id)).toEqual(first);
});

test("scaling down takes a replica that is not ready before one that is", () => {
  const fleet = new TestFleet([{ id: "a", gpus: 1 }], [modelOf("m", { replicas: 2, gpus: 1 })]);
  fleet.turns(3);
  const [kept] = fleet.ready();
  fleet.models = [modelOf("m", { replicas: 1, gpus: 1 })];
  fleet.turns(2);
  expect(fleet.replicas.map(({ id }) => id)).toEqual([kept?.id ?? ""]);
});

test("a changed model rolls replica by replica and never has fewer ready ones than wanted", () => {
  const fleet = new TestFleet(NODES, [modelOf("m", { replicas: 3 })]);
  fleet.turns(3);
  const old = new Set(fleet.replicas.map(({ id }) => id));
  fleet.models = [modelOf("m", { replicas: 3, args: { speed: 2 } })];
  for (let i = 0; i < 40; i++) {
    fleet.turn();
    expect(fleet.ready().length).toBeGreaterThanOrEqual(3);
    expect(fleet.replicas.filter(({ state }) => state !== "draining" && state !== "stopping").length).toBeLessThanOrEqual(4);
  }
  expect(fleet.replicas.filter(({ id }) => old.has(id))).toEqual([]);
  expect(fleet.ready()).toHaveLength(3);
});

test("with no room for the replacement the old replica keeps serving, and that is said", () => {
  const fleet = new TestFleet([{ id: "a", gpus: 1 }], [modelOf("m", { gpus: 1 })]);
  fleet.turns(3);
  const before = attempts(fleet);
  fleet.models = [modelOf("m", { gpus: 1, context: 4_096 })];
  fleet.turns(30);
  expect(attempts(fleet)).toEqual(before);
  const waiting = fleet.replicas.find(({ state }) => state === "pending");
  expect(waiting?.reason).toBe("none of 1 nodes has room; the one it is to replace keeps serving");
  expect(fleet.decision?.refusals.get(waiting?.id ?? "")?.[0]?.filter).toBe("gpus");
});

test("an outdated replica that serves nobody makes way at once", () => {
  const fleet = new TestFleet([{ id: "a", gpus: 1 }], [modelOf("m", { gpus: 1, args: { crash: true } })]);
  fleet.decide();
  fleet.node("a").exit(fleet.only().placements[0]?.launch.attempt ?? "", "start", fleet.now_ms);
  fleet.node("a").report(fleet.now_ms);
  fleet.decide();
  fleet.models = [modelOf("m", { gpus: 1 })];
  fleet.turns(5);
  expect(fleet.ready()).toHaveLength(1);
  expect(fleet.replicas).toHaveLength(1);
});

test("how much memory is set aside can change without a restart", () => {
  const fleet = new TestFleet(NODES, [modelOf("m", { memory: 1_000 })]);
  fleet.turns(3);
  const before = attempts(fleet);
  fleet.models = [modelOf("m", { memory: 2_000 })];
  fleet.turns(3);
  expect(attempts(fleet)).toEqual(before);
});

test("a replica that waits for memory asks for what the catalog says now", () => {
  const fleet = new TestFleet([{ id: "a", memory: 4 * GiB }], [modelOf("m", { memory: 5 * GiB })]);
  fleet.turns(3);
  expect(fleet.only().state).toBe("pending");
  fleet.models = [modelOf("m", { memory: 3 * GiB })];
  fleet.turns(3);
  expect(fleet.only().state).toBe("ready");
});

test("a model taken out of the catalog ends", () => {
  const fleet = new TestFleet(NODES, [modelOf("m", { replicas: 2 }), modelOf("k")]);
  fleet.turns(3);
  fleet.models = [modelOf("k")];
  fleet.turns(10);
  expect(fleet.replicas.map(({ model }) => model)).toEqual(["k"]);
  expect(fleet.nodes.flatMap((node) => [...node.ranks.values()])).toHaveLength(1);
});

test("a server that lost its store takes over what runs, and stops nothing that is wanted", () => {
  const fleet = new TestFleet(NODES, [modelOf("m", { replicas: 2 }), modelOf("k", { engine: "llamacpp", source: "/w/k.gguf" })]);
  fleet.turns(4);
  const before = new Map(fleet.replicas.map(({ id, placements }) => [id, placements]));
  fleet.loseStore();
  fleet.turns(3);
  expect(new Map(fleet.replicas.map(({ id, placements }) => [id, placements]))).toEqual(before);
  expect(fleet.kinds().filter((kind) => kind === "replica-adopted")).toHaveLength(3);
});

test("a server that lost its store stops what the catalog does not name, and rolls what it names otherwise", () => {
  const fleet = new TestFleet(NODES, [modelOf("m"), modelOf("gone")]);
  fleet.turns(3);
  const before = fleet.ready("m")[0];
  fleet.loseStore();
  fleet.models = [modelOf("m", { context: 8_192 })];
  fleet.decide();
  expect(fleet.replicas.find(({ id }) => id === before?.id)?.state).toBe("ready");
  fleet.turns(12);
  expect(fleet.replicas.map(({ model, state, spec }) => [model, state, spec.context])).toEqual([["m", "ready", 8_192]]);
});

test("with a new store one node's engines survive although another node joined first and was given replicas", () => {
  const fleet = new TestFleet(NODES, [modelOf("m")]);
  fleet.node("a").online = false;
  fleet.node("a").heard_ms = -1_000_000;
  fleet.turns(3);
  const [running] = fleet.ready();
  expect(running?.placements[0]?.node).toBe("b");
  fleet.loseStore();
  fleet.ids = { ...fleet.ids, suffix: () => "fresh" };
  const [a, b] = [fleet.node("a"), fleet.node("b")];
  a.online = true;
  b.online = false;
  b.heard = null;
  b.heard_ms = 0;
  a.report(fleet.now_ms);
  fleet.decide();
  expect(fleet.only()).toMatchObject({ id: "m-fresh", state: "starting" });
  b.online = true;
  fleet.turn();
  fleet.turns(10);
  expect(fleet.only().id).toBe(running?.id ?? "");
});

test("a lost node's replica stays its own, counts as not serving, and the reason says so", () => {
  const fleet = new TestFleet(NODES, [modelOf("m")]);
  fleet.turns(3);
  const { id, placements } = fleet.only();
  fleet.node(placements[0]?.node ?? "").online = false;
  fleet.turns(100);
  expect(fleet.only().id).toBe(id);
  const nodes = new Map(fleet.world().nodes.map((node) => [node.id, node]));
  expect(reasonOfModel(modelOf("m"), fleet.replicas, nodes)).toContain(`node ${placements[0]?.node} is lost`);
});

test("only the part that changed gets a new version", () => {
  const fleet = new TestFleet(NODES, [modelOf("m")]);
  fleet.turns(3);
  const before = new Map(fleet.parts);
  fleet.models = [modelOf("m"), modelOf("k")];
  fleet.decide();
  const holder = fleet.replicas.find(({ model }) => model === "k")?.placements[0]?.node ?? "";
  const other = holder === "a" ? "b" : "a";
  expect(fleet.parts.get(other)).toBe(before.get(other) as NodePlan);
  expect(fleet.parts.get(holder)?.version).toEqual({ epoch: 1, generation: (before.get(holder)?.version.generation ?? 0) + 1 });
});

test("a store put back from a copy yields to what runs", () => {
  const fleet = new TestFleet([{ id: "a", gpus: 1 }], [modelOf("m", { gpus: 1 })]);
  fleet.node("a").online = false;
  fleet.decide();
  const copy = fleet.replicas;
  // What the copy placed was never started; something else took its place.
  fleet.loseStore();
  fleet.node("a").online = true;
  fleet.turns(3);
  const [running] = fleet.ready();
  fleet.loseStore();
  fleet.replicas = copy;
  fleet.turns(6);
  expect(fleet.replicas.map(({ id, state }) => [id, state])).toEqual([[running?.id ?? "", "ready"]]);
  expect(fleet.only().placements).toEqual(running?.placements ?? []);
});
