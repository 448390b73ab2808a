// Fabrics told apart with real subnet managers and real tools on simulated networks: names, cables, failover, cuts.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { islandsOf } from "../../src/core/fabrics.ts";
import type { Fabrics, IslandNumbers, NodePort } from "../../src/core/fabrics.ts";
import { runDoctor } from "../../src/doctor/doctor.ts";
import { parseFabric } from "../../src/hardware/fabric-declaration.ts";
import { FabricWatch } from "../../src/hardware/fabric-watch.ts";
import { runTool } from "../../src/hardware/tool.ts";
import type { RunTool } from "../../src/hardware/tool.ts";
import { FabricLab, prepareLab } from "../fixtures/hardware/fabric-lab.ts";
import type { Adapters } from "../fixtures/hardware/fabric-lab.ts";

/** Long: a default failover takes about 50 s. */
const LONG_MS = 180_000;
const [A, B, C] = ["a0", "b0", "c0"] as const;
const missing = await prepareLab();
if (missing !== null) console.log(`skipping the fabrics: they need Debian's ibsim, opensm and infiniband-diags: ${missing}`);
const labTest = (name: string, run: () => Promise<void>) => test.skipIf(missing !== null)(`${name} (needs ibsim and opensm)`, run, LONG_MS);

let lab: FabricLab;
beforeAll(async () => {
  if (missing !== null) return;
  lab = await FabricLab.open([A, B, C]);
  await lab.startManager(A, 0);
  await lab.startManager(B, 0, true);
  const both = async (fabric: string) => (await managersOf(fabric)) >= 1;
  await until(async () => (await both(A)) && (await both(B)), LONG_MS / 3);
  await lab.startManager(A, 1);
  await lab.startManager(B, 1, true);
  await until(async () => (await managersOf(A)) === 2 && (await managersOf(B)) === 2, LONG_MS / 3);
}, LONG_MS);
afterAll(async () => {
  if (missing === null) await lab.close();
}, 30_000);

async function until(condition: () => Promise<boolean>, deadline_ms: number): Promise<void> {
  const end = performance.now() + deadline_ms;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`it did not come about in ${deadline_ms / 1_000} s`);
    await Bun.sleep(500);
  }
}

async function managersOf(fabric: string): Promise<number> {
  const node = await nodeOf("probe", { x0: [fabric, "node4-0"] }, "probe:x0");
  return (await node.look())[0]?.managers.length ?? 0;
}

interface LabNode {
  readonly name: string;
  readonly tools: string;
  readonly run: RunTool;
  look(): Promise<NodePort[]>;
}

async function nodeOf(name: string, adapters: Adapters, ...fabrics: string[]): Promise<LabNode> {
  const [tools, ib_root] = await Promise.all([lab.tools(adapters), lab.sysfs(adapters)]);
  const run: RunTool = ([tool, ...args], deadline_ms) => runTool([join(tools, tool), ...args], deadline_ms);
  const watch = await FabricWatch.open({ ib_root, fabrics: fabrics.map(parseFabric), run });
  return { name, tools, run, look: async () => (await watch.look()).map((port) => ({ ...port, node: name })) };
}

/** A node as wired by the book: mlx5_0 and mlx5_1 on the first fabric, mlx5_2 and mlx5_3 on the second. */
const wired = (number: number): Adapters => ({
  mlx5_0: [A, `node${number}-0`],
  mlx5_1: [A, `node${number}-1`],
  mlx5_2: [B, `node${number}-0`],
  mlx5_3: [B, `node${number}-1`],
});

async function look(nodes: readonly LabNode[], before: IslandNumbers = {}): Promise<Fabrics> {
  const ports: NodePort[] = [];
  for (const node of nodes) ports.push(...(await node.look()));
  return islandsOf(ports, before);
}
const islands = (fabrics: Fabrics) => Object.fromEntries(fabrics.islands.map((island) => [island.name, island.nodes.join(" ")]));
const codes = (fabrics: Fabrics) => fabrics.warnings.map((warning) => warning.code);

