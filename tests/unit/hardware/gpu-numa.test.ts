import { expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { gpuNumaNodes } from "../../../src/hardware/gpus.ts";

test("the NUMA nodes of GPUs are read from PCI, each once; other devices and unknown ones do not count", async () => {
  const root = await mkdtemp(join(tmpdir(), "llmgw-numa-"));
  const devices = [
    ["0000:01:00.0", "0x10de", "0x030200", "1"],
    ["0000:02:00.0", "0x10de", "0x030000", "1"],
    ["0000:03:00.0", "0x10de", "0x030200", "0"],
    ["0000:04:00.0", "0x10de", "0x030200", "-1"],
    ["0000:05:00.0", "0x10de", "0x068000", "3"],
    ["0000:06:00.0", "0x15b3", "0x020700", "2"],
  ] as const;
  for (const [address, vendor, kind, numa] of devices) {
    const folder = join(root, "sys/bus/pci/devices", address);
    await mkdir(folder, { recursive: true });
    await Promise.all([
      writeFile(join(folder, "vendor"), `${vendor}\n`),
      writeFile(join(folder, "class"), `${kind}\n`),
      writeFile(join(folder, "numa_node"), `${numa}\n`),
    ]);
  }
  expect(await gpuNumaNodes(root)).toEqual([0, 1]);
  expect(await gpuNumaNodes(join(root, "nothing"))).toEqual([]);
  await rm(root, { recursive: true, force: true });
});
