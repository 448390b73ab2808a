import type { Gpu } from "../protocol/inventory.ts";

/**
 * nvidia-smi is asked in tiers, because one field it does not know voids the whole answer. Each tier begins with `index` and has its own
 * number of columns, so that an answer to another question is never taken for this one.
 */
const TIERS = {
  /** Enough to run a fleet: known to every driver in use. */
  base: ["index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current"],
  more: ["index", "compute_cap", "persistence_mode", "temperature.gpu"],
  health: [
    "index",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
  ],
  fabric: ["index", "fabric.state", "fabric.status", "fabric.cliqueId", "fabric.clusterUuid"],
} as const satisfies Record<string, readonly string[]>;
export type Tier = keyof typeof TIERS;

/** Arguments that ask one tier: CSV without heading and units. */
export function tierArgs(tier: Tier): string[] {
  return [`--query-gpu=${TIERS[tier].join(",")}`, "--format=csv,noheader,nounits"];
}

type Reading<T> = { value: T } | { absent: string };
/** One row of a tier: its cells by field name, each a value or why there is none. */
export type Row = Readonly<Record<string, Reading<string>>>;

/** Cells like `[N/A]`, `[Not Supported]`, `[Unknown Error]`, `N/A`: a reading that is not there, and why. */
export function cellOf(cell: string): Reading<string> {
  const bracketed = /^\[(.*)\]$/.exec(cell)?.[1] ?? (/^(N\/A|ERR!|)$/.test(cell) ? cell || "nothing" : null);
  return bracketed === null ? { value: cell } : { absent: `nvidia-smi says ${bracketed}` };
}

/** The rows of a tier by GPU index, and the lines that are none. Rows of another number of columns are none. */
export function parseTier(tier: Tier, output: string): { rows: Map<number, Row>; other: string[] } {
  const fields = TIERS[tier];
  const rows = new Map<number, Row>();
  const other: string[] = [];
  for (const line of output.split("\n").map((text) => text.trim())) {
    if (line === "") continue;
    const cells = line.split(",").map((cell) => cell.trim());
    const index = Number(cells[0]);
    const isRow = cells.length === fields.length && /^\d{1,4}$/.test(cells[0] ?? "") && !rows.has(index);
    if (isRow && (tier !== "base" || /^(GPU|MIG)-/.test(cells[1] ?? "")))
      rows.set(index, Object.fromEntries(fields.map((field, at) => [field, cellOf(cells[at] ?? "")])));
    else other.push(line);
  }
  return { rows, other };
}

const MIB = 1_048_576;

function bytesOf(cell: Reading<string> | undefined): Reading<number> {
  if (cell === undefined) return { absent: "not asked" };
  if ("absent" in cell) return cell;
  const mib = Number(cell.value);
  return Number.isFinite(mib) && mib >= 0 ? { value: Math.round(mib * MIB) } : { absent: `nvidia-smi says "${cell.value}"` };
}

/** `00000000:C1:00.0` as sysfs writes it: `0000:c1:00.0`. */
export function sysfsBusId(bus: string): string {
  return bus.toLowerCase().replace(/^0000([0-9a-f]{4}:)/, "$1");
}

/** Parts whose GPU shares the system's memory and reports none of its own. */
const INTEGRATED = /\b(GB10|Orin|Thor|Xavier|N1X)\b|\(nvgpu\)/;

const GIVEN_UP = /GPU is lost|requires reset|Unknown Error/i;

/** Why a GPU must not be offered; null when it may. */
function unusableBecause(row: Row, gpu: Gpu): string | null {
  const ill = Object.values(row).find((cell) => "absent" in cell && GIVEN_UP.test(cell.absent));
  if (ill && "absent" in ill) return `${ill.absent}: reset or power-cycle it`;
  const mig = row["mig.mode.current"];
  if (mig && "value" in mig && /^enabled$/i.test(mig.value)) return "MIG is enabled: it is not a whole GPU";
  if (gpu.uuid.startsWith("MIG-")) return "it is a slice (MIG), not a whole GPU";
  return null;
}

export interface UnusableGpu {
  readonly gpu: Gpu;
  readonly why: string;
}

/** The GPUs in the answers, whole and usable ones apart from the others. `system` = the machine's memory in bytes. */
export function gpusOf(base: string, more: string, system: { total: number; available: number }) {
  const { rows, other } = parseTier("base", base);
  const extra = parseTier("more", more).rows;
  const gpus: Gpu[] = [];
  const unusable: UnusableGpu[] = [];
  const unified: number[] = [];
  for (const [index, row] of rows) {
    const text = (field: string) => {
      const cell = row[field];
      return cell && "value" in cell ? cell.value : "";
    };
    const found: Gpu = {
      index,
      uuid: text("uuid"),
      name: text("name") || "unknown",
      memory_total: bytesOf(row["memory.total"]),
      memory_used: bytesOf(row["memory.used"]),
      driver: row["driver_version"] ?? { absent: "not asked" },
      compute_capability: extra.get(index)?.["compute_cap"] ?? { absent: "nvidia-smi does not tell" },
      pci_bus_id: row["pci.bus_id"] ?? { absent: "not asked" },
    };
    const why = unusableBecause(row, found);
    const shares = why === null && INTEGRATED.test(found.name) && "absent" in found.memory_total;
    if (shares) unified.push(index);
    const gpu = shares
      ? { ...found, memory_total: { value: system.total }, memory_used: { value: Math.max(0, system.total - system.available) } }
      : found;
    if (why === null) gpus.push(gpu);
    else unusable.push({ gpu, why });
  }
  return { gpus, unusable, unified, other };
}

/** What is wrong, from nvidia-smi's own words and exit code (an NVML return code). Null when nothing is. */
export function faultOf(code: number, output: string): { code: string; text: string } | null {
  const mismatch = /Driver\/library version mismatch/.test(output);
  if (mismatch || code === 18) {
    const library = /NVML library version: (\S+)/.exec(output)?.[1];
    const text = `driver and library versions differ${library ? ` (library ${library})` : ""}: reboot, or reload the nvidia modules`;
    return { code: "nvidia-driver-mismatch", text };
  }
  const lost = /Unable to determine the device handle for (?:GPU ?)?([0-9A-Fa-f:.]+): ?(.*)/.exec(output);
  if (lost) {
    const bus = sysfsBusId((lost[1] ?? "").replace(/:$/, ""));
    return { code: "gpu-lost", text: `the GPU at ${bus} does not answer (${lost[2]?.trim()}): reset or power-cycle the machine` };
  }
  if (/No devices were found/i.test(output) || code === 6) return { code: "gpu-none", text: "nvidia-smi finds no GPU" };
  if (/couldn't communicate with the NVIDIA driver/i.test(output) || code === 9)
    return { code: "nvidia-driver-missing", text: "the NVIDIA driver is not loaded: load or install it" };
  if (code === 15) return { code: "gpu-lost", text: "a GPU is lost: reset or power-cycle the machine" };
  if (code === 16) return { code: "gpu-reset", text: "a GPU needs a reset: nvidia-smi --gpu-reset" };
  // 14: a corrupt info ROM is only a warning, the GPU is still listed.
  if (code === 0 || code === 14) return null;
  const said = output.trim().split("\n")[0]?.slice(0, 200);
  return { code: "nvidia-smi-failed", text: `nvidia-smi ended with code ${code}${said ? `: ${said}` : ""}` };
}
