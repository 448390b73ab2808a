import { expect, test } from "bun:test";
import { backoff_ms } from "../../../src/core/lifecycle.ts";
import { DEFAULT_POLICY } from "../../../src/core/world.ts";
import type { RankExit } from "../../../src/protocol/agent-api.ts";
import { modelOf, TestFleet } from "./fleet-for-tests.ts";

const MINUTE_MS = 60_000;
const one = (more = {}) => new TestFleet([{ id: "a" }], [modelOf("m", more)]);
const attemptOf = (fleet: TestFleet) => fleet.only().placements[0]?.launch.attempt ?? "";

test.each([
  [1, 2_000],
  [2, 4_000],
  [3, 8_000],
  [8, 256_000],
  [9, 300_000],
  [1_000, 300_000],
])("failure %d waits %d ms", (failures, wait_ms) => {
  expect(backoff_ms(failures, DEFAULT_POLICY)).toBe(wait_ms);
});

test("a replica with weights is fetched, started and ready, each told once", () => {
  const fleet = one({ engine: "llamacpp", source: "http://models/m.gguf" });
  const states: string[] = [];
  fleet.decide();
  for (let i = 0; i < 5; i++) {
    states.push(fleet.only().state);
    fleet.turn();
  }
  expect(states).toEqual(["fetching", "starting", "ready", "ready", "ready"]);
  expect(fleet.kinds()).toEqual(["replica-created", "replica-placed", "replica-ready"]);
});

test.each<[RankExit["kind"], string, string, number]>([
  ["fetch", "failed", "replica-failed", 1],
  ["start", "failed", "replica-failed", 1],
  ["died", "failed", "engine-died", 1],
  ["stopped", "failed", "replica-failed", 1],
  ["lease", "starting", "port-taken", 0],
])("an exit of kind %s while starting makes it %s", (kind, state, event, failures) => {
  const fleet = one();
  fleet.decide();
  const before = fleet.only().placements[0]?.launch;
  fleet.node("a").exit(attemptOf(fleet), kind, fleet.now_ms, ["no such file"]);
  fleet.node("a").report(fleet.now_ms);
  fleet.decide();
  expect(fleet.only()).toMatchObject({ state, failures });
  expect(fleet.kinds()).toContain(event);
  if (kind !== "lease") return expect(fleet.only().last_lines).toEqual(["no such file"]);
  const after = fleet.only().placements[0]?.launch;
  expect(after?.attempt).not.toBe(before?.attempt ?? "");
  expect(after?.door.port).toBe((before?.door.port ?? 0) + 1);
});

test("failures back off, keep the first failure's lines, and are forgotten after long readiness", () => {
  const fleet = one();
  const waits: number[] = [];
  fleet.decide();
  for (let i = 0; i < 4; i++) {
    fleet.node("a").exit(attemptOf(fleet), "start", fleet.now_ms, [`failure ${i}`]);
    fleet.node("a").report(fleet.now_ms);
    fleet.decide();
    const { next_try_ms, state } = fleet.only();
    expect(state).toBe("failed");
    waits.push((next_try_ms ?? 0) - fleet.now_ms);
    fleet.now_ms = (next_try_ms ?? 0) - 1;
    fleet.node("a").report(fleet.now_ms);
    fleet.decide();
    expect(fleet.only().state).toBe("failed");
    fleet.now_ms += 1;
    fleet.decide();
    expect(fleet.only().state).toBe("starting");
  }
  expect(waits).toEqual([2_000, 4_000, 8_000, 16_000]);
  expect(fleet.only().last_lines).toEqual(["failure 0"]);
  fleet.turns(2);
  expect(fleet.only()).toMatchObject({ state: "ready", failures: 4, last_lines: ["failure 0"] });
  fleet.turns(11, MINUTE_MS);
  expect(fleet.only()).toMatchObject({ state: "ready", failures: 0, last_lines: [] });
});

test("an engine that dies after it was ready comes back by a new attempt", () => {
  const fleet = one();
  fleet.turns(3);
  const before = attemptOf(fleet);
  fleet.node("a").exit(before, "died", fleet.now_ms);
  fleet.turns(5);
  expect(fleet.only().state).toBe("ready");
  expect(attemptOf(fleet)).not.toBe(before);
  expect(fleet.kinds().filter((kind) => kind === "engine-died")).toHaveLength(1);
});

