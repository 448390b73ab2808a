import { missingFrom } from "../hardware/gpus.ts";
import type { Row } from "../hardware/nvidia-smi.ts";
import type { Gpu } from "../protocol/inventory.ts";
import { DOCTOR_TOOL_MS } from "../protocol/limits.ts";
import { fail, pass, skipped, unknown, warn } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import type { Machine, Smi } from "./machine.ts";

const NO_GPU = "no NVIDIA GPU here";
const PCI = "/sys/bus/pci/devices";

/** A check that has a meaning only where nvidia-smi lists GPUs. */
function withGpus(judge: (smi: Smi, gpus: readonly Gpu[], machine: Machine) => Promise<Finding> | Finding): Check["run"] {
  return async (machine) => {
    const smi = await machine.smi();
    const gpus = [...smi.graphics.gpus, ...smi.graphics.unusable.map((each) => each.gpu)];
    if (gpus.length > 0) return judge(smi, gpus, machine);
    return (await machine.gpusOnPci()).length === 0 && smi.path === null ? skipped(NO_GPU) : skipped("nvidia-smi lists no GPU");
  };
}

/** The value of a cell, or null when it has none. */
export function cell(row: Row | undefined, field: string): string | null {
  const found = row?.[field];
  return found && "value" in found ? found.value : null;
}

const SMI_FAULTS: Readonly<Record<string, string>> = {
  "nvidia-smi-missing": "install the NVIDIA driver, or name the program with --nvidia-smi",
  "nvidia-smi-failed": "look at dmesg for Xid and NVRM; reload the driver or reboot",
  "nvidia-driver-mismatch": "reboot, or unload and load the nvidia modules",
  "nvidia-driver-missing": "modprobe nvidia; else install the driver for this kernel",
  "gpu-lost": "look at dmesg for Xid 79; reset or power-cycle, and have it replaced when it comes again",
  "gpu-reset": "nvidia-smi --gpu-reset",
  "gpu-none": "modprobe nvidia; look at dmesg",
};

async function smiRuns(machine: Machine): Promise<Finding> {
  const [{ path, graphics, took_ms }, pci] = await Promise.all([machine.smi(), machine.gpusOnPci()]);
  if (path === null && pci.length === 0) return skipped(NO_GPU);
  const fault = graphics.warnings.find((warning) => warning.code in SMI_FAULTS);
  const source = path ?? PCI;
  if (fault) {
    // No devices, where PCI has none either, is a machine without GPUs.
    if (fault.code === "gpu-none" && pci.length === 0) return skipped(NO_GPU);
    return fail(fault.text, source, SMI_FAULTS[fault.code]);
  }
  const gpus = [...graphics.gpus, ...graphics.unusable.map((each) => each.gpu)];
  const [first] = gpus;
  const driver = first && "value" in first.driver ? first.driver.value : "unknown";
  const odd = graphics.warnings.filter((warning) => warning.code === "nvidia-smi-line");
  const found = `${gpus.length} GPU${gpus.length === 1 ? "" : "s"}, driver ${driver}, answered in ${(took_ms / 1_000).toFixed(1)} s`;
  if (gpus.length === 0) return fail(`it lists no GPU${odd[0] ? `: ${odd[0].text}` : ""}`, source, "see what it prints");
  return odd[0] ? warn(`${found}; ${odd[0].text}`, source, "see what it prints") : pass(found, source);
}

async function count(machine: Machine): Promise<Finding> {
  const [smi, pci] = await Promise.all([machine.smi(), machine.gpusOnPci()]);
  const gpus = [...smi.graphics.gpus, ...smi.graphics.unusable.map((each) => each.gpu)];
  const source = `${PCI}, ${smi.path ?? "no nvidia-smi"}`;
  if (pci.length === 0)
    return gpus.length === 0 ? skipped(NO_GPU) : unknown("PCI shows no NVIDIA GPU: a container or an integrated part", source);
  const missing = missingFrom(pci, gpus);
  if (missing.length === 0) return pass(`PCI and nvidia-smi agree on ${gpus.length}`, source);
  const found = `PCI shows ${pci.length} GPUs, nvidia-smi lists ${gpus.length} (missing ${missing.join(", ")})`;
  return fail(found, source, "reset or power-cycle the machine; have the GPU replaced when it comes again");
}

function uniform({ path }: Smi, gpus: readonly Gpu[]): Finding {
  const key = (gpu: Gpu) => `${gpu.name}, ${"value" in gpu.memory_total ? Math.round(gpu.memory_total.value / 1024 ** 3) : "?"} GiB`;
  const kinds = Map.groupBy(gpus, key);
  const words = [...kinds].map(([kind, same]) => `${same.length} × ${kind}`).join(", ");
  return kinds.size === 1
    ? pass(words, path ?? "")
    : warn(words, path ?? "", "a model that takes several GPUs gets the slowest of them: replace the odd ones");
}

