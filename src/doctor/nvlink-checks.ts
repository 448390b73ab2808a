import * as v from "valibot";
import { pciFunctions } from "../hardware/gpus.ts";
import { DOCTOR_TOOL_MS } from "../protocol/limits.ts";
import { fail, pass, skipped, unknown, warn } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import { cell } from "./gpu-checks.ts";
import type { Machine } from "./machine.ts";

const SERVICE = "nvidia-fabricmanager";
const NO_SWITCH = "no NVSwitch here";

type SwitchKind = { readonly words: string; readonly source: string };

/** Whether this machine's GPUs talk through NVSwitches of its own, and how that is known; null = no. */
async function ownSwitches(machine: Machine): Promise<SwitchKind | null> {
  const driver = "/proc/driver/nvidia-nvswitch/devices";
  if ((await machine.list(driver)).length > 0) return { words: "NVSwitches", source: driver };
  const bridges = await pciFunctions(machine.root, (vendor, kind) => vendor === "0x10de" && kind.startsWith("0x0680"));
  if (bridges.length > 0) return { words: `${bridges.length} NVSwitches`, source: "/sys/bus/pci/devices" };
  const managed = (await machine.ports()).filter((port) => port.excluded.includes("NVSwitch"));
  if (managed.length === 0) return null;
  return {
    words: `NVSwitches managed through ${managed.map((port) => port.device).join(", ")}`,
    source: `${machine.options.ib_root}/*/device/vpd`,
  };
}

/** A fact of this machine alone: which NVLink services it needs. */
async function need(machine: Machine): Promise<Finding> {
  const found = await ownSwitches(machine);
  return found ? pass(`${found.words}: the fabric manager is needed`, found.source) : skipped(NO_SWITCH);
}

async function isActive(machine: Machine, unit: string): Promise<boolean | null> {
  const answer = await machine.run(["systemctl", "is-active", unit], DOCTOR_TOOL_MS);
  return "code" in answer ? answer.out.trim() === "active" : null;
}

async function manager(machine: Machine): Promise<Finding> {
  const found = await ownSwitches(machine);
  if (!found) return skipped(NO_SWITCH);
  const remedy = `install ${SERVICE} of the driver's exact version; systemctl enable --now ${SERVICE}`;
  const active = await isActive(machine, SERVICE);
  if (active === null) return unknown("there is no systemctl", "systemctl", remedy);
  if (!active)
    return fail(
      `${SERVICE} does not run: CUDA will fail with error 802, system not yet initialized`,
      `systemctl is-active ${SERVICE}`,
      remedy,
    );
  const [answer, smi] = await Promise.all([machine.run(["nv-fabricmanager", "--version"], DOCTOR_TOOL_MS), machine.smi()]);
  const version = "code" in answer ? /(\d+\.\d+(?:\.\d+)?)/.exec(answer.out + answer.err)?.[1] : undefined;
  const [gpu] = smi.graphics.gpus;
  const driver = gpu && "value" in gpu.driver ? gpu.driver.value : null;
  if (version === undefined || driver === null) return pass("runs", `systemctl is-active ${SERVICE}`);
  if (version === driver) return pass(`runs, ${version} as the driver`, "nv-fabricmanager --version");
  return fail(`fabric manager ${version} does not match driver ${driver}`, "nv-fabricmanager --version", remedy);
}

async function state(machine: Machine): Promise<Finding> {
  const { rows, path } = await machine.smi();
  const states = [...rows.fabric].flatMap(([index, row]) => {
    const now = cell(row, "fabric.state");
    return now === null ? [] : [{ index, now, status: cell(row, "fabric.status") ?? "" }];
  });
  if (states.length === 0) return skipped("no GPU of an NVLink fabric");
  const ill = states.filter(({ now, status }) => !/^completed$/i.test(now) || !/^success$/i.test(status));
  const source = `${path} fabric.state`;
  if (ill.length === 0) return pass(`registered: ${states.length} GPUs`, source);
  const words = ill.map(({ index, now, status }) => `GPU ${index}: ${now} ${status}`.trim()).join(", ");
  return fail(
    `${words}: CUDA will wait or fail with error 802`,
    source,
    "see /var/log/fabricmanager.log; on B200 also the NVLink subnet manager and ib_umad",
  );
}

async function links(machine: Machine): Promise<Finding> {
  const { path, graphics } = await machine.smi();
  if (path === null || graphics.gpus.length === 0) return skipped("no GPU with NVLink");
  const answer = await machine.run([path, "nvlink", "-s"], DOCTOR_TOOL_MS);
  const text = "code" in answer && answer.code === 0 ? answer.out : "";
  if (!/Link \d+:/.test(text)) return skipped("no GPU with NVLink");
  const ill: string[] = [];
  let gpu = "";
  let active = 0;
  for (const line of text.split("\n")) {
    gpu = /^GPU (\d+):/.exec(line)?.[1] ?? gpu;
    const link = /Link (\d+):\s*(.*)$/.exec(line);
    if (!link) continue;
    if (/inactive/i.test(link[2] ?? "")) ill.push(`GPU ${gpu} link ${link[1]}`);
    else active++;
  }
  const source = `${path} nvlink -s`;
  return ill.length === 0
    ? pass(`${active} links, all active`, source)
    : fail(`inactive: ${ill.join(", ")}`, source, "reset the GPUs; have the board serviced");
}