test("an attempt its node no longer knows failed, one it does not know yet is waited for", () => {
  const fleet = one();
  fleet.node("a").online = false;
  fleet.decide();
  fleet.node("a").report(fleet.now_ms);
  fleet.decide();
  expect(fleet.only().state).toBe("starting");
  fleet.node("a").online = true;
  fleet.turns(3);
  expect(fleet.only().state).toBe("ready");
  fleet.node("a").ranks.clear();
  fleet.turn();
  expect(fleet.only()).toMatchObject({ state: "failed", reason: "node a no longer knows it" });
});

test("a node that does not take a rank up in time loses it", () => {
  const fleet = one();
  const node = fleet.node("a");
  node.online = false;
  fleet.decide();
  for (let i = 0; i < 61; i++) {
    fleet.now_ms += 1_000;
    node.report(fleet.now_ms);
    fleet.decide();
  }
  expect(fleet.kinds()).toContain("replica-failed");
  expect(fleet.events.find(({ kind }) => kind === "replica-failed")?.text).toContain("did not take it up within 60 s");
});

test("a start without end is given up after its deadline and the node's own, and progress extends it", () => {
  const fleet = one();
  const node = fleet.node("a");
  fleet.decide();
  const stuck = (done: number | null) => {
    fleet.now_ms += MINUTE_MS;
    node.report(fleet.now_ms);
    if (node.heard?.[0] && done !== null) node.heard[0].progress = { done, total: null };
    fleet.decide();
  };
  for (let i = 0; i < 30; i++) stuck(i + 1);
  expect(fleet.only().state).toBe("starting");
  for (let i = 0; i < 11; i++) stuck(null);
  expect(fleet.kinds()).toContain("replica-failed");
  expect(fleet.events.find(({ kind }) => kind === "replica-failed")?.text).toContain("starting without progress");
});

test.each([
  ["no requests in flight", 0, 4_000],
  ["requests in flight", 3, 600_000],
  ["a gateway that does not say", null, 600_000],
])("a replica that is no longer wanted drains with %s", (_name, in_flight, at_least_ms) => {
  const fleet = one();
  fleet.turns(3);
  fleet.in_flight = in_flight === null ? null : new Map([[attemptOf(fleet), in_flight]]);
  fleet.models = [];
  fleet.decide();
  const began_ms = fleet.now_ms;
  expect(fleet.only().state).toBe("draining");
  expect(fleet.parts.get("a")?.ranks).toHaveLength(1);
  while (fleet.replicas[0]?.state === "draining") fleet.turn();
  expect(fleet.now_ms - began_ms).toBeWithin(at_least_ms - 1_001, at_least_ms + 1_001);
  fleet.turns(2);
  expect(fleet.replicas).toEqual([]);
  expect(fleet.kinds().slice(-3)).toEqual(["replica-draining", "replica-stopping", "replica-gone"]);
});

test("nothing is decided about a replica while its node is silent", () => {
  const fleet = one();
  fleet.turns(3);
  const before = fleet.only();
  fleet.node("a").online = false;
  fleet.turns(20, MINUTE_MS);
  expect(fleet.only()).toMatchObject({ state: "ready", placements: before.placements });
  fleet.node("a").online = true;
  fleet.turns(2);
  expect(fleet.only()).toMatchObject({ state: "ready", placements: before.placements });
});

test("a rank that is dropped before its node spoke of it holds its place until a later report lacks it", () => {
  const fleet = new TestFleet([{ id: "a", gpus: 1 }], [modelOf("m", { gpus: 1 })]);
  const node = fleet.node("a");
  fleet.decide();
  node.online = false;
  fleet.models = [modelOf("k", { gpus: 1 })];
  fleet.decide();
  fleet.decide();
  // The node runs it, but has not said so yet.
  expect(fleet.replicas.map(({ model, state }) => [model, state])).toEqual([
    ["m", "stopping"],
    ["k", "pending"],
  ]);
  node.online = true;
  fleet.turns(4);
  expect(fleet.replicas.map(({ model, state }) => [model, state])).toEqual([["k", "ready"]]);
});
