// What `--fabric` may say, which ports it takes, and what it refuses.
import { describe, expect, test } from "bun:test";
import { assignFabrics, parseFabric } from "../../../src/hardware/fabric-declaration.ts";
import { readIbPorts } from "../../../src/hardware/infiniband.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import { ibTree } from "../../fixtures/hardware/ib-tree.ts";
import type { DeviceSpec } from "../../fixtures/hardware/ib-tree.ts";

const down = [{ state: "1: DOWN", phys_state: "2: Polling" }];
const MACHINE: DeviceSpec[] = [
  { name: "mlx5_0", numa: 0 },
  { name: "mlx5_1", numa: 0, netdev: "ib1" },
  { name: "mlx5_2", numa: 1 },
  { name: "mlx5_3", numa: 1 },
  { name: "mlx5_4", numa: 1, ports: down },
  { name: "mlx5_bond_0", pci_class: "0x020000", ports: [{ link_layer: "Ethernet" }] },
  { name: "mlx5_8", vpd: "SW_MNG" },
  {
    name: "mlx4_0",
    ports: [
      { number: 1, ...down[0] },
      { number: 2, ...down[0] },
    ],
  },
];

async function assign(words: readonly string[], gpu_numa: readonly number[] = [], machine = MACHINE): Promise<Record<string, string>> {
  const tree = await ibTree(machine);
  try {
    return Object.fromEntries(assignFabrics(words.map(parseFabric), await readIbPorts(tree.root), gpu_numa));
  } finally {
    await tree.remove();
  }
}

describe("declared", () => {
  const cases: [string, string[], number[], Record<string, string>][] = [
    ["by adapters", ["ib-b:mlx5_2,mlx5_3"], [], { "mlx5_2:1": "ib-b", "mlx5_3:1": "ib-b" }],
    ["by port", ["ib-b:mlx4_0:2"], [], { "mlx4_0:2": "ib-b" }],
    ["two fabrics on two ports of one device", ["ib-a:mlx4_0:1", "ib-b:mlx4_0:2"], [], { "mlx4_0:1": "ib-a", "mlx4_0:2": "ib-b" }],
    ["one fabric in two words", ["ib-b:mlx5_2", "ib-b:mlx5_3"], [], { "mlx5_2:1": "ib-b", "mlx5_3:1": "ib-b" }],
    ["by name: two, spread over NUMA", ["ib-b"], [], { "mlx5_0:1": "ib-b", "mlx5_2:1": "ib-b" }],
    ["by name: near the GPUs", ["ib-b"], [1], { "mlx5_2:1": "ib-b", "mlx5_3:1": "ib-b" }],
    [
      "by name, after what others name",
      ["ib-b", "ib-a:mlx5_0,mlx5_2"],
      [],
      { "mlx5_0:1": "ib-a", "mlx5_2:1": "ib-a", "mlx5_1:1": "ib-b", "mlx5_3:1": "ib-b" },
    ],
    ["the same adapter twice under one name", ["ib-b:mlx5_2,mlx5_2:1"], [], { "mlx5_2:1": "ib-b" }],
  ];
  for (const [name, words, numa, expected] of cases)
    test(name, async () => {
      expect(await assign(words, numa)).toEqual(expected);
    });

  test("by name on a machine without InfiniBand: nothing", async () => {
    expect(await assign(["ib-b"], [], [])).toEqual({});
  });
});

describe("refused", () => {
  const cases: [string, string[], RegExp][] = [
    ["an adapter under two fabrics names both", ["ib-a:mlx5_2", "ib-b:mlx5_2,mlx5_3"], /mlx5_2:1 is under two fabrics: ib-a and ib-b/],
    ["also when one names the port", ["ib-a:mlx5_2:1", "ib-b:mlx5_2"], /ib-a and ib-b/],
    ["not here", ["ib-b:mlx5_9"], /mlx5_9 is not here.*InfiniBand adapters here: mlx4_0:1.*mlx5_0:1/s],
    ["a network interface", ["ib-b:ib1"], /network interface of mlx5_1/],
    ["RoCE", ["ib-b:mlx5_bond_0"], /Ethernet/],
    ["the NVSwitch's", ["ib-b:mlx5_8"], /NVSwitch/],
    ["two ports and none named", ["ib-b:mlx4_0"], /ib-b:mlx4_0:1 or ib-b:mlx4_0:2/],
    ["no such port", ["ib-b:mlx5_2:2"], /no port 2/],
    ["no name", [":mlx5_2"], /is no name/],
    ["upper case name", ["IB"], /is no name/],
    ["nothing behind the colon", ["ib-b:"], /no adapter/],
    ["too many colons", ["ib-b:mlx5_2:1:1"], /is no adapter/],
    ["a path", ["ib-b:../../x"], /is no adapter/],
  ];
  for (const [name, words, text] of cases)
    test(name, async () => {
      const error = await assign(words).then(
        () => null,
        (thrown: unknown) => thrown,
      );
      expect(error).toBeInstanceOf(OperatorError);
      const { message, why, remedy, exit } = error as OperatorError;
      expect(`${message}\n${why}\n${remedy}`).toMatch(text);
      expect(exit).toBe(2);
    });
});
