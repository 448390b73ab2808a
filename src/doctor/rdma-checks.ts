import { REAL_IB_ROOT } from "../hardware/infiniband.ts";
import { fail, pass, skipped, unknown, warn } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import type { Machine } from "./machine.ts";

const NONE = "no GPU and InfiniBand adapter together here";

/** GPUDirect RDMA has a meaning where a machine has both. */
function withBoth(judge: (machine: Machine) => Promise<Finding>): Check["run"] {
  return async (machine) => {
    const [ports, smi] = await Promise.all([machine.watched(), machine.smi()]);
    return ports.length > 0 && smi.graphics.gpus.length > 0 ? judge(machine) : skipped(NONE);
  };
}

const PEER_MODULES = [
  "/sys/module/nvidia_peermem/version",
  "/sys/kernel/mm/memory_peers/nv_mem/version",
  "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
];

async function path(machine: Machine): Promise<Finding> {
  for (const file of PEER_MODULES) if (await machine.exists(file)) return pass("nvidia-peermem", file);
  const source = "/proc/driver/nvidia/version, kernel";
  const driver = (await machine.text("/proc/driver/nvidia/version")) ?? "";
  const [major = 0, minor = 0] = ((await machine.text("/proc/sys/kernel/osrelease")) ?? "").split(".").map(Number);
  const isNewEnough = major > 5 || (major === 5 && minor >= 12);
  const remedy = "load nvidia-peermem, or use the open kernel driver on Linux 5.12 or newer";
  if (driver === "") return unknown("the driver does not tell what it is", source, remedy);
  if (/Open Kernel Module/i.test(driver) && isNewEnough) return pass(`dma-buf (open driver, kernel ${major}.${minor})`, source);
  return fail("neither nvidia-peermem nor dma-buf: NCCL goes through host memory", source, remedy);
}

async function iommu(machine: Machine): Promise<Finding> {
  const groups = await machine.list("/sys/kernel/iommu_groups");
  const source = "/sys/kernel/iommu_groups/*/type";
  if (groups.length === 0) return pass("no IOMMU in use", source);
  const kinds = new Set(await Promise.all(groups.slice(0, 64).map((group) => machine.text(`/sys/kernel/iommu_groups/${group}/type`))));
  if ([...kinds].every((kind) => kind === "identity" || kind === null)) return pass("passes through", source);
  return warn(
    `translates (${[...kinds].join(", ")}): GPU and adapter talk slowly or not at all`,
    source,
    "boot with iommu=pt (on bare metal)",
  );
}

const memlock = async (machine: Machine): Promise<Finding> => {
  if ((await machine.watched()).length === 0) return skipped("no InfiniBand adapter here");
  const source = "/proc/self/limits";
  const found = /^Max locked memory\s+(\d+|unlimited)\s+(\d+|unlimited)/m.exec((await machine.text(source)) ?? "");
  if (!found) return unknown("cannot be read", source);
  if (found[1] === "unlimited" || found[2] === "unlimited") return pass("unlimited", source);
  // Engines inherit the agent's limit, not that of the shell doctor was called from.
  return warn(
    `${Math.round(Number(found[2]) / 1024)} KiB of locked memory here: with as little in the agent, RDMA cannot register buffers`,
    source,
    "LimitMEMLOCK=infinity in llmgw-agent.service",
  );
};

const devices = async (machine: Machine): Promise<Finding> => {
  if (machine.options.ib_root !== REAL_IB_ROOT) return skipped("--ib-root is not the kernel's");
  if ((await machine.watched()).length === 0) return skipped("no InfiniBand adapter here");
  const files = await machine.list("/dev/infiniband");
  const verbs = files.filter((name) => name.startsWith("uverbs"));
  const wanted = [...verbs.map((name) => `/dev/infiniband/${name}`), "/dev/infiniband/rdma_cm"];
  const usable = await Promise.all(wanted.map((file) => machine.usable(file)));
  const closed = wanted.filter((_, at) => !usable[at]);
  if (verbs.length === 0)
    return fail("there is no uverbs device: user programs cannot use RDMA", "/dev/infiniband", "modprobe ib_uverbs rdma_ucm");
  return closed.length > 0
    ? fail(`not accessible: ${closed.join(", ")}`, "/dev/infiniband", "install rdma-core's udev rules (mode 0666)")
    : pass(wanted.join(", "), "/dev/infiniband");
};

const row = (id: string, title: string, why: string, remedy: string, run: Check["run"]): Check => ({ id, title, why, remedy, run });

export const RDMA_CHECKS: readonly Check[] = [
  row(
    "gdr.path",
    "GPUDirect RDMA",
    "Without it data between GPUs of two nodes goes through host memory.",
    "Load nvidia-peermem, or use the open driver.",
    withBoth(path),
  ),
  row("gdr.iommu", "IOMMU", "A translating IOMMU slows GPU and adapter, or stops them.", "Boot with `iommu=pt`.", withBoth(iommu)),
  row("gdr.memlock", "locked memory", "RDMA registers locked memory.", "`LimitMEMLOCK=infinity`.", memlock),
  row("gdr.devices", "RDMA device files", "Engines run as a user of their own and need them.", "Install rdma-core's udev rules.", devices),
];
