import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Gpu, Inventory } from "../protocol/inventory.ts";
import { NVIDIA_SMI_MS } from "../protocol/limits.ts";
import { faultOf, gpusOf, sysfsBusId, tierArgs } from "./nvidia-smi.ts";
import type { Tier, UnusableGpu } from "./nvidia-smi.ts";
import { runTool } from "./tool.ts";
import type { RunTool, ToolAnswer } from "./tool.ts";

const USUAL_PLACES = ["/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/opt/bin/nvidia-smi"];

/** Where nvidia-smi is: as given, else in PATH, else in a usual place; null when there is none. */
export async function findNvidiaSmi(given: string | undefined): Promise<string | null> {
  if (given !== undefined) return given;
  const inPath = Bun.which("nvidia-smi");
  if (inPath !== null) return inPath;
  for (const path of USUAL_PLACES) if (await Bun.file(path).exists()) return path;
  return null;
}

/** Never two at once: a driver in trouble hangs each of them, some beyond killing. */
let last: Promise<unknown> = Promise.resolve();
let hangs = false;

/** Asks nvidia-smi one tier. Calls wait for each other; while an earlier one still hangs, none is started. */
export function askTier(path: string, tier: Tier, run: RunTool = runTool): Promise<ToolAnswer> {
  const answer = last.then(async (): Promise<ToolAnswer> => {
    if (hangs) return { failed: "no answer", why: `an earlier ${path} still hangs` };
    const given = await run([path, ...tierArgs(tier)], NVIDIA_SMI_MS);
    if ("gone" in given && given.gone !== undefined) {
      hangs = true;
      void given.gone.then(() => {
        hangs = false;
      });
    }
    return given;
  });
  last = answer.catch(() => undefined);
  return answer;
}

export interface Graphics {
  /** Whole GPUs that may be used. */
  readonly gpus: Gpu[];
  readonly unusable: UnusableGpu[];
  readonly warnings: Inventory["warnings"];
}

interface GpuOptions {
  readonly nvidia_smi: string | undefined;
  readonly system: { total: number; available: number };
  /** Stands for `/` in tests. */
  readonly root?: string;
  readonly run?: RunTool;
}

/** Reads the GPUs. Whatever is wrong becomes a warning, and a GPU that cannot be trusted is set apart. */
export async function readGpus({ nvidia_smi, system, root = "/", run = runTool }: GpuOptions): Promise<Graphics> {
  const [path, pci] = await Promise.all([findNvidiaSmi(nvidia_smi), nvidiaOnPci(root)]);
  const warning = (code: string, text: string): Graphics => ({ gpus: [], unusable: [], warnings: [{ code, text }] });
  if (path === null) {
    if (pci.length === 0) return { gpus: [], unusable: [], warnings: [] };
    const text = `PCI shows ${pci.length} NVIDIA GPUs, but there is no nvidia-smi: install the driver, or name it with --nvidia-smi`;
    return warning("nvidia-smi-missing", text);
  }
  const base = await askTier(path, "base", run);
  if ("failed" in base) {
    const stuck = base.failed === "no answer" ? ": the driver is stuck" : "";
    return warning("nvidia-smi-failed", `${base.why}${stuck}`);
  }
  const more = await askTier(path, "more", run);
  // The driver that is loaded says more than a library that does not fit it.
  const fault = faultOf(base.code, `${base.out}\n${base.err}`);
  const found = gpusOf(base.out, "code" in more && more.code === 0 ? more.out : "", system);
  const warnings: Inventory["warnings"] = fault ? [{ code: fault.code, text: `${path}: ${fault.text}` }] : [];
  const listed = [...found.gpus, ...found.unusable.map((entry) => entry.gpu)];
  if (!fault)
    for (const line of found.other.slice(0, 3))
      warnings.push({ code: "nvidia-smi-line", text: `${path} printed a line that is no GPU: ${line.slice(0, 200)}` });
  for (const { gpu, why } of found.unusable)
    warnings.push({ code: "gpu-unusable", text: `GPU ${gpu.index} (${gpu.name}) is not offered: ${why}` });
  for (const index of found.unified)
    warnings.push({ code: "gpu-unified-memory", text: `GPU ${index} shares the system's memory: that is counted as its own` });
  const missing = missingFrom(pci, listed);
  if (missing.length > 0) {
    const text = `PCI shows ${pci.length} NVIDIA GPUs, nvidia-smi lists ${listed.length} (missing ${missing.join(", ")})`;
    warnings.push({ code: "gpu-count", text });
  }
  return { gpus: found.gpus, unusable: found.unusable, warnings };
}

/** Bus addresses PCI knows and nvidia-smi does not list. */
export function missingFrom(pci: readonly string[], listed: readonly Gpu[]): string[] {
  const known = new Set(listed.flatMap((gpu) => ("value" in gpu.pci_bus_id ? [sysfsBusId(gpu.pci_bus_id.value)] : [])));
  return pci.filter((address) => !known.has(address));
}

/** Addresses of NVIDIA's display and 3D controllers on PCI: vendor 0x10de, class 0x0300 or 0x0302. */
export async function nvidiaOnPci(root = "/"): Promise<string[]> {
  return pciFunctions(root, (vendor, kind) => vendor === "0x10de" && /^0x030[02]/.test(kind));
}

/** The NUMA nodes NVIDIA's GPUs hang on, each once; empty where the machine does not tell (-1 in sysfs). */
export async function gpuNumaNodes(root = "/"): Promise<number[]> {
  const files = (await nvidiaOnPci(root)).map((device) => join(root, "sys/bus/pci/devices", device, "numa_node"));
  const nodes = await Promise.all(files.map((file) => readFile(file, "utf8").then(Number, () => -1)));
  return [...new Set(nodes.filter((node) => Number.isInteger(node) && node >= 0))].sort((a, b) => a - b);
}

/** Addresses of the PCI functions of which a vendor and a class tell that they are meant. */
export async function pciFunctions(root: string, wanted: (vendor: string, kind: string) => boolean): Promise<string[]> {
  const folder = join(root, "sys/bus/pci/devices");
  const devices = await readdir(folder).catch((): string[] => []);
  const read = (device: string, file: string) =>
    readFile(join(folder, device, file), "utf8").then(
      (text) => text.trim(),
      () => "",
    );
  const found = await Promise.all(devices.map(async (device) => wanted(await read(device, "vendor"), await read(device, "class"))));
  return devices.filter((_, at) => found[at]).toSorted();
}
