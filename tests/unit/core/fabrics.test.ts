// Which nodes share a fabric, from what their ports see: failover, cuts, wrong cables and wrong names.
import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { fabricFault, foldAnswer, islandsOf, physicalFabrics, UNSEEN } from "../../../src/core/fabrics.ts";
import type { Answer, NodePort, Seen } from "../../../src/core/fabrics.ts";

const [A1, A2, B1, B2, C1] = ["0xa1", "0xa2", "0xb1", "0xb2", "0xc1"] as const;

function port(node: string, device: string, fabric: string, managers: readonly string[], switches: readonly string[] = []): NodePort {
  const seen = {
    managers: [...managers],
    switches: [...switches],
    answered_ms: managers.length > 0 ? 1 : null,
    answering: managers.length > 0,
  };
  return { node, device, port: 1, guid: `${node}/${device}`, fabric, excluded: "", state: "ACTIVE", rate_gbps: 400, numa: 0, ...seen };
}
const both = (node: string, fabric: string, managers: readonly string[], switches: readonly string[] = []) => [
  port(node, "mlx5_2", fabric, managers, switches),
  port(node, "mlx5_3", fabric, managers, switches),
];
const shape = (ports: readonly NodePort[], before = {}) => {
  const { islands, warnings, torn } = islandsOf(ports, before);
  return {
    islands: Object.fromEntries(islands.map((island) => [island.name, island.nodes.join(" ")])),
    warnings: warnings.map((warning) => warning.code),
    torn: torn.map((each) => `${each.node} ${each.fabric}`),
  };
};

describe("what is known of a port", () => {
  const fold = (answers: readonly (Answer | null)[], from: Seen = UNSEEN) =>
    answers.reduce<Seen>((seen, answer, at) => foldAnswer(seen, answer ?? { managers: null, switches: null }, at + 1), from);
  const says = (...managers: string[]): Answer => ({ managers, switches: null });

  test("a failed question keeps the last answer", () => {
    expect(fold([says(A1, A2), null, null, null, null, null])).toMatchObject({ managers: [A1, A2], answered_ms: 1, answering: false });
  });
  test("failover {A,B}, silence, {B}, {A,B}", () => {
    expect(fold([says(A1, A2), null, null, says(A2)])).toMatchObject({ managers: [A2], answered_ms: 4 });
    expect(fold([says(A1, A2), null, says(A2), says(A1, A2)])).toMatchObject({ managers: [A1, A2], answering: true });
  });
  test("another fabric is believed only when it is said again and again", () => {
    expect(fold([says(A1), says(B1), says(B1)])).toMatchObject({ managers: [A1], disjoint: 2 });
    expect(fold([says(A1), says(B1), says(B1), says(B1)])).toMatchObject({ managers: [B1], disjoint: 0 });
    expect(fold([says(A1), says(B1), says(B1), says(A1), says(B1)])).toMatchObject({ managers: [A1], disjoint: 1 });
  });
  test("all managers replaced, same switches: the same fabric at once", () => {
    const known = fold([{ managers: [A1], switches: ["0x51", "0x52"] }]);
    expect(fold([{ managers: [C1], switches: ["0x52", "0x51"] }], known)).toMatchObject({ managers: [C1], disjoint: 0 });
  });
  test("switches known before a change of managers do not join the halves of a cut fabric", () => {
    const known = fold([{ managers: [A1, A2], switches: ["0x51", "0x52"] }]);
    expect(fold([says(A1)], known).switches).toEqual([]);
    expect(fold([says(A2, A1)], known).switches).toEqual(["0x51", "0x52"]);
  });
});

