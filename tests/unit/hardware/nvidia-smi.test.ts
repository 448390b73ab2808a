// What is made of nvidia-smi's outputs: healthy ones, sick ones and those of machines that share their memory.
import { describe, expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readGpus } from "../../../src/hardware/gpus.ts";
import { cellOf, parseTier, sysfsBusId } from "../../../src/hardware/nvidia-smi.ts";
import type { RunTool, ToolAnswer } from "../../../src/hardware/tool.ts";

const GIB = 1024 ** 3;
const SYSTEM = { total: 128 * GIB, available: 120 * GIB };
const row = (index: number, name = "NVIDIA H100 80GB HBM3", total = "81559", used = "4", mig = "Disabled") =>
  `${index}, GPU-${index}, 00000000:${(0x10 + index).toString(16).toUpperCase()}:00.0, ${name}, 580.95.05, ${total}, ${used}, ${mig}`;
const eight = Array.from({ length: 8 }, (_, index) => row(index)).join("\n");
const capabilities = Array.from({ length: 8 }, (_, index) => `${index}, 9.0, Enabled, 31`).join("\n");

interface Case {
  readonly name: string;
  readonly base: ToolAnswer | string;
  readonly more?: ToolAnswer | string;
  /** NVIDIA functions on PCI; as many as rows when absent. */
  readonly pci?: number;
  readonly usable: number;
  readonly unusable?: number;
  readonly warnings?: string[];
  readonly text?: RegExp;
  readonly total?: number | string;
}