function memory({ path, graphics }: Smi, gpus: readonly Gpu[]): Finding {
  const unified = graphics.warnings.filter((warning) => warning.code === "gpu-unified-memory");
  if (unified.length > 0) return warn(unified.map((warning) => warning.text).join("; "), path ?? "", "leave room for the system in `args`");
  const silent = gpus.filter((gpu) => "absent" in gpu.memory_total);
  if (silent.length === 0) return pass("every GPU tells its memory", path ?? "");
  return fail(`GPU ${silent.map((gpu) => gpu.index).join(", ")} does not tell its memory`, path ?? "", "reset it; look at dmesg");
}

function offered({ path, graphics }: Smi): Finding {
  const { unusable } = graphics;
  if (unusable.length === 0) return pass("every GPU is whole and answers", path ?? "");
  const words = unusable.map(({ gpu, why }) => `GPU ${gpu.index} is not offered: ${why}`).join("; ");
  const mig = unusable.every(({ why }) => why.includes("MIG"));
  const remedy = mig ? `nvidia-smi -i ${unusable.map(({ gpu }) => gpu.index).join(",")} -mig 0` : "reset or power-cycle the machine";
  return mig ? warn(words, path ?? "", remedy) : fail(words, path ?? "", remedy);
}

function used({ path }: Smi, gpus: readonly Gpu[]): Finding {
  const busy = gpus.filter((gpu) => "value" in gpu.memory_used && gpu.memory_used.value > 1024 ** 3);
  if (busy.length === 0) return pass("no GPU holds more than 1 GiB", path ?? "");
  const words = busy.map(
    (gpu) => `GPU ${gpu.index} holds ${"value" in gpu.memory_used ? Math.round(gpu.memory_used.value / 1024 ** 3) : 0} GiB`,
  );
  return warn(words.join(", "), path ?? "", "before it joins: stop what runs there (nvidia-smi pmon); after: these are its replicas");
}

function ecc({ path, rows }: Smi): Finding {
  if (rows.health.size === 0) return unknown("nvidia-smi does not tell", path ?? "");
  const ill: string[] = [];
  const soon: string[] = [];
  for (const [index, row] of rows.health) {
    const errors = Number(cell(row, "ecc.errors.uncorrected.volatile.total") ?? 0);
    if (errors > 0) ill.push(`GPU ${index}: ${errors} uncorrected errors since boot`);
    if (/^(yes|1)$/i.test(cell(row, "remapped_rows.failure") ?? "")) ill.push(`GPU ${index}: remapping of rows failed`);
    if (/^(yes|1)$/i.test(cell(row, "remapped_rows.pending") ?? "")) soon.push(`GPU ${index}: a row is to be remapped at the next reset`);
  }
  if (ill.length > 0) return fail(ill.join("; "), path ?? "", "reset the GPU; when it stays, have it replaced");
  return soon.length > 0
    ? warn(soon.join("; "), path ?? "", "nvidia-smi --gpu-reset")
    : pass("no uncorrected error, no remapping to come", path ?? "");
}

function persistence({ path, rows, took_ms }: Smi): Finding {
  const states = [...rows.more].map(([index, row]) => [index, cell(row, "persistence_mode")] as const);
  if (states.every(([, state]) => state === null)) return unknown("nvidia-smi does not tell", path ?? "");
  const off = states.filter(([, state]) => /disabled/i.test(state ?? ""));
  if (off.length === 0) return pass("on", path ?? "");
  const found = `off on GPU ${off.map(([index]) => index).join(", ")}: each question wakes the GPUs (${(took_ms / 1_000).toFixed(1)} s)`;
  return warn(found, path ?? "", "systemctl enable --now nvidia-persistenced");
}

function pcie({ path, rows }: Smi): Finding {
  if (rows.health.size === 0) return unknown("nvidia-smi does not tell", path ?? "");
  const narrow = [...rows.health].flatMap(([index, row]) => {
    const now = Number(cell(row, "pcie.link.width.current"));
    const most = Number(cell(row, "pcie.link.width.max"));
    return now > 0 && most > now ? [`GPU ${index} at x${now}, x${most} at most`] : [];
  });
  return narrow.length === 0
    ? pass("full width", path ?? "")
    : warn(narrow.join(", "), path ?? "", "reseat the card; look at the riser and the BIOS");
}

/** Xids after which a GPU is not to be trusted: memory, bus, firmware and NVLink faults. */
const GRAVE_XIDS = new Set([48, 63, 64, 74, 79, 94, 95, 119, 120, 140, 145]);

