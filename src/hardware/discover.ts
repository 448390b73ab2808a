/**
 * hardware/ reads what a machine has: processor, memory, disk, GPUs. Parsers are pure; this file does the reading. It
 * judges nothing and changes nothing.
 */
import { readFile, statfs } from "node:fs/promises";
import { availableParallelism, hostname, release } from "node:os";
import { join } from "node:path";
import { readIfThere } from "../os/files.ts";
import type { Inventory } from "../protocol/inventory.ts";
import { parseCpuinfo, parseMeminfo } from "./cpu.ts";
import { readGpus } from "./gpus.ts";
import type { RunTool } from "./tool.ts";

type Hardware = Omit<Inventory, "engines">;

interface DiscoverOptions {
  /** Path of nvidia-smi; searched in PATH and the usual places when absent. */
  readonly nvidia_smi?: string;
  /** The state folder: its file system is the disk that counts. */
  readonly state: string;
  /** Stands for `/` in tests: /proc, /sys and /etc are read below it. */
  readonly root?: string;
  readonly run?: RunTool;
}

/** Reads the machine as it is now. What cannot be read becomes a warning. */
export async function discoverHardware(options: DiscoverOptions): Promise<Hardware> {
  const { root = "/", run } = options;
  const [cpuinfo, meminfo, os, disk] = await Promise.all([
    readFile(join(root, "proc/cpuinfo"), "utf8"),
    readFile(join(root, "proc/meminfo"), "utf8"),
    readIfThere(join(root, "etc/os-release")),
    statfs(options.state),
  ]);
  const cpu = parseCpuinfo(cpuinfo);
  const memory = parseMeminfo(meminfo);
  const graphics = await readGpus({ nvidia_smi: options.nvidia_smi, system: memory, root, ...(run && { run }) });
  return {
    host: {
      hostname: hostname(),
      arch: process.arch === "arm64" ? "arm64" : "x64",
      os: /^PRETTY_NAME="?([^"\n]*)"?$/m.exec(os ?? "")?.[1] ?? "unknown",
      kernel: release(),
      cpu_model: cpu.model,
      cpu_features: [...cpu.features],
      cores: availableParallelism(),
    },
    memory,
    disk: { path: options.state, total: disk.blocks * disk.bsize, free: disk.bavail * disk.bsize },
    gpus: graphics.gpus,
    warnings: graphics.warnings,
  };
}
