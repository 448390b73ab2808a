import type { Gpu } from "../protocol/inventory.ts";

/** What is asked of nvidia-smi, in this order. All of it has been there since driver 470. */
export const QUERY = ["index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_cap", "pci.bus_id"] as const;

export const QUERY_ARGS: readonly string[] = [`--query-gpu=${QUERY.join(",")}`, "--format=csv,noheader,nounits"];

const MIB = 1_048_576;

type Reading<T> = { value: T } | { absent: string };

/** Cells like `[N/A]`, `[Not Supported]`, `[Unknown Error]`, `N/A`: a reading that is not there, and why. */
function cellOf(cell: string): Reading<string> {
  const bracketed = /^\[(.*)\]$/.exec(cell)?.[1] ?? (cell === "N/A" || cell === "" ? "N/A" : null);
  return bracketed === null ? { value: cell } : { absent: `nvidia-smi says ${bracketed}` };
}

function bytesOf(cell: string): Reading<number> {
  const read = cellOf(cell);
  if ("absent" in read) return read;
  const mib = Number(read.value);
  return Number.isFinite(mib) && mib >= 0 ? { value: Math.round(mib * MIB) } : { absent: `nvidia-smi says "${cell}"` };
}

/** The GPUs in nvidia-smi's CSV, and the lines that are none. */
export function parseGpus(output: string): { gpus: Gpu[]; other: string[] } {
  const gpus: Gpu[] = [];
  const other: string[] = [];
  for (const line of output.split("\n").map((text) => text.trim())) {
    if (line === "") continue;
    const cells = line.split(",").map((cell) => cell.trim());
    const [index = "", uuid = "", name = "", total = "", used = "", driver = "", capability = "", bus = ""] = cells;
    if (cells.length !== QUERY.length || !/^\d+$/.test(index) || !/^(GPU|MIG)-/.test(uuid)) {
      other.push(line);
      continue;
    }
    gpus.push({
      index: Number(index),
      uuid,
      name,
      memory_total: bytesOf(total),
      memory_used: bytesOf(used),
      driver: cellOf(driver),
      compute_capability: cellOf(capability),
      pci_bus_id: cellOf(bus),
    });
  }
  return { gpus, other };
}
