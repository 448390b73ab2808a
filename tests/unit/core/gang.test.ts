// Replicas of several ranks: one fabric, distinct nodes, started and ended together.
import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { GANG_PORTS_COUNT } from "../../../src/protocol/limits.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { inventoryOf, modelOf, TestFleet, type NodeShape } from "./fleet-for-tests.ts";

const on = (fabric: string, ids: string, more: Partial<NodeShape> = {}): NodeShape[] =>
  ids.split("").map((id, index) => ({
    id,
    address: `10.0.${fabric.length}.${id.charCodeAt(0) + index}`,
    gpus: 8,
    adapters: { [fabric]: 2 },
    ...more,
  }));
const gang = (nodes: number, replicas = 1) => modelOf("m", { nodes, replicas, gpus: 8 });
const launches = (fleet: TestFleet): RankLaunch[] => fleet.replicas.flatMap(({ placements }) => placements.map(({ launch }) => launch));
const refusals = (fleet: TestFleet) => [...(fleet.decision?.refusals.values() ?? [])].flat();

describe("a gang", () => {
  test("has its ranks on distinct nodes of one fabric, told of each other", () => {
    const fleet = new TestFleet([...on("ib-a", "ab"), ...on("ib-bb", "cde")], [gang(3)]);
    fleet.turns(3);
    const all = launches(fleet);
    expect(fleet.only().state).toBe("ready");
    expect(all.map(({ rank, ranks }) => [rank, ranks])).toEqual([
      [0, 3],
      [1, 3],
      [2, 3],
    ]);
    expect(new Set(fleet.only().placements.map(({ node }) => node))).toEqual(new Set(["c", "d", "e"]));
    expect(new Set(all.map(({ gang }) => JSON.stringify(gang?.master))).size).toBe(1);
    expect(all[0]?.gang?.master).toEqual({ address: all[0]?.door.address ?? "", port: all[0]?.gang?.ports.first ?? 0 });
    for (const { gang } of all) expect(gang).toMatchObject({ island: "ib-bb", adapters: ["mlx5_ib-bb0:1", "mlx5_ib-bb1:1"] });
    expect(all[0]?.gang?.ports.count).toBe(GANG_PORTS_COUNT);
  });

  test("waits when no fabric has enough nodes with room, and says of each node why", () => {
    const fleet = new TestFleet([...on("ib-a", "ab"), ...on("ib-bb", "c"), { id: "z", gpus: 8 }], [gang(3)]);
    fleet.turns(2);
    expect(fleet.only()).toMatchObject({ state: "pending", placements: [] });
    expect(fleet.only().reason).toBe("no fabric has 3 nodes with room: ib-a has 2 of 2, ib-bb has 1 of 1");
    expect(refusals(fleet).map(({ node, filter }) => `${node} ${filter}`)).toEqual(["a island", "b island", "c island", "z fabric"]);
  });

  test("is not placed where no node is on a fabric", () => {
    const fleet = new TestFleet([{ id: "a" }, { id: "b" }], [modelOf("m", { nodes: 2 })]);
    fleet.turns(2);
    expect(fleet.only().reason).toContain("no node is on one");
  });

  test("one rank dead: all are stopped, and all are started again on other ports", () => {
    const fleet = new TestFleet(on("ib-a", "ab"), [gang(2)]);
    fleet.turns(3);
    const before = launches(fleet);
    fleet.node("b").exit(fleet.only().placements.find(({ node }) => node === "b")?.launch.attempt ?? "", "died", fleet.now_ms);
    fleet.turn();
    expect(fleet.only().state).toBe("failed");
    fleet.turns(8);
    expect(fleet.only().state).toBe("ready");
    const after = launches(fleet);
    expect(after.map(({ attempt }) => attempt).some((attempt) => before.some((old) => old.attempt === attempt))).toBe(false);
    expect(after[0]?.gang?.master.port).not.toBe(before[0]?.gang?.master.port ?? 0);
  });

  test("a rank that ends before all have joined is a failed start, on a node that is avoided then", () => {
    const fleet = new TestFleet(on("ib-a", "abc"), [gang(2)]);
    fleet.decide();
    const placement = fleet.only().placements[1];
    fleet.node(placement?.node ?? "").exit(placement?.launch.attempt ?? "", "died", fleet.now_ms);
    fleet.node(placement?.node ?? "").report(fleet.now_ms);
    fleet.decide();
    expect(fleet.only()).toMatchObject({ state: "failed", avoid: placement?.node });
    expect(fleet.kinds()).toContain("replica-failed");
    fleet.turns(8);
    expect(fleet.only().state).toBe("ready");
    expect(fleet.only().placements.map(({ node }) => node)).not.toContain(placement?.node ?? "");
  });

  test("every rank has as many adapters as the one with the fewest", () => {
    const fleet = new TestFleet([...on("ib-a", "a"), ...on("ib-a", "b", { adapters: { "ib-a": 1 } })], [gang(2)]);
    fleet.turns(2);
    expect(launches(fleet).map(({ gang }) => gang?.adapters.length)).toEqual([1, 1]);
  });

  test("has no rank on a node whose examination found its fabric wrong", () => {
    const fleet = new TestFleet(on("ib-a", "ab"), [gang(2)]);
    const check = { id: "ib.fabric", title: "fabric", verdict: "fail" as const, found: "no subnet manager", source: "", remedy: "" };
    Object.assign(fleet.node("b").inventory, { doctor: { at_ms: 1, checks: [check] } });
    fleet.turns(2);
    expect(fleet.only().state).toBe("pending");
    expect(refusals(fleet).find(({ node }) => node === "b")?.available).toContain("no subnet manager");
  });

  test("keeps off NVLink between machines when one of its nodes found IMEX broken", () => {
    const fleet = new TestFleet(on("ib-a", "ab"), [gang(2)]);
    const check = { id: "imex.unit", title: "IMEX", verdict: "fail" as const, found: "DOWN", source: "", remedy: "" };
    Object.assign(fleet.node("b").inventory, { doctor: { at_ms: 1, checks: [check] } });
    fleet.turns(2);
    expect(launches(fleet).map(({ gang }) => gang?.imex_failed)).toEqual([true, true]);
  });

  test("has no rank on loopback unless all are", () => {
    const mixed = [...on("ib-a", "a", { address: "127.0.0.2" }), ...on("ib-a", "b")];
    const fleet = new TestFleet(mixed, [gang(2)]);
    fleet.turns(2);
    expect(fleet.only().state).toBe("pending");
    const local = new TestFleet([...on("ib-a", "a", { address: "127.0.0.2" }), ...on("ib-a", "b", { address: "127.0.0.3" })], [gang(2)]);
    local.turns(3);
    expect(local.only().state).toBe("ready");
  });

  test("is taken over whole by a server that lost its store", () => {
    const fleet = new TestFleet(on("ib-a", "ab"), [gang(2)]);
    fleet.turns(3);
    const before = launches(fleet).map(({ attempt }) => attempt);
    fleet.loseStore();
    fleet.turns(2);
    expect(fleet.only().state).toBe("ready");
    expect(launches(fleet).map(({ attempt }) => attempt)).toEqual(before);
  });
});