const failed = (code: number, out: string, err = ""): ToolAnswer => ({ code, out, err });
const CASES: Case[] = [
  { name: "eight healthy H100", base: eight, more: capabilities, usable: 8, total: 81_559 * 1024 ** 2 },
  { name: "first tier only: a script that prints the same whatever is asked", base: eight, more: eight, usable: 8 },
  { name: "windows line ends", base: eight.replaceAll("\n", "\r\n"), usable: 8 },
  {
    name: "MIG parent",
    base: `${row(0)}\n${row(1, undefined, undefined, undefined, "Enabled")}`,
    usable: 1,
    unusable: 1,
    warnings: ["gpu-unusable"],
    text: /MIG/,
  },
  { name: "MIG state hidden in a container", base: row(0, undefined, undefined, undefined, "[Insufficient Permissions]"), usable: 1 },
  { name: "vGPU", base: row(0, "NVIDIA H100L-2-24C", "24576", "0", "[N/A]"), usable: 1, total: 24 * GIB },
  {
    name: "GB10: memory is the system's",
    base: row(0, "NVIDIA GB10", "[N/A]", "[N/A]", "[N/A]"),
    usable: 1,
    warnings: ["gpu-unified-memory"],
    total: SYSTEM.total,
  },
  {
    name: "Jetson",
    base: "0, GPU-j, [N/A], Orin (nvgpu), 540.4.0, [N/A], [N/A], [N/A]",
    pci: 0,
    usable: 1,
    warnings: ["gpu-unified-memory"],
    total: SYSTEM.total,
  },
  {
    name: "memory not supported on a discrete part stays unknown",
    base: row(0, "Tesla X", "[Not Supported]"),
    usable: 1,
    total: "nvidia-smi says Not Supported",
  },
  {
    name: "one GPU lost, still listed",
    base: `${row(0)}\n${row(1, undefined, "[GPU is lost]", "[GPU is lost]", "[GPU is lost]")}`,
    usable: 1,
    unusable: 1,
    warnings: ["gpu-unusable"],
    text: /lost/,
  },
  {
    name: "one GPU off the bus",
    base: failed(0, `${row(0)}\nUnable to determine the device handle for GPU0000:65:00.0: Unknown Error`),
    pci: 2,
    usable: 1,
    warnings: ["gpu-lost", "gpu-count"],
    text: /0000:65:00\.0/,
  },
  {
    name: "one GPU silently missing",
    base: Array.from({ length: 7 }, (_, index) => row(index)).join("\n"),
    pci: 8,
    usable: 7,
    warnings: ["gpu-count"],
    text: /PCI shows 8 NVIDIA GPUs, nvidia-smi lists 7 \(missing 0000:17:00\.0\)/,
  },
  {
    name: "requires reset",
    base: row(0, undefined, "[GPU requires reset]"),
    usable: 0,
    unusable: 1,
    warnings: ["gpu-unusable"],
    text: /reset/,
  },
  {
    name: "unknown error in a cell",
    base: row(0, undefined, undefined, "[Unknown Error]"),
    usable: 0,
    unusable: 1,
    warnings: ["gpu-unusable"],
  },
  {
    name: "driver and library differ",
    base: failed(18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86\n"),
    pci: 1,
    usable: 0,
    warnings: ["nvidia-driver-mismatch", "gpu-count"],
    text: /570\.86/,
  },
  { name: "no devices", base: failed(6, "No devices were found\n"), pci: 0, usable: 0, warnings: ["gpu-none"] },
  {
    name: "driver not loaded",
    base: failed(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
    pci: 1,
    usable: 0,
    warnings: ["nvidia-driver-missing", "gpu-count"],
  },
  {
    name: "a field it does not know voids only that tier",
    base: eight,
    more: failed(2, 'Field "compute_cap" is not a valid field to query.\n'),
    usable: 8,
  },
  {
    name: "a field of the first tier is not known",
    base: failed(2, 'Field "mig.mode.current" is not a valid field to query.\n'),
    pci: 1,
    usable: 0,
    warnings: ["nvidia-smi-failed", "gpu-count"],
    text: /mig\.mode/,
  },
  {
    name: "too slow",
    base: { failed: "no answer", why: "nvidia-smi did not return in 10 s" },
    pci: 1,
    usable: 0,
    warnings: ["nvidia-smi-failed"],
    text: /stuck/,
  },
  { name: "not there", base: { failed: "missing", why: "there is no nvidia-smi" }, pci: 0, usable: 0, warnings: ["nvidia-smi-failed"] },
  {
    name: "garbage between rows",
    base: `WARNING: infoROM is corrupted\n${row(0)}\nsomething, else\n${row(1)}`,
    usable: 2,
    warnings: ["nvidia-smi-line", "nvidia-smi-line"],
  },
  { name: "corrupt info ROM is a warning of its own tool", base: failed(14, row(0)), usable: 1 },
  { name: "nothing at all", base: "", pci: 0, usable: 0 },
  { name: "columns of another question", base: "0, 9.0, Enabled, 31", pci: 0, usable: 0, warnings: ["nvidia-smi-line"] },
  { name: "the same row twice", base: `${row(0)}\n${row(0)}`, pci: 1, usable: 1, warnings: ["nvidia-smi-line"] },
  { name: "killed", base: failed(137, ""), pci: 0, usable: 0, warnings: ["nvidia-smi-failed"], text: /code 137/ },
];

async function pciTree(count: number): Promise<string> {
  const root = await mkdtemp(join(tmpdir(), "llmgw-pci-"));
  for (let index = 0; index < count; index++) {
    const folder = join(root, "sys/bus/pci/devices", `0000:${(0x10 + index).toString(16)}:00.0`);
    await mkdir(folder, { recursive: true });
    await writeFile(join(folder, "vendor"), "0x10de\n");
    await writeFile(join(folder, "class"), "0x030200\n");
  }
  return root;
}

const answer = (given: ToolAnswer | string | undefined): ToolAnswer =>
  typeof given === "object" ? given : { code: 0, out: given ?? "", err: "" };

describe("nvidia-smi says", () => {
  for (const each of CASES) {
    test(each.name, async () => {
      const run: RunTool = async (argv) => answer(argv[1]?.includes("uuid") ? each.base : each.more);
      const root = await pciTree(each.pci ?? each.usable + (each.unusable ?? 0));
      try {
        const { gpus, unusable, warnings } = await readGpus({ nvidia_smi: "/x/nvidia-smi", system: SYSTEM, root, run });
        expect(warnings.map((warning) => warning.code)).toEqual(each.warnings ?? []);
        expect([gpus.length, unusable.length]).toEqual([each.usable, each.unusable ?? 0]);
        if (each.text) expect(warnings.map((warning) => warning.text).join("\n")).toMatch(each.text);
        if (typeof each.total === "number") expect(gpus[0]?.memory_total).toEqual({ value: each.total });
        if (typeof each.total === "string") expect(gpus[0]?.memory_total).toEqual({ absent: each.total });
      } finally {
        await rm(root, { recursive: true });
      }
    });
  }
});

test("compute capability comes from the second tier", async () => {
  const run: RunTool = async (argv) => answer(argv[1]?.includes("uuid") ? eight : capabilities);
  const { gpus } = await readGpus({ nvidia_smi: "/x/nvidia-smi", system: SYSTEM, root: "/nowhere", run });
  expect(gpus.map((gpu) => gpu.compute_capability)).toEqual(Array.from({ length: 8 }, () => ({ value: "9.0" })));
});

test("GPUs on PCI without nvidia-smi are a warning, not silence", async () => {
  const root = await pciTree(2);
  const path = process.env["PATH"];
  process.env["PATH"] = root;
  try {
    const { warnings } = await readGpus({ nvidia_smi: undefined, system: SYSTEM, root });
    expect(warnings.map((warning) => warning.code)).toEqual(["nvidia-smi-missing"]);
  } finally {
    process.env["PATH"] = path;
    await rm(root, { recursive: true });
  }
});

test("never two at once", async () => {
  let running = 0;
  let most = 0;
  const run: RunTool = async () => {
    most = Math.max(most, ++running);
    await Bun.sleep(5);
    running--;
    return answer(row(0));
  };
  const ask = () => readGpus({ nvidia_smi: "/x/nvidia-smi", system: SYSTEM, root: "/nowhere", run });
  await Promise.all([ask(), ask(), ask()]);
  expect(most).toBe(1);
});

test("cells, bus ids and tiers", () => {
  expect(cellOf("[N/A]")).toEqual({ absent: "nvidia-smi says N/A" });
  expect(cellOf("81559")).toEqual({ value: "81559" });
  expect(sysfsBusId("00000000:C1:00.0")).toBe("0000:c1:00.0");
  expect(sysfsBusId("00000008:01:00.0")).toBe("0008:01:00.0");
  expect(parseTier("fabric", "0, Completed, Success, 0, 5c6d-1").rows.get(0)?.["fabric.state"]).toEqual({ value: "Completed" });
});