async function examine(adapters: Adapters, fabrics: readonly string[], notes: string[] = []) {
  const [tools, ib_root] = await Promise.all([lab.tools(adapters), lab.sysfs(adapters)]);
  const run: RunTool = ([tool, ...args], deadline_ms) =>
    runTool([["saquery", "sminfo"].includes(tool) ? join(tools, tool) : tool, ...args], deadline_ms);
  const tls = { ca: "/nowhere", cert: "/nowhere", key: "/nowhere" };
  const note = (text: string) => void notes.push(text);
  const declared = fabrics.map(parseFabric);
  const report = await runDoctor({ ib_root, fabrics: declared, server: null, state: "/", tls, node: "n", note, run, is_root: true });
  return new Map(report.checks.map((check) => [check.id, check]));
}

labTest("two fabrics are told apart", async () => {
  const nodes = await Promise.all(
    [1, 2, 3].map((number) => nodeOf(`n${number}`, wired(number), "ib-a:mlx5_0,mlx5_1", "ib-b:mlx5_2,mlx5_3")),
  );
  const fabrics = await look(nodes);
  expect(islands(fabrics)).toEqual({ "ib-a": "n1 n2 n3", "ib-b": "n1 n2 n3" });
  expect(codes(fabrics)).toEqual([]);
  const checks = await examine(wired(1), ["ib-a:mlx5_0,mlx5_1", "ib-b:mlx5_2,mlx5_3"]);
  for (const id of ["ib.declared", "ib.state", "ib.sm", "ib.sm.standby", "ib.fabric.same", "ib.fabric.alias", "ib.count"])
    expect(`${id} ${checks.get(id)?.verdict}`).toBe(`${id} pass`);
});

labTest("one name for both fabrics: two islands and a warning", async () => {
  const nodes = await Promise.all(
    [1, 2, 3, 4].map((number) => nodeOf(`n${number}`, wired(number), number < 3 ? "ib:mlx5_0,mlx5_1" : "ib:mlx5_2,mlx5_3")),
  );
  const fabrics = await look(nodes);
  expect(islands(fabrics)).toEqual({ "ib#1": "n1 n2", "ib#2": "n3 n4" });
  expect(codes(fabrics)).toEqual(["fabric-split"]);
});