test("whatever the fleet: ranks of a gang are on distinct nodes of one fabric, with adapters of that fabric only, all or none", () => {
  const shape = fc.record({ fabrics: fc.subarray(["ib-a", "ib-b", "ib-c"]), gpus: fc.nat(8), count: fc.integer({ min: 1, max: 3 }) });
  const wanted = fc.array(fc.record({ nodes: fc.integer({ min: 1, max: 4 }), replicas: fc.nat(3), gpus: fc.nat(4) }), { maxLength: 3 });
  fc.assert(
    fc.property(fc.array(shape, { maxLength: 8 }), wanted, fc.array(fc.nat(30), { maxLength: 10 }), (shapes, models, deaths) => {
      const nodes = shapes.map(({ fabrics, gpus, count }, index) => ({
        id: `n${index}`,
        address: `10.1.0.${index + 1}`,
        gpus,
        adapters: Object.fromEntries(fabrics.map((fabric) => [fabric, count])),
      }));
      const fleet = new TestFleet(
        nodes,
        models.map((more, index) => modelOf(`m${index}`, more)),
      );
      for (const death of deaths) {
        fleet.turn();
        const running = fleet.nodes.flatMap((node) => [...node.ranks.keys()].map((attempt) => ({ node, attempt })));
        const hit = running[death % Math.max(1, running.length)];
        hit?.node.exit(hit.attempt, death % 3 === 0 ? "lease" : "died", fleet.now_ms);
        for (const { spec, placements, state } of fleet.replicas) {
          if (spec.nodes === 1 || placements.length === 0 || state === "gone") continue;
          expect(placements).toHaveLength(spec.nodes);
          expect(new Set(placements.map(({ node }) => node)).size).toBe(spec.nodes);
          const islands = new Set(placements.map(({ launch }) => launch.gang?.island));
          expect(islands.size).toBe(1);
          const [island = ""] = islands;
          expect(new Set(placements.map(({ launch }) => launch.gang?.adapters.length)).size).toBe(1);
          for (const { node, launch } of placements) {
            const own = (inventoryOf(fleet.node(node).shape).ports ?? [])
              .filter(({ fabric }) => fabric === island)
              .map(({ device }) => `${device}:1`);
            expect(own.length).toBeGreaterThan(0);
            for (const adapter of launch.gang?.adapters ?? []) expect(own).toContain(adapter);
          }
        }
      }
    }),
  );
});
