// What doctor says of machines: bare ones, healthy ones, and each way of being ill that it knows.
import { afterAll, describe, expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import * as v from "valibot";
import { pass } from "../../../src/doctor/check.ts";
import { CHECKS } from "../../../src/doctor/checks.ts";
import { exitOf, runDoctor } from "../../../src/doctor/doctor.ts";
import type { DoctorOptions } from "../../../src/doctor/machine.ts";
import { parseFabric } from "../../../src/hardware/fabric-declaration.ts";
import type { RunTool, ToolAnswer } from "../../../src/hardware/tool.ts";
import { DoctorReport } from "../../../src/protocol/doctor.ts";
import type { Verdict } from "../../../src/protocol/doctor.ts";
import { ibTree } from "../../fixtures/hardware/ib-tree.ts";
import type { DeviceSpec } from "../../fixtures/hardware/ib-tree.ts";

const folders: (() => Promise<void>)[] = [];
afterAll(async () => {
  for (const remove of folders) await remove();
});

type Files = Readonly<Record<string, string>>;
type Tools = Readonly<Record<string, string | ToolAnswer>>;

const LIMITS = [
  "Max open files            1048576              1048576              files",
  "Max locked memory         unlimited            unlimited            bytes",
  "",
].join("\n");
const BARE: Files = {
  "proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: sse4_2 avx avx2 fma\n",
  "proc/meminfo": "MemTotal:       67108864 kB\nMemAvailable:   66000000 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n",
  "proc/self/limits": LIMITS,
  "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
  "proc/sys/kernel/hostname": "localhost\n",
  "proc/sys/kernel/osrelease": "6.8.0\n",
};

async function tree(files: Files): Promise<string> {
  const root = await mkdtemp(join(tmpdir(), "llmgw-doctor-"));
  folders.push(() => rm(root, { recursive: true }));
  for (const [name, text] of Object.entries(files)) {
    await mkdir(join(root, dirname(name)), { recursive: true });
    await writeFile(join(root, name), text);
  }
  return root;
}

const missing: ToolAnswer = { failed: "missing", why: "it is not there" };

/** The longest key that the command line begins with answers. */
function toolsOf(tools: Tools): RunTool {
  return async (argv) => {
    const line = argv.join(" ");
    const key = Object.keys(tools)
      .filter((each) => line.startsWith(each) || line.includes(` ${each}`))
      .toSorted((a, b) => b.length - a.length)[0];
    const answer = key === undefined ? missing : tools[key];
    return typeof answer === "object" ? answer : { code: 0, out: answer ?? "", err: "" };
  };
}

interface Scene {
  readonly files?: Files;
  readonly tools?: Tools;
  readonly ib?: readonly DeviceSpec[];
  readonly fabrics?: readonly string[];
  readonly gpus?: boolean;
  readonly is_root?: boolean;
  readonly state?: string;
}

async function examine(scene: Scene): Promise<Map<string, DoctorReport["checks"][number]>> {
  const ib = await ibTree(scene.ib ?? []);
  folders.push(ib.remove);
  const root = await tree({ ...BARE, ...scene.files });
  const options: DoctorOptions = {
    ...(scene.gpus && { nvidia_smi: "/fake/nvidia-smi" }),
    ib_root: ib.root,
    fabrics: (scene.fabrics ?? []).map(parseFabric),
    server: null,
    state: scene.state ?? "/",
    tls: { ca: "/nowhere/ca.crt", cert: "/nowhere/node.crt", key: "/nowhere/node.key" },
    node: "n1",
    note: () => undefined,
    root,
    run: toolsOf(scene.tools ?? {}),
    is_root: scene.is_root ?? true,
    manager_wait_ms: 0,
  };
  const report = await runDoctor(options);
  expect(v.is(DoctorReport, report)).toBe(true);
  return new Map(report.checks.map((check) => [check.id, check]));
}

const manager = (...guids: string[]) =>
  guids
    .map(
      (guid, at) =>
        `SMInfoRecord dump:\n\t\tLID..........1\n\t\tGUID..........${guid}\n\t\tPriority......5\n\t\tSMState.......${at === 0 ? 3 : 2}\n`,
    )
    .join("");
const silent: ToolAnswer = { code: 110, out: "", err: "Query SA failed: Connection timed out" };
const A = manager("0xa1", "0xa2");
const B = manager("0xb1", "0xb2");
const pair: DeviceSpec[] = [{ name: "mlx5_2" }, { name: "mlx5_3" }];
const port = (more: object): DeviceSpec[] => pair.map((device) => ({ ...device, ports: [more] }));

const GPU = (index: number, more: { mig?: string; used?: string } = {}) =>
  `${index}, GPU-${index}, 00000000:${10 + index}:00.0, NVIDIA H100, 580.95, 81559, ${more.used ?? "4"}, ${more.mig ?? "Disabled"}`;
const PCI_GPU = (index: number): Files => ({
  [`sys/bus/pci/devices/0000:${10 + index}:00.0/vendor`]: "0x10de\n",
  [`sys/bus/pci/devices/0000:${10 + index}:00.0/class`]: "0x030200\n",
});
const SMI: Tools = {
  "--query-gpu=index,uuid": `${GPU(0)}\n${GPU(1)}`,
  "--query-gpu=index,compute_cap": "0, 9.0, Enabled, 30\n1, 9.0, Enabled, 30",
  "--query-gpu=index,ecc": "0, Enabled, 0, No, No, 5, 5, 16, 16\n1, Enabled, 0, No, No, 5, 5, 16, 16",
  "--query-gpu=index,fabric": "0, [N/A], [N/A], [N/A], [N/A]\n1, [N/A], [N/A], [N/A], [N/A]",
  dmesg: "",
};
const TWO_GPUS: Scene = {
  gpus: true,
  tools: SMI,
  files: { ...PCI_GPU(0), ...PCI_GPU(1), "dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "" },
};
const gpus = (tools: Tools, files: Files = {}): Scene => ({
  ...TWO_GPUS,
  tools: { ...SMI, ...tools },
  files: { ...TWO_GPUS.files, ...files },
});
const SWITCH: Files = { "sys/bus/pci/devices/0000:05:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:05:00.0/class": "0x068000\n" };

type Case = [name: string, scene: Scene, check: string, verdict: Verdict, found?: RegExp];
const fabric = (mlx5_2: string | ToolAnswer, mlx5_3: string | ToolAnswer = mlx5_2): Tools => ({
  "saquery -C mlx5_2": mlx5_2,
  "saquery -C mlx5_3": mlx5_3,
});
const CASES: Case[] = [
  ["CPU whole", {}, "host.cpu", "pass"],
  [
    "CPU of type kvm64",
    { files: { "proc/cpuinfo": "model name: Common KVM processor\nflags: sse4_2\n" } },
    "host.cpu",
    "warn",
    /no avx, avx2, fma/,
  ],
  [
    "half of the memory in huge pages",
    { files: { "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\nHugePages_Total: 400\nHugepagesize: 2048 kB\n" } },
    "host.memory",
    "warn",
  ],
  ["few open files", { files: { "proc/self/limits": "Max open files  1024  4096  files\n" } }, "host.files", "warn", /4096/],
  ["ephemeral ports overlap", { files: { "proc/sys/net/ipv4/ip_local_port_range": "10000 60999" } }, "host.ports", "warn", /overlap/],
  [
    "overlap, but reserved",
    { files: { "proc/sys/net/ipv4/ip_local_port_range": "10000 60999", "proc/sys/net/ipv4/ip_local_reserved_ports": "20000-29999\n" } },
    "host.ports",
    "pass",
  ],
  ["name on loopback", {}, "host.names", "warn", /127\.0\.0\.1|::1/],
  ["old C library", { tools: { getconf: "glibc 2.12\n" } }, "host.glibc", "fail"],
  ["new C library", { tools: { getconf: "glibc 2.36\n" } }, "host.glibc", "pass"],
  ["ordinary user", { is_root: false }, "host.rights", "unknown"],
  ["global NCCL setting", { files: { "etc/nccl.conf": "NCCL_IB_HCA=mlx5_0\n" } }, "host.env", "warn", /NCCL_IB_HCA=mlx5_0/],
  ["clock not kept", { tools: { timedatectl: "no\n" } }, "host.clock", "warn"],
  ["no GPU", {}, "gpu.smi", "skipped"],
  ["GPUs, no nvidia-smi", { files: { ...PCI_GPU(0) }, gpus: true }, "gpu.smi", "fail"],
  ["two healthy GPUs", TWO_GPUS, "gpu.smi", "pass", /2 GPUs, driver 580\.95/],
  ["counts agree", TWO_GPUS, "gpu.count", "pass"],
  ["one GPU gone", gpus({}, PCI_GPU(2)), "gpu.count", "fail", /missing 0000:12:00\.0/],
  [
    "driver mismatch",
    gpus({ "--query-gpu=index,uuid": { code: 18, out: "Failed to initialize NVML: Driver/library version mismatch", err: "" } }),
    "gpu.smi",
    "fail",
    /differ/,
  ],
  ["driver stuck", gpus({ "--query-gpu=index,uuid": { failed: "no answer", why: "did not return" } }), "gpu.smi", "fail", /stuck/],
  ["MIG", gpus({ "--query-gpu=index,uuid": `${GPU(0)}\n${GPU(1, { mig: "Enabled" })}` }), "gpu.whole", "warn", /MIG/],
  ["GPU in use", gpus({ "--query-gpu=index,uuid": `${GPU(0)}\n${GPU(1, { used: "62000" })}` }), "gpu.used", "warn", /GPU 1 holds 61 GiB/],
  ["unlike GPUs", gpus({ "--query-gpu=index,uuid": `${GPU(0)}\n${GPU(1).replace("H100", "A40")}` }), "gpu.uniform", "warn"],
  [
    "memory errors",
    gpus({ "--query-gpu=index,ecc": "0, Enabled, 3, No, No, 5, 5, 16, 16\n1, Enabled, 0, Yes, No, 5, 5, 16, 16" }),
    "gpu.ecc",
    "fail",
    /GPU 0: 3 uncorrected/,
  ],
  ["remapping to come", gpus({ "--query-gpu=index,ecc": "0, Enabled, 0, Yes, No, 5, 5, 16, 16" }), "gpu.ecc", "warn"],
  ["an old driver tells nothing", gpus({ "--query-gpu=index,ecc": { code: 2, out: "Field is not valid", err: "" } }), "gpu.ecc", "unknown"],
  ["persistence off", gpus({ "--query-gpu=index,compute_cap": "0, 9.0, Disabled, 30" }), "gpu.persist", "warn"],
  ["narrow slot", gpus({ "--query-gpu=index,ecc": "0, Enabled, 0, No, No, 5, 5, 8, 16" }), "gpu.pcie", "warn", /x8/],
  ["Xid 79", gpus({ dmesg: "NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off the bus." }), "gpu.xid", "fail", /Xid 79/],
  ["Xid 31", gpus({ dmesg: "NVRM: Xid (PCI:0000:65:00): 31, pid=1" }), "gpu.xid", "warn"],
  ["log out of sight", gpus({ dmesg: { code: 1, out: "", err: "Operation not permitted" } }), "gpu.xid", "unknown"],
  ["no uvm", { ...TWO_GPUS, files: { ...PCI_GPU(0), ...PCI_GPU(1), "dev/nvidiactl": "" } }, "gpu.nodes", "fail", /nvidia-uvm/],
  ["nouveau", gpus({}, { "proc/modules": "nouveau 1 0 - Live 0x0\n" }), "gpu.nouveau", "fail"],
  [
    "fabric manager not running",
    gpus({ "systemctl is-active": { code: 3, out: "inactive\n", err: "" } }, SWITCH),
    "nvlink.manager",
    "fail",
    /802/,
  ],
  [
    "fabric manager of another version",
    gpus({ "systemctl is-active": "active\n", "nv-fabricmanager": "Fabric Manager version is : 580.82.07" }, SWITCH),
    "nvlink.manager",
    "fail",
    /580\.82\.07 does not match driver 580\.95/,
  ],
  [
    "fabric manager fits",
    gpus({ "systemctl is-active": "active\n", "nv-fabricmanager": "Fabric Manager version is : 580.95" }, SWITCH),
    "nvlink.manager",
    "pass",
  ],
  ["B200: NVSwitches behind adapters", { ...TWO_GPUS, ib: [{ name: "mlx5_8", vpd: "SW_MNG" }] }, "nvlink.need", "pass", /mlx5_8/],
  [
    "GPU not registered",
    gpus({ "--query-gpu=index,fabric": "0, Completed, Success, 0, u-1\n1, In Progress, N/A, 0, u-1" }),
    "nvlink.state",
    "fail",
    /GPU 1: In Progress/,
  ],
  [
    "dead NVLink",
    gpus({ "nvlink -s": "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n" }),
    "nvlink.links",
    "fail",
    /GPU 0 link 1/,
  ],
  [
    "two cliques",
    gpus({ "--query-gpu=index,fabric": "0, Completed, Success, 1, u-1\n1, Completed, Success, 2, u-1" }),
    "imex.clique",
    "fail",
  ],
  [
    "IMEX waits",
    { files: { "etc/nvidia-imex/config.cfg": "" }, tools: { "nvidia-imex-ctl -q": "WAITING_FOR_RECOVERY\n" } },
    "imex.unit",
    "fail",
  ],
  [
    "IMEX degraded",
    {
      files: { "etc/nvidia-imex/config.cfg": "" },
      tools: {
        "nvidia-imex-ctl -N":
          '{"status":"DEGRADED","nodes":{"0":{"status":"READY","host":"10.0.0.1"},"1":{"status":"UNAVAILABLE","host":"10.0.0.2"}}}',
      },
    },
    "imex.domain",
    "warn",
    /10\.0\.0\.2/,
  ],
  ["no IMEX channel", { files: { "etc/nvidia-imex/config.cfg": "" } }, "imex.channel", "fail"],
  ["fabric healthy", { ib: pair, fabrics: ["ib-b"], tools: fabric(B) }, "ib.fabric.same", "pass"],
  [
    "subnet managers named",
    { ib: pair, fabrics: ["ib-b"], tools: fabric(B) },
    "ib.sm",
    "pass",
    /master 0x00000000000000b1 \(priority 5\), standby/,
  ],
  [
    "one name for two fabrics",
    { ib: pair, fabrics: ["ib-b"], tools: fabric(B, A) },
    "ib.fabric.same",
    "fail",
    /ib-b is two fabrics: mlx5_2:1 .* vs mlx5_3:1/,
  ],
  ["two names for one fabric", { ib: pair, fabrics: ["ib-a:mlx5_2", "ib-b:mlx5_3"], tools: fabric(B) }, "ib.fabric.alias", "warn"],
  ["subnet manager gone: not another fabric", { ib: pair, fabrics: ["ib-b"], tools: fabric(B, silent) }, "ib.fabric.same", "pass"],
  ["subnet manager gone", { ib: pair, fabrics: ["ib-b"], tools: fabric(silent) }, "ib.sm", "fail", /active from before/],
  ["none ever answered", { ib: pair, fabrics: ["ib-b"], tools: fabric(silent) }, "ib.fabric.same", "unknown"],
  [
    "never a subnet manager",
    { ib: port({ state: "2: INIT", sm_lid: "0x0" }), tools: fabric(silent) },
    "ib.state",
    "fail",
    /ever configured/,
  ],
  ["no standby", { ib: pair, tools: fabric(manager("0xb1")) }, "ib.sm.standby", "warn"],
  ["cable out", { ib: port({ state: "1: DOWN", phys_state: "2: Polling" }) }, "ib.link", "fail", /no cable/],
  ["port disabled", { ib: port({ state: "1: DOWN", phys_state: "3: Disabled" }) }, "ib.link", "fail", /disabled/],
  ["a manager on this node", { ib: port({ cap_mask: "0x0050c04a" }) }, "ib.sm.here", "warn"],
  ["no tools", { ib: pair, fabrics: ["ib-b"] }, "ib.tools", "fail", /infiniband-diags/],
  ["no tools and no fabric", { ib: pair }, "ib.tools", "warn", /infiniband-diags/],
  [
    "umad is root's",
    { ib: pair, tools: fabric({ code: 255, out: "", err: "Permission denied" }), is_root: false },
    "ib.tools",
    "unknown",
    /root/,
  ],
  ["declared but absent", { ib: pair, fabrics: ["ib-b:mlx5_9"] }, "ib.declared", "fail", /mlx5_9 is not here/],
  ["an adapter under two fabrics", { ib: pair, fabrics: ["ib-a:mlx5_2", "ib-b:mlx5_2"] }, "ib.declared", "fail", /ib-a and ib-b/],
  ["declared without any adapter", { fabrics: ["ib-b"] }, "ib.declared", "fail"],
  [
    "one of two active",
    { ib: [pair[0] as DeviceSpec, { name: "mlx5_3", ports: [{ state: "1: DOWN" }] }], fabrics: ["ib-b"] },
    "ib.count",
    "warn",
    /1 of 2/,
  ],
  [
    "unlike rates",
    { ib: [pair[0] as DeviceSpec, { name: "mlx5_3", ports: [{ rate: "200 Gb/sec (4X HDR)" }] }] },
    "ib.rate",
    "warn",
    /mlx5_3:1 at 200/,
  ],
  ["a link that flaps", { ib: port({ link_downed: 14 }) }, "ib.errors", "warn", /14 times/],
  ["limited membership", { ib: port({ pkeys: ["0x7fff"] }) }, "ib.pkey", "warn"],
  ["two fabrics of one prefix", { ib: pair, fabrics: ["ib-a:mlx5_2", "ib-b:mlx5_3"], tools: fabric(A, B) }, "ib.prefix", "warn"],
  ["left out", { ib: [...pair, { name: "mlx5_8", vpd: "SW_MNG" }] }, "ib.kind", "pass", /mlx5_8:1: it manages the NVSwitch/],
  [
    "little locked memory",
    { ib: pair, files: { "proc/self/limits": "Max locked memory  65536  65536  bytes\n" } },
    "gdr.memlock",
    "warn",
    /64 KiB/,
  ],
  [
    "open driver",
    { ...gpus({}, { "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95" }), ib: pair },
    "gdr.path",
    "pass",
    /dma-buf/,
  ],
  [
    "closed driver",
    { ...gpus({}, { "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95" }), ib: pair },
    "gdr.path",
    "fail",
  ],
  ["translating IOMMU", { ...gpus({}, { "sys/kernel/iommu_groups/0/type": "DMA-FQ\n" }), ib: pair }, "gdr.iommu", "warn", /DMA-FQ/],
  ["no certificate yet", {}, "agent.certificate", "skipped"],
];

describe("doctor", () => {
  test("looks for room where the agent's folder will be, before it is there", async () => {
    const disk = (await examine({ state: "/proc/sys/none/yet" })).get("host.disk");
    expect(disk?.source).toBe("statfs /proc/sys");
  });

  for (const [name, scene, id, verdict, found] of CASES)
    test(`${id}: ${name}`, async () => {
      const check = (await examine(scene)).get(id);
      expect([check?.verdict, check?.found]).toEqual([verdict, check?.found]);
      if (found) expect(check?.found).toMatch(found);
      if (verdict === "fail" || verdict === "warn") expect(check?.remedy).not.toBe("");
      if (verdict !== "skipped") expect(check?.source).not.toBe("");
    });

  test("at least fifteen checks on any machine, each id once", () => {
    expect(CHECKS.length).toBeGreaterThanOrEqual(15);
    expect(new Set(CHECKS.map((check) => check.id)).size).toBe(CHECKS.length);
  });

  test("one hung check stops nothing, one that breaks is unknown", async () => {
    const about = { title: "t", why: "", remedy: "" };
    const checks = [
      { id: "a", ...about, run: () => new Promise<never>(() => undefined) },
      { id: "b", ...about, run: () => Promise.reject(new Error("broken")) },
      { id: "c", ...about, run: () => Promise.resolve(pass("fine", "here")) },
    ];
    const root = await tree(BARE);
    const tls = { ca: "", cert: "", key: "" };
    const options = { ib_root: "/nowhere", fabrics: [], server: null, state: "/", tls, node: "n", note: () => undefined, root };
    const report = await runDoctor(options, checks, 30);
    expect(report.checks.map((check) => check.verdict)).toEqual(["unknown", "unknown", "pass"]);
    expect(report.checks[1]?.found).toContain("broken");
  });

  test("exit codes", () => {
    const report = (...verdicts: Verdict[]) => ({
      version: "",
      node: "",
      checks: verdicts.map((verdict) => ({ id: "", title: "", verdict, found: "", source: "", remedy: "" })),
    });
    expect(exitOf(report("pass", "unknown", "skipped"), true)).toBe(0);
    expect(exitOf(report("warn"), false)).toBe(0);
    expect(exitOf(report("warn"), true)).toBe(1);
    expect(exitOf(report("fail"), false)).toBe(1);
  });
});