async function xid(_smi: Smi, _gpus: readonly Gpu[], machine: Machine): Promise<Finding> {
  const answer = await machine.run(["dmesg"], DOCTOR_TOOL_MS);
  if (!("code" in answer) || answer.code !== 0) return unknown("the kernel's log cannot be read", "dmesg", "run as root");
  const found = [...answer.out.matchAll(/NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)/g)].map(([, bus, number]) => ({
    bus,
    number: Number(number),
  }));
  const words = [...new Set(found.map(({ bus, number }) => `Xid ${number} on ${bus}`))].join(", ");
  if (found.length === 0) return pass("no Xid since boot", "dmesg");
  if (!found.some(({ number }) => GRAVE_XIDS.has(number))) return warn(words, "dmesg", "look it up in NVIDIA's Xid catalog");
  return fail(words, "dmesg", "drain the node; reset or power-cycle; look it up in NVIDIA's Xid catalog");
}

async function nodes(_smi: Smi, gpus: readonly Gpu[], machine: Machine): Promise<Finding> {
  if ((await machine.gpusOnPci()).length === 0) return skipped("PCI shows no NVIDIA GPU");
  const wanted = ["/dev/nvidiactl", "/dev/nvidia-uvm"];
  const there = await Promise.all(wanted.map((path) => machine.exists(path)));
  const missing = wanted.filter((_, at) => !there[at]);
  const devices = (await machine.list("/dev")).filter((name) => /^nvidia\d+$/.test(name)).length;
  if (missing.length > 0) return fail(`${missing.join(", ")} missing: CUDA will not start`, "/dev", "nvidia-modprobe -u -c0");
  return devices < gpus.length
    ? fail(`${devices} device files for ${gpus.length} GPUs`, "/dev", "nvidia-modprobe -c0")
    : pass(`${devices} devices, uvm`, "/dev");
}

async function nouveau(machine: Machine): Promise<Finding> {
  if ((await machine.gpusOnPci()).length === 0) return skipped(NO_GPU);
  const loaded = /^nouveau /m.test((await machine.text("proc/modules")) ?? "");
  if (!loaded) return pass("not loaded", "/proc/modules");
  return fail("nouveau is loaded and keeps the NVIDIA driver out", "/proc/modules", "blacklist nouveau, rebuild the initramfs, reboot");
}

const row = (id: string, title: string, why: string, remedy: string, run: Check["run"]): Check => ({ id, title, why, remedy, run });

export const GPU_CHECKS: readonly Check[] = [
  row(
    "gpu.smi",
    "nvidia-smi answers",
    "All llmgw knows of GPUs comes from it.",
    "Install or reload the driver; reboot when it hangs.",
    smiRuns,
  ),
  row(
    "gpu.count",
    "GPUs on PCI and in nvidia-smi",
    "A GPU that fell off the bus is still on PCI.",
    "Reset or power-cycle the machine.",
    count,
  ),
  row(
    "gpu.uniform",
    "GPUs are alike",
    "A model spread over unlike GPUs runs at the pace of the slowest.",
    "Replace the odd ones.",
    withGpus(uniform),
  ),
  row("gpu.memory", "GPU memory is known", "Nothing is placed on a GPU of unknown memory.", "Reset the GPU.", withGpus(memory)),
  row(
    "gpu.whole",
    "GPUs are whole",
    "A GPU in MIG mode, lost or waiting for a reset is not offered.",
    "`nvidia-smi -i N -mig 0`, or a reset.",
    withGpus(offered),
  ),
  row("gpu.used", "GPUs are free", "Memory others hold is not there for models.", "Stop what holds it.", withGpus(used)),
  row(
    "gpu.ecc",
    "GPU memory errors",
    "Uncorrected errors end engines and spoil answers.",
    "Reset the GPU; replace it when they come again.",
    withGpus(ecc),
  ),
  row(
    "gpu.persist",
    "persistence mode",
    "Without it each question wakes every GPU.",
    "Enable `nvidia-persistenced`.",
    withGpus(persistence),
  ),
  row("gpu.pcie", "PCIe width", "A GPU at half width loads and talks at half speed.", "Reseat the card.", withGpus(pcie)),
  row(
    "gpu.xid",
    "driver faults since boot",
    "The driver reports failing GPUs as Xid in the kernel's log.",
    "Look the number up; reset or replace.",
    withGpus(xid),
  ),
  row(
    "gpu.nodes",
    "device files",
    "CUDA needs `/dev/nvidia-uvm`, which nvidia-smi does not.",
    "`nvidia-modprobe -u -c0`.",
    withGpus(nodes),
  ),
  row("gpu.nouveau", "no nouveau", "It keeps the NVIDIA driver from the GPUs.", "Blacklist it.", nouveau),
];