const NO_IMEX = "no IMEX here (NVLink between machines)";
const hasImex = async (machine: Machine) => (await machine.exists("/etc/nvidia-imex")) || (await machine.exists("/usr/bin/nvidia-imex"));

async function imex(machine: Machine): Promise<Finding> {
  if (!(await hasImex(machine))) return skipped(NO_IMEX);
  const answer = await machine.run(["nvidia-imex-ctl", "-q"], DOCTOR_TOOL_MS);
  const source = "nvidia-imex-ctl -q";
  if (!("code" in answer)) return unknown(answer.why, source);
  const said = answer.out.trim().split("\n").at(-1) ?? "";
  if (said === "READY") return pass("READY", source);
  return fail(
    `IMEX is ${said || "silent"}: memory cannot be shared over NVLink between machines`,
    source,
    "systemctl restart nvidia-imex; look at the peers",
  );
}

const Domain = v.object({
  status: v.string(),
  nodes: v.optional(v.record(v.string(), v.looseObject({ status: v.string(), host: v.string() })), {}),
});

async function domain(machine: Machine): Promise<Finding> {
  if (!(await hasImex(machine))) return skipped(NO_IMEX);
  const answer = await machine.run(["nvidia-imex-ctl", "-N", "-j"], DOCTOR_TOOL_MS);
  const source = "nvidia-imex-ctl -N -j";
  if (!("code" in answer) || answer.code !== 0) return unknown("it does not answer", source);
  const read = v.safeParse(v.pipe(v.string(), v.parseJson(), Domain), answer.out);
  if (!read.success) return unknown("its answer cannot be read", source);
  const { status, nodes } = read.output;
  const ill = Object.values(nodes).filter((node) => node.status !== "READY");
  const silent = ill.map((node) => `${node.host} ${node.status}`).join(", ");
  const words = `${status}, ${Object.keys(nodes).length} machines${silent === "" ? "" : `; not ready: ${silent}`}`;
  const remedy = "the same /etc/nvidia-imex/nodes_config.cfg on all machines, then restart nvidia-imex";
  if (status === "UP") return pass(words, source);
  return status === "DEGRADED" ? warn(words, source, remedy) : fail(words, source, remedy);
}

async function channel(machine: Machine): Promise<Finding> {
  if (!(await hasImex(machine))) return skipped(NO_IMEX);
  const path = "/dev/nvidia-caps-imex-channels/channel0";
  const remedy = "make it with mknod (the major number is in /proc/devices), or load nvidia with NVreg_CreateImexChannel0=1";
  return (await machine.exists(path))
    ? pass("there", path)
    : fail("there is no IMEX channel: CUDA's fabric handles are refused", path, remedy);
}

async function clique(machine: Machine): Promise<Finding> {
  const { rows, path } = await machine.smi();
  const cliques = Map.groupBy(
    [...rows.fabric].flatMap(([index, row]) => {
      const uuid = cell(row, "fabric.clusterUuid");
      return uuid === null || /^0[0-]*$/.test(uuid) ? [] : [{ index, of: `${uuid}/${cell(row, "fabric.cliqueId") ?? ""}` }];
    }),
    ({ of }) => of,
  );
  if (cliques.size === 0) return skipped("no GPU of an NVLink domain");
  const source = `${path} fabric.clusterUuid`;
  if (cliques.size === 1) return pass(`one: ${[...cliques.keys()][0]}`, source);
  const words = [...cliques.values()].map((same) => same.map(({ index }) => index).join(","));
  return fail(`GPUs ${words.join(" and ")} are in different cliques`, source, "look at the NVLink partitions");
}

const row = (id: string, title: string, why: string, remedy: string, run: Check["run"]): Check => ({ id, title, why, remedy, run });

export const NVLINK_CHECKS: readonly Check[] = [
  row("nvlink.need", "NVSwitches of its own", "It says whether a fabric manager is needed.", "", need),
  row(
    "nvlink.manager",
    "fabric manager",
    "Without it CUDA fails with error 802.",
    "Install the driver's exact version and enable it.",
    manager,
  ),
  row("nvlink.state", "GPUs registered on NVLink", "A GPU that is not registered cannot be used.", "See the fabric manager's log.", state),
  row("nvlink.links", "NVLinks active", "A dead link slows every all-reduce.", "Reset the GPUs; service the board.", links),
  row("imex.unit", "IMEX service", "It lets machines of one NVLink domain share memory.", "Restart it; look at its peers.", imex),
  row("imex.domain", "IMEX domain", "All machines must know the same list.", "Make `nodes_config.cfg` the same everywhere.", domain),
  row("imex.channel", "IMEX channel", "Without a channel CUDA refuses fabric handles.", "`NVreg_CreateImexChannel0=1`.", channel),
  row("imex.clique", "one NVLink clique", "GPUs of different cliques cannot talk over NVLink.", "Look at the partitions.", clique),
];
