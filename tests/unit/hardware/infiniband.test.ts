// Which ports of which machines can carry a fabric, by trees as their kernels write them.
import { describe, expect, test } from "bun:test";
import { readIbPorts } from "../../../src/hardware/infiniband.ts";
import { ibTree } from "../../fixtures/hardware/ib-tree.ts";
import type { DeviceSpec } from "../../fixtures/hardware/ib-tree.ts";

const mlx = (from: number, count: number, more: Partial<DeviceSpec> = {}): DeviceSpec[] =>
  Array.from({ length: count }, (_, index) => ({ name: `mlx5_${from + index}`, ...more }));
const ethernet = { pci_class: "0x020000", ports: [{ link_layer: "Ethernet", rate: "200 Gb/sec (2X NDR)" }] };
const bridges = mlx(8, 4, { vpd: "\u0082\u0010SMDL=SW_MNG\0", ports: [{ cap_mask: "0xa750e84a" }] });

interface Case {
  readonly name: string;
  readonly devices: readonly DeviceSpec[];
  readonly usable: readonly string[];
  readonly why?: Readonly<Record<string, RegExp>>;
}

const CASES: Case[] = [
  { name: "no InfiniBand at all", devices: [], usable: [] },
  { name: "HGX H100: eight adapters", devices: mlx(0, 8), usable: mlx(0, 8).map(({ name }) => `${name}:1`) },
  {
    name: "HGX B200: four NVSwitch bridges look like adapters",
    devices: [...mlx(0, 8), ...bridges],
    usable: mlx(0, 8).map(({ name }) => `${name}:1`),
    why: { "mlx5_8:1": /NVSwitch/, "mlx5_11:1": /NVSwitch/ },
  },
  { name: "RoCE only", devices: mlx(0, 4, ethernet), usable: [], why: { "mlx5_0:1": /Ethernet/ } },
  {
    name: "InfiniBand and RoCE mixed",
    devices: [...mlx(0, 2), { name: "mlx5_bond_0", ...ethernet }],
    usable: ["mlx5_0:1", "mlx5_1:1"],
    why: { "mlx5_bond_0:1": /Ethernet/ },
  },
  {
    name: "two ports, both InfiniBand",
    devices: [{ name: "mlx4_0", ports: [{ number: 1 }, { number: 2 }] }],
    usable: ["mlx4_0:1", "mlx4_0:2"],
  },
  {
    name: "two ports of two kinds",
    devices: [{ name: "mlx5_0", ports: [{ number: 1 }, { number: 2, link_layer: "Ethernet" }] }],
    usable: ["mlx5_0:1"],
  },
  {
    name: "renamed by rdma-core",
    devices: [{ name: "ibp24s0" }, { name: "rocep193s0f0", ...ethernet }, { name: "ibxa088c2030076" }],
    usable: ["ibp24s0:1", "ibxa088c2030076:1"],
  },
  { name: "renamed as on Azure", devices: [{ name: "mlx5_ib0" }, { name: "mlx5_an0", ...ethernet }], usable: ["mlx5_ib0:1"] },
  {
    name: "virtual functions, one without GUID",
    devices: [
      { name: "mlx5_0", is_virtual: true },
      { name: "mlx5_1", is_virtual: true, ports: [{ guid: "0000:0000:0000:0000", state: "1: DOWN" }] },
    ],
    usable: ["mlx5_0:1"],
    why: { "mlx5_1:1": /virtual function without a GUID/ },
  },
  {
    name: "ConnectX-8: management siblings",
    devices: [
      { name: "mlx5_0", hca: "MT4131" },
      { name: "smi0", ports: [1, 2, 3, 4].map((number) => ({ number })) },
    ],
    usable: ["mlx5_0:1"],
    why: { "smi0:4": /management/ },
  },
  {
    name: "ConnectX-8, multi-plane RoCE on high ports",
    devices: [{ name: "mlx5_0", ports: [3, 6, 9, 12].map((number) => ({ number, link_layer: "Ethernet" })) }],
    usable: [],
  },
  {
    name: "a switch and an iWARP card",
    devices: [
      { name: "sw0", node_type: "2: switch" },
      { name: "irdma0", node_type: "4: RNIC" },
    ],
    usable: [],
    why: { "sw0:1": /no adapter/ },
  },
  {
    name: "old kernel without link_layer",
    devices: [
      { name: "mlx4_0", ports: [{ link_layer: null }] },
      { name: "mlx4_1", pci_class: "0x020000", ports: [{ link_layer: null }] },
    ],
    usable: ["mlx4_0:1"],
  },
  {
    name: "some files cannot be read",
    devices: [{ name: "mlx5_0", ports: [{ broken: ["rate", "counters/link_downed", "sm_lid"] }] }],
    usable: ["mlx5_0:1"],
  },
  {
    name: "no file can be read",
    devices: [{ name: "mlx5_0", ports: [{ broken: ["state", "gids/0", "rate", "lid"] }] }],
    usable: [],
    why: { "mlx5_0:1": /cannot be read/ },
  },
  {
    name: "cables out: still adapters",
    devices: mlx(0, 2, { ports: [{ state: "1: DOWN", phys_state: "2: Polling" }] }),
    usable: ["mlx5_0:1", "mlx5_1:1"],
  },
  { name: "mlx5_2 comes before mlx5_10", devices: mlx(2, 9), usable: mlx(2, 9).map(({ name }) => `${name}:1`) },
];

describe("ports that can carry a fabric", () => {
  for (const each of CASES) {
    test(each.name, async () => {
      const tree = await ibTree(each.devices);
      try {
        const ports = await readIbPorts(tree.root);
        expect(ports.filter((port) => port.excluded === "").map((port) => `${port.device}:${port.port}`)).toEqual([...each.usable]);
        for (const [name, why] of Object.entries(each.why ?? {}))
          expect(ports.find((port) => `${port.device}:${port.port}` === name)?.excluded).toMatch(why);
      } finally {
        await tree.remove();
      }
    });
  }
});

test("a folder that is not there has no ports", async () => {
  expect(await readIbPorts("/nowhere/infiniband")).toEqual([]);
});

test("everything of a port", async () => {
  const port = {
    guid: "a088:c203:00c7:6436",
    prefix: "fec0:0000:0000:0002",
    sm_lid: "0xc",
    pkeys: ["0xffff", "0x7fff", "0x0000"],
    link_downed: 14,
    rate: "2.5 Gb/sec (1X)",
    cap_mask: "0x0050c04a",
  };
  const tree = await ibTree([{ name: "mlx5_2", ports: [port], pci: "pci0000:c0/0000:c0:01.1/0000:c1:00.0", numa: 1, netdev: "ib0" }]);
  try {
    expect((await readIbPorts(tree.root))[0]).toMatchObject({
      device: "mlx5_2",
      port: 1,
      guid: "0xa088c20300c76436",
      state: "ACTIVE",
      phys_state: "LinkUp",
      rate_gbps: 2.5,
      lid: 4,
      sm_lid: 12,
      gid_prefix: "fec0:0000:0000:0002",
      link_downed: 14,
      pkeys: ["0xffff", "0x7fff"],
      runs_manager: true,
      pci: "0000:c1:00.0",
      numa: 1,
      hca: "MT4129",
      netdevs: ["ib0"],
    });
  } finally {
    await tree.remove();
  }
});
