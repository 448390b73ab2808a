import { lookup } from "node:dns/promises";
import { dirname } from "node:path";
import { parseCpuinfo, parseMeminfo } from "../hardware/cpu.ts";
import { FIRST_LEASED_PORT, LAST_LEASED_PORT } from "../protocol/ids.ts";
import { DOCTOR_TOOL_MS } from "../protocol/limits.ts";
import { fail, pass, unknown, warn } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import type { Machine } from "./machine.ts";

const GIB = 1024 ** 3;
const gib = (bytes: number) => `${(bytes / GIB).toFixed(1)} GiB`;

async function cpu(machine: Machine): Promise<Finding> {
  const text = await machine.text("proc/cpuinfo");
  if (text === null) return unknown("cannot be read", "/proc/cpuinfo");
  const { model, features } = parseCpuinfo(text);
  if (features.includes("asimd")) return pass(`${model}: ${features.join(" ")}`, "/proc/cpuinfo");
  const missing = ["avx", "avx2", "fma"].filter((feature) => !features.includes(feature));
  if (missing.length === 0) return pass(`${model}: ${features.join(" ")}`, "/proc/cpuinfo");
  const cost = "llama.cpp on the CPU is several times slower, and prebuilt engines may die of an illegal instruction";
  const remedy = "in a virtual machine set its CPU type to host (Proxmox: qm set ID --cpu host), then power it off and on";
  return warn(`${model} has no ${missing.join(", ")}: ${cost}`, "/proc/cpuinfo", remedy);
}

async function memory(machine: Machine): Promise<Finding> {
  const text = await machine.text("proc/meminfo");
  if (text === null) return unknown("cannot be read", "/proc/meminfo");
  const { total, available } = parseMeminfo(text);
  const nodes = (await machine.list("sys/devices/system/node")).filter((name) => /^node\d+$/.test(name)).length || 1;
  const pages = Number(/^HugePages_Total:\s+(\d+)/m.exec(text)?.[1] ?? 0);
  const size = Number(/^Hugepagesize:\s+(\d+) kB/m.exec(text)?.[1] ?? 0) * 1024;
  const words = [`${gib(available)} of ${gib(total)} free`, `${nodes} NUMA node${nodes === 1 ? "" : "s"}`];
  const reserved = pages * size;
  if (reserved > 0) words.push(`${gib(reserved)} in huge pages`);
  if (reserved > total / 2) {
    const remedy = "lower vm.nr_hugepages: engines do not use reserved huge pages";
    return warn(`${words.join(", ")}: half of the memory is set aside`, "/proc/meminfo", remedy);
  }
  return pass(words.join(", "), "/proc/meminfo");
}

async function disk(machine: Machine): Promise<Finding> {
  // Before the agent first ran, its folder is not there: it will be made in the nearest one that is.
  let path = machine.options.state;
  while ((await machine.space(path)) === null && path !== dirname(path)) path = dirname(path);
  const space = await machine.space(path);
  if (space === null) return unknown("cannot be read", `statfs ${path}`);
  const found = `${gib(space.free)} of ${gib(space.total)} free under ${path}`;
  if (space.free < 2 * GIB) return fail(found, `statfs ${path}`, "free some space, or move `state` to a larger disk");
  if (space.free < 40 * GIB)
    return warn(`${found}: few models fit`, `statfs ${path}`, "weights and engines take tens of GiB: use a larger disk for `state`");
  return pass(found, `statfs ${path}`);
}

async function shm(machine: Machine): Promise<Finding> {
  const space = await machine.space("/dev/shm");
  const remedy = "mount -o remount,size=50% /dev/shm, and set it in /etc/fstab";
  if (space === null)
    return fail("there is no /dev/shm: engines of several processes cannot start", "statfs /dev/shm", "mount -t tmpfs tmpfs /dev/shm");
  const found = `${gib(space.free)} of ${gib(space.total)} free`;
  return space.total < GIB ? warn(`${found}: vLLM and NCCL need more`, "statfs /dev/shm", remedy) : pass(found, "statfs /dev/shm");
}

async function files(machine: Machine): Promise<Finding> {
  const source = "/proc/self/limits";
  const soft = /^Max open files\s+(\d+|unlimited)\s+(\d+|unlimited)/m.exec((await machine.text(source)) ?? "");
  if (!soft) return unknown("cannot be read", source);
  const hard = soft[2] === "unlimited" ? Infinity : Number(soft[2]);
  const found = `${soft[1]} open files, ${soft[2]} at most`;
  return hard < 65_536 ? warn(found, source, "LimitNOFILE=1048576 in the unit, or /etc/security/limits.conf") : pass(found, source);
}

async function ephemeral(machine: Machine): Promise<Finding> {
  const source = "/proc/sys/net/ipv4/ip_local_port_range";
  const [first = Number.NaN, last = Number.NaN] = ((await machine.text(source)) ?? "").split(/\s+/).map(Number);
  if (Number.isNaN(first + last) || last === 0) return unknown("cannot be read", source);
  const found = `the kernel takes ports ${first}-${last}, llmgw leases ${FIRST_LEASED_PORT}-${LAST_LEASED_PORT}`;
  if (first > LAST_LEASED_PORT || last < FIRST_LEASED_PORT) return pass(found, source);
  const reserved = (await machine.text("/proc/sys/net/ipv4/ip_local_reserved_ports")) ?? "";
  if (reserved.split(",").includes(`${FIRST_LEASED_PORT}-${LAST_LEASED_PORT}`)) return pass(`${found}, which are reserved`, source);
  return warn(`${found}: they overlap`, source, `sysctl net.ipv4.ip_local_reserved_ports=${FIRST_LEASED_PORT}-${LAST_LEASED_PORT}`);
}

