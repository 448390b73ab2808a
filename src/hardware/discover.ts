/**
 * hardware/ reads what a machine has: processor, memory, disk, GPUs. Parsers are pure; this file does the reading. It
 * judges nothing and changes nothing.
 */
import { readdir, readFile, statfs } from "node:fs/promises";
import { availableParallelism, hostname, release } from "node:os";
import { join } from "node:path";
import { readIfThere } from "../os/files.ts";
import { messageOf } from "../protocol/errors.ts";
import type { Gpu, Inventory } from "../protocol/inventory.ts";
import { NVIDIA_SMI_MS } from "../protocol/limits.ts";
import { parseCpuinfo, parseMeminfo } from "./cpu.ts";
import { parseGpus, QUERY_ARGS } from "./nvidia-smi.ts";

export type Hardware = Omit<Inventory, "engines">;
type Warnings = Inventory["warnings"];

export interface DiscoverOptions {
  /** Path of nvidia-smi; searched in PATH and the usual places when absent. */
  readonly nvidia_smi?: string;
  /** The state folder: its file system is the disk that counts. */
  readonly state: string;
}

/** Reads the machine as it is now. What cannot be read becomes a warning. */
export async function discoverHardware(options: DiscoverOptions): Promise<Hardware> {
  const [cpuinfo, meminfo, os, disk, graphics] = await Promise.all([
    readFile("/proc/cpuinfo", "utf8"),
    readFile("/proc/meminfo", "utf8"),
    readIfThere("/etc/os-release"),
    statfs(options.state),
    discoverGpus(options.nvidia_smi),
  ]);
  const cpu = parseCpuinfo(cpuinfo);
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
    memory: parseMeminfo(meminfo),
    disk: { path: options.state, total: disk.blocks * disk.bsize, free: disk.bavail * disk.bsize },
    gpus: graphics.gpus,
    warnings: graphics.warnings,
  };
}

const USUAL_PLACES = ["/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/opt/bin/nvidia-smi"];

async function discoverGpus(given: string | undefined): Promise<{ gpus: Gpu[]; warnings: Warnings }> {
  const path = given ?? Bun.which("nvidia-smi") ?? (await firstThere(USUAL_PLACES));
  if (path === null) {
    const seen = await nvidiaOnPci();
    const text = `PCI shows ${seen} NVIDIA GPUs, but there is no nvidia-smi: install the driver, or name it with --nvidia-smi`;
    return { gpus: [], warnings: seen > 0 ? [{ code: "nvidia-smi-missing", text }] : [] };
  }
  try {
    const output = await ask(path);
    const { gpus, other } = parseGpus(output);
    const warnings = other
      .slice(0, 3)
      .map((line) => ({ code: "nvidia-smi-line", text: `${path} printed a line that is no GPU: ${line.slice(0, 200)}` }));
    return { gpus, warnings };
  } catch (error) {
    return { gpus: [], warnings: [{ code: "nvidia-smi-failed", text: `${path}: ${messageOf(error)}` }] };
  }
}

async function firstThere(paths: readonly string[]): Promise<string | null> {
  for (const path of paths) if (await Bun.file(path).exists()) return path;
  return null;
}

/** Never two at once: a driver in trouble hangs each of them. */
let asking: Promise<string> | null = null;

function ask(path: string): Promise<string> {
  asking ??= run(path).finally(() => {
    asking = null;
  });
  return asking;
}

async function run(path: string): Promise<string> {
  const child = Bun.spawn([path, ...QUERY_ARGS], {
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: NVIDIA_SMI_MS,
    killSignal: "SIGKILL",
  });
  const [output, complaint, code] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text(), child.exited]);
  if (child.signalCode !== null) throw new Error(`did not answer within ${NVIDIA_SMI_MS / 1_000} s`);
  if (code !== 0) throw new Error(`exited with code ${code}: ${(complaint + output).trim().slice(0, 300)}`);
  return output;
}

/** NVIDIA's display controllers on PCI: vendor 0x10de, class 0x03xxxx. */
async function nvidiaOnPci(): Promise<number> {
  const root = "/sys/bus/pci/devices";
  const devices = await readdir(root).catch((): string[] => []);
  const found = await Promise.all(
    devices.map(async (device) => {
      const [vendor, kind] = await Promise.all([readIfThere(join(root, device, "vendor")), readIfThere(join(root, device, "class"))]);
      return vendor?.trim() === "0x10de" && kind?.startsWith("0x03") === true;
    }),
  );
  return found.filter(Boolean).length;
}
