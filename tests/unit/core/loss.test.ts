// Nodes that vanish and return.
import { describe, expect, test } from "bun:test";
import { freezeOf, stateAfterSilence } from "../../../src/core/loss.ts";
import { modelOf, TestFleet, type NodeShape } from "./fleet-for-tests.ts";

const nodes = (ids: string): NodeShape[] => ids.split("").map((id) => ({ id, address: `10.0.0.${id.charCodeAt(0)}` }));

function silence(fleet: TestFleet, ...ids: string[]): void {
  for (const id of ids) fleet.node(id).online = false;
}

/** The gateway cannot reach any door of these nodes. */
function unreachable(fleet: TestFleet, ...ids: string[]): void {
  const attempts = ids.flatMap((id) => [...fleet.node(id).ranks.keys()]);
  fleet.unreachable = new Set(attempts);
}

const where = (fleet: TestFleet) =>
  fleet
    .ready()
    .map(({ placements }) => placements[0]?.node ?? "")
    .sort((a, b) => a.localeCompare(b));

test.each([
  [19_999, "ready", ""],
  [20_000, "suspect", "no report for 20 s"],
  [89_000, "suspect", "no report for 89 s"],
  [90_000, "lost", "no report for 90 s"],
] as const)("a node silent for %d ms is %s", (silent_ms, state, state_reason) => {
  expect(stateAfterSilence(silent_ms)).toEqual({ state, state_reason });
});

describe("a lost node", () => {
  test("has its replicas replaced after the grace time, and not before", () => {
    const fleet = new TestFleet(nodes("abcd"), [modelOf("m", { replicas: 2 })]);
    fleet.turns(3);
    const [lost = ""] = where(fleet);
    silence(fleet, lost);
    unreachable(fleet, lost);
    fleet.turns(8, 10_000);
    expect(fleet.replicas).toHaveLength(2);
    fleet.turns(6, 10_000);
    expect(where(fleet)).toHaveLength(2);
    expect(where(fleet)).not.toContain(lost);
  });

  test("whose doors still answer the gateway has nothing replaced", () => {
    const fleet = new TestFleet(nodes("abcd"), [modelOf("m", { replicas: 2 })]);
    fleet.turns(3);
    const before = fleet.replicas.map(({ id }) => id);
    silence(fleet, "a", "b");
    fleet.turns(30, 10_000);
    expect(fleet.replicas.map(({ id }) => id)).toEqual(before);
  });

  test("loses nothing while the gateway does not say whether its doors answer", () => {
    const fleet = new TestFleet(nodes("abcd"), [modelOf("m", { replicas: 2 })]);
    fleet.turns(3);
    silence(fleet, "a", "b");
    fleet.unreachable = null;
    fleet.turns(30, 10_000);
    expect(fleet.replicas).toHaveLength(2);
  });

  test("that is back before its replacement is ready keeps its engine, and the replacement goes", () => {
    const fleet = new TestFleet(nodes("abcd"), [modelOf("m", { source: "http://x/m" })]);
    fleet.turns(4);
    const before = fleet.only();
    const lost = before.placements[0]?.node ?? "";
    silence(fleet, lost);
    unreachable(fleet, lost);
    fleet.now_ms += 95_000;
    for (const node of fleet.nodes) if (node.online) node.report(fleet.now_ms);
    fleet.decide();
    expect(fleet.replicas).toHaveLength(2);
    fleet.node(lost).online = true;
    fleet.unreachable = new Set();
    fleet.turns(8);
    expect(fleet.only()).toMatchObject({ id: before.id, state: "ready" });
    expect(fleet.node(lost).ranks.get(before.placements[0]?.launch.attempt ?? "")?.phase).toBe("ready");
  });

  test("that is back after it was replaced has its old engine stopped, without an outage", () => {
    const fleet = new TestFleet(nodes("abcd"), [modelOf("m")]);
    fleet.turns(3);
    const before = fleet.only();
    const lost = before.placements[0]?.node ?? "";
    silence(fleet, lost);
    unreachable(fleet, lost);
    fleet.turns(15, 10_000);
    const after = fleet.ready();
    expect(after).toHaveLength(1);
    expect(after[0]?.id).not.toBe(before.id);
    fleet.node(lost).online = true;
    fleet.unreachable = new Set();
    let least = 1;
    for (let i = 0; i < 20; i++) {
      fleet.turn();
      least = Math.min(least, fleet.ready().length);
    }
    expect(least).toBe(1);
    expect(fleet.replicas).toHaveLength(1);
    expect(fleet.nodes.flatMap((node) => [...node.ranks.values()]).filter(({ phase }) => phase !== "exited")).toHaveLength(1);
  });

  test("with a start on its way has it started elsewhere", () => {
    const fleet = new TestFleet(nodes("ab"), [modelOf("m")]);
    fleet.decide();
    const lost = fleet.only().placements[0]?.node ?? "";
    silence(fleet, lost);
    fleet.turns(15, 10_000);
    expect(where(fleet)).toEqual([lost === "a" ? "b" : "a"]);
    expect(fleet.events.find(({ kind }) => kind === "replica-stopping")?.text).toBe("its node is lost");
  });
});

describe("many nodes at once", () => {
  test("freeze the planner, until an operator says that they are gone", () => {
    const fleet = new TestFleet(nodes("abcdefgh"), [modelOf("m", { replicas: 6 })]);
    fleet.turns(3);
    const before = fleet.replicas.map(({ id }) => id);
    silence(fleet, "a", "b", "c", "d");
    unreachable(fleet, "a", "b", "c", "d");
    fleet.turns(20, 10_000);
    expect(freezeOf(fleet.world())?.nodes).toEqual(["a", "b", "c", "d"]);
    expect(fleet.replicas.map(({ id }) => id)).toEqual(before);
    fleet.thawed_ms = fleet.now_ms;
    fleet.turns(6, 10_000);
    expect(where(fleet)).toHaveLength(6);
    expect(where(fleet).every((id) => "efgh".includes(id))).toBe(true);
  });

  test("but not two, and not three of many", () => {
    const few = new TestFleet(nodes("abc"), []);
    silence(few, "a", "b");
    few.turns(20, 10_000);
    expect(freezeOf(few.world())).toBeNull();
    const many = new TestFleet(nodes("abcdefghijkl"), []);
    silence(many, "a", "b", "c");
    many.turns(20, 10_000);
    expect(freezeOf(many.world())).toBeNull();
  });

  test("nor those that go one after another", () => {
    const fleet = new TestFleet(nodes("abcdef"), []);
    for (const id of ["a", "b", "c"]) {
      silence(fleet, id);
      fleet.turns(10, 10_000);
    }
    expect(freezeOf(fleet.world())).toBeNull();
  });
});
