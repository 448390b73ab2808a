// Emptying nodes and replacing replicas without an outage.
import { describe, expect, test } from "bun:test";
import { modelOf, TestFleet, type NodeShape } from "./fleet-for-tests.ts";

const nodes = (ids: string): NodeShape[] => ids.split("").map((id) => ({ id, address: `10.0.0.${id.charCodeAt(0)}`, gpus: 1 }));
const STAY = { stop_first: false, deadline_ms: null };
const on = (fleet: TestFleet, id: string) =>
  fleet.replicas.filter(({ placements, state }) => state !== "gone" && placements.some(({ node }) => node === id) && state !== "pending");

/** Turns until the node is empty; the fewest ready replicas there were on the way. */
function drain(fleet: TestFleet, id: string, turns = 60): number {
  let least = fleet.ready().length;
  for (let i = 0; i < turns && on(fleet, id).length > 0; i++) {
    fleet.turn();
    least = Math.min(least, fleet.ready().length);
  }
  return least;
}

describe("a drain", () => {
  test("starts each replacement before it stops the original, one replica at a time, and empties the node", () => {
    const fleet = new TestFleet(nodes("ab"), [modelOf("m", { replicas: 3 })]);
    fleet.turns(3);
    fleet.node("a").drain = STAY;
    expect(drain(fleet, "a")).toBe(3);
    expect(on(fleet, "a")).toEqual([]);
    expect(fleet.ready()).toHaveLength(3);
    // One more than wanted at most.
    const created = fleet.events.filter(({ kind }) => kind === "replica-created").length;
    expect(created).toBeLessThanOrEqual(3 + 3);
  });

  test("with no room says so and waits; with room it goes on", () => {
    const fleet = new TestFleet(nodes("ab"), [modelOf("m", { replicas: 2, gpus: 1 })]);
    fleet.turns(3);
    fleet.node("a").drain = STAY;
    expect(drain(fleet, "a", 20)).toBe(2);
    expect(on(fleet, "a")).toHaveLength(1);
    const waiting = fleet.replicas.find(({ state }) => state === "pending");
    expect(waiting?.reason).toContain("the one it is to replace keeps serving");
    expect([...(fleet.decision?.refusals.values() ?? [])].flat().map(({ node, filter }) => `${node} ${filter}`)).toEqual([
      "a cordon",
      "b gpus",
    ]);
    fleet.models = [modelOf("m", { replicas: 1, gpus: 1 })];
    drain(fleet, "a");
    expect(on(fleet, "a")).toEqual([]);
    expect(fleet.ready()).toHaveLength(1);
  });

  test("with stop-first stops at once, and its deadline does so later", () => {
    for (const wish of [
      { stop_first: true, deadline_ms: null },
      { stop_first: false, deadline_ms: 1_020_000 },
    ]) {
      const fleet = new TestFleet(nodes("ab"), [modelOf("m", { replicas: 2, gpus: 1 })]);
      fleet.turns(3);
      fleet.node("a").drain = wish;
      drain(fleet, "a");
      expect(on(fleet, "a")).toEqual([]);
    }
  });

  test("that is taken back leaves things as they are", () => {
    const fleet = new TestFleet(nodes("ab"), [modelOf("m", { replicas: 2, gpus: 1 })]);
    fleet.turns(3);
    const before = fleet.ready().map(({ id }) => id);
    fleet.node("a").drain = STAY;
    fleet.turns(3);
    fleet.node("a").drain = null;
    fleet.turns(10);
    expect(fleet.ready().map(({ id }) => id)).toEqual(before);
    expect(fleet.replicas).toHaveLength(2);
  });

  test("takes a gang as a unit", () => {
    const shapes = nodes("abc").map((shape) => ({ ...shape, adapters: { ib: 1 } }));
    const fleet = new TestFleet(shapes, [modelOf("m", { nodes: 2 })]);
    fleet.turns(3);
    const second = fleet.only().placements[1]?.node ?? "";
    fleet.node(second).drain = STAY;
    expect(drain(fleet, second)).toBe(1);
    expect(on(fleet, second)).toEqual([]);
    expect(fleet.ready()[0]?.placements.map(({ node }) => node)).not.toContain(second);
  });
});

describe("one replica", () => {
  test.each(["restart", "move"] as const)("is replaced on demand (%s) without an outage", (replace) => {
    const fleet = new TestFleet(nodes("ab"), [modelOf("m")]);
    fleet.turns(3);
    const before = fleet.only();
    fleet.replicas = [{ ...before, replace }];
    let least = 1;
    for (let i = 0; i < 20; i++) {
      fleet.turn();
      least = Math.min(least, fleet.ready().length);
    }
    expect(least).toBe(1);
    expect(fleet.only().id).not.toBe(before.id);
    if (replace === "move") expect(fleet.only().placements[0]?.node).not.toBe(before.placements[0]?.node ?? "");
  });
});
