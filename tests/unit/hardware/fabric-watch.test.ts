// A node follows its ports over time: through silence, failover and a real change of fabric.
import { afterEach, expect, test } from "bun:test";
import { rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { parseFabric } from "../../../src/hardware/fabric-declaration.ts";
import { FabricWatch } from "../../../src/hardware/fabric-watch.ts";
import type { RunTool, ToolAnswer } from "../../../src/hardware/tool.ts";
import { ibTree } from "../../fixtures/hardware/ib-tree.ts";

let remove = async () => {};
afterEach(() => remove());

const manager = (guid: string) => `SMInfoRecord dump:\n\t\tGUID..........${guid}\n\t\tPriority......5\n\t\tSMState.......3\n`;
const silent: ToolAnswer = { code: 110, out: "", err: "Query SA failed: Connection timed out" };
const switches = (...guids: string[]) => guids.map((guid) => `switchguid=${guid}(${guid})\n`).join("");

/** A machine of two adapters on ib-b, and what its tools answer at present. */
async function machine(words = ["ib-b:mlx5_2,mlx5_3"]) {
  const tree = await ibTree([{ name: "mlx5_2" }, { name: "mlx5_3" }, { name: "mlx5_4" }]);
  ({ remove } = tree);
  const says: { managers: string | ToolAnswer; switches: string } = { managers: manager("0xb1"), switches: switches("0x51") };
  const asked: string[] = [];
  const run: RunTool = async (argv) => {
    asked.push(argv.join(" "));
    if (argv[0] === "ibnetdiscover") return { code: 0, out: says.switches, err: "" };
    return argv[0] === "saquery" && typeof says.managers === "string" ? { code: 0, out: says.managers, err: "" } : silent;
  };
  const watch = await FabricWatch.open({ ib_root: tree.root, fabrics: words.map(parseFabric), run, now: () => 7 });
  return { tree, says, asked, watch, managers: async () => (await watch.look()).map((port) => port.managers.join(" ")) };
}

test("before it has asked: ports and names, no manager", async () => {
  const { watch, asked } = await machine();
  expect(watch.ports().map(({ device, fabric, managers, answered_ms }) => [device, fabric, managers.length, answered_ms])).toEqual([
    ["mlx5_2", "ib-b", 0, null],
    ["mlx5_3", "ib-b", 0, null],
    ["mlx5_4", "", 0, null],
  ]);
  expect(asked).toEqual([]);
});

test("only declared ports are asked, switches only when managers changed", async () => {
  const { managers, asked } = await machine();
  expect(await managers()).toEqual(["0x00000000000000b1", "0x00000000000000b1", ""]);
  expect(asked.filter((line) => line.startsWith("ibnetdiscover")).length).toBe(2);
  asked.length = 0;
  await managers();
  expect(asked).toEqual(["saquery -C mlx5_2 -P 1 SMIR", "saquery -C mlx5_3 -P 1 SMIR"]);
});

test("a minute of silence changes nothing", async () => {
  const { says, watch, managers } = await machine();
  const before = await managers();
  says.managers = silent;
  for (let at = 0; at < 20; at++) expect(await managers()).toEqual(before);
  expect(watch.ports()[0]).toMatchObject({ answering: false, answered_ms: 7 });
});

test("another fabric is believed at the third answer", async () => {
  const { says, managers } = await machine();
  await managers();
  Object.assign(says, { managers: manager("0xc1"), switches: switches("0x99") });
  const seen = [await managers(), await managers(), await managers()].map((ports) => ports[0]?.slice(-2));
  expect(seen).toEqual(["b1", "b1", "c1"]);
});

test("a new manager on the same switches is believed at once", async () => {
  const { says, managers } = await machine();
  await managers();
  says.managers = manager("0xc1");
  expect((await managers())[0]).toBe("0x00000000000000c1");
});

test("another adapter under the same name starts anew", async () => {
  const { tree, says, managers } = await machine();
  await managers();
  await writeFile(join(tree.root, "mlx5_2/ports/1/gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0099\n");
  says.managers = silent;
  expect(await managers()).toEqual(["", "0x00000000000000b1", ""]);
});

test("a choice by name stays, also when its link goes down, and a lost adapter ends nothing", async () => {
  const { tree, watch, managers } = await machine(["ib-b"]);
  const chosen = () => watch.ports().flatMap((port) => (port.fabric === "" ? [] : [port.device]));
  await managers();
  const before = chosen();
  expect(before).toHaveLength(2);
  await writeFile(join(tree.root, before[0] ?? "", "ports/1/state"), "1: DOWN\n");
  await managers();
  expect(chosen()).toEqual(before);
  await rm(join(tree.root, "mlx5_2"), { recursive: true });
  await managers();
  expect(chosen()).toEqual(["mlx5_3", "mlx5_4"]);
});

test("looks that overlap are one", async () => {
  const { watch, asked } = await machine();
  await Promise.all([watch.look(), watch.look(), watch.look()]);
  expect(asked.filter((line) => line.startsWith("saquery")).length).toBe(2);
});