describe("islands", () => {
  const healthy = ["n1", "n2", "n3"].flatMap((node) => [...both(node, "ib-a", [A1, A2]), ...both(node, "ib-b", [B1, B2])]);

  test("two fabrics told apart", () => {
    expect(shape(healthy)).toEqual({ islands: { "ib-a": "n1 n2 n3", "ib-b": "n1 n2 n3" }, warnings: [], torn: [] });
  });
  test("one name for both: two islands and a warning", () => {
    const ports = [...both("n1", "ib", [A1, A2]), ...both("n2", "ib", [A1]), ...both("n3", "ib", [B1]), ...both("n4", "ib", [B1, B2])];
    expect(shape(ports)).toEqual({ islands: { "ib#1": "n1 n2", "ib#2": "n3 n4" }, warnings: ["fabric-split"], torn: [] });
  });
  test("one fabric under two names: joined and warned", () => {
    const ports = [...both("n1", "ib-a", [A1]), ...both("n2", "ib-x", [A1]), ...both("n3", "ib-a", [A1])];
    expect(shape(ports)).toEqual({ islands: { "ib-a": "n1 n2 n3" }, warnings: ["fabric-two-names"], torn: [] });
  });
  test("a wrong cable: that node gets no gang there, the others go on", () => {
    const wrong = [...healthy, port("n4", "mlx5_2", "ib-b", [B1]), port("n4", "mlx5_3", "ib-b", [A1]), ...both("n4", "ib-a", [A1])];
    expect(shape(wrong)).toEqual({
      islands: { "ib-a": "n1 n2 n3 n4", "ib-b": "n1 n2 n3" },
      warnings: ["fabric-wrong-cable"],
      torn: ["n4 ib-b"],
    });
  });
  test("during failover, nodes that know different things stay together", () => {
    const ports = [...both("n1", "ib", [A1, A2]), ...both("n2", "ib", [A2]), ...both("n3", "ib", [A1, A2])];
    expect(shape(ports).islands).toEqual({ ib: "n1 n2 n3" });
  });
  test("managers replaced one node after the other: switches keep them together", () => {
    expect(shape([...both("n1", "ib", [A1], ["0x51"]), ...both("n2", "ib", [C1], ["0x51"])]).islands).toEqual({ ib: "n1 n2" });
  });
  test("never a manager: the name is believed, and said to be unproved", () => {
    const ports = [...both("n1", "ib", []), ...both("n2", "ib", [])];
    expect(shape(ports)).toEqual({ islands: { ib: "n1 n2" }, warnings: ["fabric-unproved"], torn: [] });
    expect(islandsOf(ports).islands[0]?.proved).toBe(false);
    expect(shape([...ports, ...both("n3", "ib", [A1])]).islands).toEqual({ ib: "n1 n2 n3" });
  });
  test("unproved nodes of a name that stands for two fabrics stand alone", () => {
    const ports = [...both("n1", "ib", [A1]), ...both("n2", "ib", [B1]), ...both("n3", "ib", [])];
    expect(shape(ports).islands).toEqual({ "ib#1": "n1", "ib#2": "n2", "ib@n3": "n3" });
  });
  test("one of two ports never answered: the other one counts", () => {
    expect(shape([port("n1", "mlx5_2", "ib", [A1]), port("n1", "mlx5_3", "ib", [])])).toEqual({
      islands: { ib: "n1" },
      warnings: [],
      torn: [],
    });
  });
  test("numbers stay when a node leaves, comes, or the first half is gone for a while", () => {
    const first = islandsOf([...both("n1", "ib", [A1]), ...both("n2", "ib", [B1]), ...both("n3", "ib", [B2, B1])]);
    const more = islandsOf(
      [...both("n0", "ib", [B2]), ...both("n1", "ib", [A1]), ...both("n2", "ib", [B1]), ...both("n3", "ib", [B2, B1])],
      first.numbers,
    );
    expect(Object.fromEntries(more.islands.map((island) => [island.name, island.nodes.join(" ")]))).toEqual({
      "ib#1": "n1",
      "ib#2": "n0 n2 n3",
    });
  });
  test("cut and healed", () => {
    const whole = ["n1", "n2"].flatMap((node) => both(node, "ib", [A1, A2]));
    const cut = [...both("n1", "ib", [A1]), ...both("n2", "ib", [A2])];
    expect(shape(whole).islands).toEqual({ ib: "n1 n2" });
    expect(shape(cut)).toEqual({ islands: { "ib#1": "n1", "ib#2": "n2" }, warnings: ["fabric-split"], torn: [] });
    expect(shape(whole, islandsOf(cut).numbers)).toEqual({ islands: { ib: "n1 n2" }, warnings: [], torn: [] });
  });
  test("ports on no fabric make no island", () => {
    expect(shape(both("n1", "", [A1]))).toEqual({ islands: {}, warnings: [], torn: [] });
  });
});

const somePort = fc
  .record({
    node: fc.constantFrom("n1", "n2", "n3", "n4"),
    device: fc.constantFrom("d0", "d1", "d2"),
    fabric: fc.constantFrom("x", "y", ""),
    managers: fc.uniqueArray(fc.constantFrom(A1, A2, B1, B2, C1), { maxLength: 3 }),
  })
  .map((each) => port(each.node, each.device, each.fabric, each.managers));
const fleet = fc.uniqueArray(somePort, { maxLength: 12, selector: (each) => `${each.node} ${each.device}` });

test("the order of ports changes nothing, and every island has its own name", () => {
  fc.assert(
    fc.property(fleet, (ports) => {
      const one = islandsOf(ports);
      const other = islandsOf(ports.toReversed());
      const plain = (fabrics: typeof one) => fabrics.islands.map((island) => `${island.name}: ${island.nodes.join(" ")}`).toSorted();
      expect(plain(other)).toEqual(plain(one));
      expect(new Set(one.islands.map((island) => island.name)).size).toBe(one.islands.length);
    }),
  );
});

test("ports that share a manager are on one physical fabric, and each proved port is on exactly one", () => {
  fc.assert(
    fc.property(fleet, (ports) => {
      const groups = physicalFabrics(ports);
      expect(groups.flat().length).toBe(ports.filter((each) => each.managers.length > 0).length);
      for (const [at, group] of groups.entries())
        for (const other of groups.slice(at + 1)) {
          const mine = new Set(group.flatMap((each) => each.managers));
          expect(other.flatMap((each) => each.managers).filter((guid) => mine.has(guid))).toEqual([]);
        }
    }),
  );
});

test("the same fleet again keeps every name", () => {
  fc.assert(
    fc.property(fleet, (ports) => {
      const first = islandsOf(ports);
      expect(islandsOf(ports, first.numbers).islands).toEqual(first.islands);
    }),
  );
});

test("a failed fabric check keeps a node out of gangs, a silent manager does not", () => {
  const check = (id: string, verdict: "fail" | "warn") => ({ id, title: id, verdict, found: "x", source: "", remedy: "" });
  expect(fabricFault({})).toBe(null);
  expect(fabricFault({ doctor: { at_ms: 0, checks: [check("ib.sm", "fail"), check("ib.fabric.alias", "warn")] } })).toBe(null);
  expect(fabricFault({ doctor: { at_ms: 0, checks: [check("ib.fabric.same", "fail")] } })).toBe("ib.fabric.same: x");
});