async function names(machine: Machine): Promise<Finding> {
  const name = (await machine.text("/proc/sys/kernel/hostname")) ?? "";
  const source = `getaddrinfo ${name}`;
  const remedy = `put the node's own address beside ${name} into /etc/hosts or DNS`;
  try {
    const found = await lookup(name, { all: true });
    const addresses = found.map((each) => each.address);
    const outside = addresses.filter((address) => !/^(127\.|::1$)/.test(address));
    if (outside.length > 0) return pass(`${name} is ${outside.join(", ")}`, source);
    return warn(`${name} is ${addresses.join(", ")}: Gloo would offer that to the other ranks`, source, remedy);
  } catch {
    return warn(`${name} does not resolve`, source, remedy);
  }
}

async function glibc(machine: Machine): Promise<Finding> {
  const answer = await machine.run(["getconf", "GNU_LIBC_VERSION"], DOCTOR_TOOL_MS);
  const version = "code" in answer ? /glibc (\d+)\.(\d+)/.exec(answer.out) : null;
  if (!version)
    return unknown("cannot be told: no glibc?", "getconf GNU_LIBC_VERSION", "llmgw and the engines need glibc; Alpine (musl) does not do");
  const minor = Number(version[1]) * 1_000 + Number(version[2]);
  const found = `glibc ${version[1]}.${version[2]}`;
  const remedy = "use a distribution of 2021 or later";
  if (minor < 2_017) return fail(`${found}: llmgw needs 2.17`, "getconf GNU_LIBC_VERSION", remedy);
  return minor < 2_031
    ? warn(`${found}: prebuilt vLLM needs 2.31`, "getconf GNU_LIBC_VERSION", remedy)
    : pass(found, "getconf GNU_LIBC_VERSION");
}

async function rights(machine: Machine): Promise<Finding> {
  if (machine.is_root) return pass("root: everything can be seen", "geteuid");
  const hidden = "subnet managers (/dev/infiniband/umad*), PCI product data, bridge settings and the kernel's log may be out of sight";
  return unknown(`an ordinary user: ${hidden}`, "geteuid", "run llmgw doctor as root to see them");
}

async function leaks(machine: Machine): Promise<Finding> {
  const found: string[] = [];
  for (const path of ["/etc/nccl.conf", "/root/.nccl.conf"]) {
    const lines = ((await machine.text(path)) ?? "").split("\n").filter((line) => /^\s*(NCCL|UCX)_\w+\s*=/.test(line));
    if (lines.length > 0) found.push(`${path} sets ${lines.map((line) => line.trim()).join(", ")}`);
  }
  const own = Object.keys(process.env).filter((name) => /^(NCCL|UCX|NVSHMEM|GLOO)_/.test(name));
  if (own.length > 0) found.push(`the environment sets ${own.join(", ")}`);
  const source = "/etc/nccl.conf, environment";
  if (found.length === 0) return pass("no NCCL or UCX setting for the whole machine", source);
  return warn(found.join("; "), source, "remove them: llmgw sets what each rank needs, and these go over it");
}

export const HOST_CHECKS: readonly Check[] = [
  {
    id: "host.cpu",
    title: "CPU features",
    why: "Without AVX, AVX2 and FMA llama.cpp on the CPU is several times slower and prebuilt engines may not start.",
    remedy: "Set the virtual machine's CPU type to `host`.",
    run: cpu,
  },
  {
    id: "host.memory",
    title: "memory, NUMA, huge pages",
    why: "Memory set aside for huge pages is lost to the engines.",
    remedy: "Lower `vm.nr_hugepages`.",
    run: memory,
  },
  {
    id: "host.disk",
    title: "free disk",
    why: "Weights and engines take tens of GiB.",
    remedy: "Move `state` to a larger disk.",
    run: disk,
  },
  {
    id: "host.shm",
    title: "shared memory",
    why: "Processes of one engine talk through `/dev/shm`.",
    remedy: "Remount it larger.",
    run: shm,
  },
  {
    id: "host.files",
    title: "limit of open files",
    why: "Each request takes a file; engines open thousands.",
    remedy: "`LimitNOFILE=` in the unit.",
    run: files,
  },
  {
    id: "host.ports",
    title: "ports for ranks",
    why: "A port the kernel gives to an outgoing connection cannot be leased to a rank.",
    remedy: "Reserve 20000-29999 with `net.ipv4.ip_local_reserved_ports`.",
    run: ephemeral,
  },
  {
    id: "host.names",
    title: "own name resolves",
    why: "Gloo takes the address of the host's name; a loopback one makes ranks on other nodes wait for ever.",
    remedy: "Put the node's address into `/etc/hosts` or DNS.",
    run: names,
  },
  {
    id: "host.glibc",
    title: "C library",
    why: "llmgw needs glibc 2.17, prebuilt engines newer ones.",
    remedy: "Use a newer distribution.",
    run: glibc,
  },
  {
    id: "host.rights",
    title: "what can be seen",
    why: "Some facts are root's alone.",
    remedy: "Run as root.",
    run: rights,
  },
  {
    id: "host.env",
    title: "settings that leak into engines",
    why: "A global NCCL setting goes over what llmgw gives each rank, and the ranks then use the wrong adapters.",
    remedy: "Remove it from `/etc/nccl.conf` and the environment.",
    run: leaks,
  },
];