labTest("a wrong cable: that node gets no gang, doctor names both sets", async () => {
  const crossed: Adapters = { mlx5_2: [B, "node2-0"], mlx5_3: [A, "node2-1"] };
  const nodes = [await nodeOf("n1", wired(1), "ib-b:mlx5_2,mlx5_3"), await nodeOf("n2", crossed, "ib-b:mlx5_2,mlx5_3")];
  const fabrics = await look(nodes);
  expect(islands(fabrics)).toEqual({ "ib-b": "n1" });
  expect(fabrics.torn).toEqual([{ node: "n2", fabric: "ib-b" }]);
  const check = (await examine(crossed, ["ib-b:mlx5_2,mlx5_3"])).get("ib.fabric.same");
  expect(check?.verdict).toBe("fail");
  expect(check?.found).toMatch(/mlx5_2:1 \{0xb0.*\} vs mlx5_3:1 \{0xa0/);
});

labTest("no subnet manager was ever started: unproved, and doctor says what is missing", async () => {
  const adapters: Adapters = { mlx5_4: [C, "node1-0"], mlx5_5: [C, "node1-1"] };
  const fabrics = await look([
    await nodeOf("n1", adapters, "ib-c:mlx5_4,mlx5_5"),
    await nodeOf("n2", { mlx5_4: [C, "node2-0"] }, "ib-c:mlx5_4"),
  ]);
  expect(islands(fabrics)).toEqual({ "ib-c": "n1 n2" });
  expect(codes(fabrics)).toEqual(["fabric-unproved"]);
  const checks = await examine(adapters, ["ib-c:mlx5_4,mlx5_5"]);
  expect(checks.get("ib.state")?.found).toMatch(/no subnet manager has ever configured it/);
  expect([checks.get("ib.sm")?.verdict, checks.get("ib.fabric.same")?.verdict]).toEqual(["fail", "unknown"]);
});

labTest("a cable is pulled: the node stays on its fabric, doctor names the port", async () => {
  const adapters: Adapters = { mlx5_0: [A, "node3-0"], mlx5_1: [A, "node3-1"] };
  const nodes = [await nodeOf("n1", wired(1), "ib-a:mlx5_0,mlx5_1"), await nodeOf("n3", adapters, "ib-a:mlx5_0,mlx5_1")];
  expect(islands(await look(nodes))).toEqual({ "ib-a": "n1 n3" });
  await lab.type(A, 'Unlink "node3-0"[1]');
  try {
    expect(islands(await look(nodes))).toEqual({ "ib-a": "n1 n3" });
    const check = (await examine(adapters, ["ib-a:mlx5_0,mlx5_1"])).get("ib.link");
    expect([check?.verdict, check?.found]).toEqual(["fail", "mlx5_0:1 Polling: no cable, or the far end is off"]);
  } finally {
    await lab.type(A, 'ReLink "node3-0"[1]');
  }
});

labTest("a fabric is cut in two and healed", async () => {
  const side = (number: number, at: 0 | 1): Adapters => ({ mlx5_2: [B, `node${number}-${at}`] });
  const nodes = [
    await nodeOf("n1", side(1, 0), "ib-b:mlx5_2"),
    await nodeOf("n2", side(2, 0), "ib-b:mlx5_2"),
    await nodeOf("n3", side(3, 1), "ib-b:mlx5_2"),
  ];
  let fabrics = await look(nodes);
  expect(islands(fabrics)).toEqual({ "ib-b": "n1 n2 n3" });
  await lab.type(B, 'Unlink "sw0"[15]');
  await lab.type(B, 'Unlink "sw0"[16]');
  const seen = new Set<string>();
  const again = async () => {
    fabrics = await look(nodes, fabrics.numbers);
    seen.add(JSON.stringify(islands(fabrics)));
    return islands(fabrics);
  };
  const halves = { "ib-b#1": "n1 n2", "ib-b#2": "n3" };
  await until(async () => Bun.deepEquals(await again(), halves), 90_000);
  expect(codes(fabrics)).toEqual(["fabric-split"]);
  await lab.type(B, 'ReLink "sw0"[15]');
  await lab.type(B, 'ReLink "sw0"[16]');
  await until(async () => Bun.deepEquals(await again(), { "ib-b": "n1 n2 n3" }), 90_000);
  // Nothing else was ever seen on the way.
  expect(seen.size).toBe(2);
  expect(codes(fabrics)).toEqual([]);
});

labTest("a subnet manager fails over: no node changes its island, and doctor says what it waits for", async () => {
  const nodes = await Promise.all([1, 2].map((number) => nodeOf(`n${number}`, wired(number), "ib-a:mlx5_0,mlx5_1", "ib-b:mlx5_2,mlx5_3")));
  const before = islands(await look(nodes));
  await lab.stop(`${A}-sm0`);
  const notes: string[] = [];
  const examined = examine(wired(3), ["ib-a:mlx5_0,mlx5_1"], notes);
  let silences = 0;
  const standby = `0x${A}00000000002013`;
  await until(async () => {
    const ports = (await Promise.all(nodes.map((node) => node.look()))).flat();
    const onA = ports.filter((port) => port.fabric === "ib-a");
    silences += onA.some((port) => !port.answering) ? 1 : 0;
    expect(islands(islandsOf(ports))).toEqual(before);
    return onA.every((port) => port.answering && port.managers.join() === standby);
  }, 120_000);
  expect(silences).toBeGreaterThan(0);
  const checks = await examined;
  expect(notes.join("\n")).toMatch(/subnet manager does not answer; asking for a minute/);
  expect(checks.get("ib.fabric.same")?.verdict).not.toBe("fail");
});
