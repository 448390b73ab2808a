import { isDistinct, managersOf } from "./fabric-facts.ts";
import { REAL_IB_ROOT, portName } from "../hardware/infiniband.ts";
import type { IbPort } from "../hardware/infiniband.ts";
import { ADAPTERS_PER_FABRIC_COUNT } from "../protocol/limits.ts";
import { fail, pass, skipped, unknown, warn, worstOf } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import type { Machine } from "./machine.ts";

const NONE = "no InfiniBand adapter here and no fabric declared";
const named = (ports: readonly IbPort[]) => ports.map(portName).join(", ");

/** A check that has a meaning only where there are watched ports. */
function withPorts(judge: (ports: readonly IbPort[], machine: Machine) => Promise<Finding> | Finding): Check["run"] {
  return async (machine) => {
    const ports = await machine.watched();
    if (ports.length > 0) return judge(ports, machine);
    return skipped(machine.options.fabrics.length > 0 ? "no declared adapter is here (see ib.declared)" : NONE);
  };
}

const TOOLS_REMEDY = "apt-get install infiniband-diags (dnf: the same name), never opensm: it would take part in the fabric";

async function tools(_ports: readonly IbPort[], machine: Machine): Promise<Finding> {
  const asked = [...(await machine.managers()).values()];
  if (asked.some((answer) => "unknown" in answer && answer.unknown === "no tools"))
    return (machine.options.fabrics.length > 0 ? fail : warn)(
      "infiniband-diags is missing: no fabric can be told from another",
      "saquery, sminfo in PATH",
      TOOLS_REMEDY,
    );
  if (asked.some((answer) => "unknown" in answer && answer.unknown === "not allowed"))
    return unknown("/dev/infiniband/umad* is root's: subnet managers cannot be asked", "saquery", "run as root");
  return pass("saquery or sminfo runs", "saquery, sminfo in PATH");
}

async function umad(_ports: readonly IbPort[], machine: Machine): Promise<Finding> {
  if (machine.options.ib_root !== REAL_IB_ROOT) return skipped("--ib-root is not the kernel's");
  const abi = "/sys/class/infiniband_mad/abi_version";
  if ((await machine.text(abi)) !== null) return pass("loaded", abi);
  return fail(
    "the kernel module ib_umad is not loaded: no subnet manager can be asked",
    abi,
    "modprobe ib_umad; echo ib_umad >/etc/modules-load.d/ib_umad.conf",
  );
}

async function declared(machine: Machine): Promise<Finding> {
  const { fabrics, ib_root } = machine.options;
  if (fabrics.length === 0) return skipped("no --fabric given");
  const assigned = await machine.assigned();
  if ("wrong" in assigned) return fail(assigned.wrong, ib_root, assigned.remedy);
  const words = fabrics.map(({ name }) => {
    const ports = assigned.ports.filter((port) => assigned.of.get(portName(port)) === name);
    return { name, ports };
  });
  const empty = words.filter(({ ports }) => ports.length === 0);
  if (empty.length > 0)
    return fail(
      `no usable adapter for ${empty.map(({ name }) => name).join(", ")}`,
      ib_root,
      "name adapters of this machine, or look at ib.kind",
    );
  return pass(words.map(({ name, ports }) => `${name}: ${named(ports)}`).join("; "), ib_root);
}

async function kinds(machine: Machine): Promise<Finding> {
  const ports = await machine.ports();
  if (ports.length === 0) return skipped(NONE);
  const out = ports.filter((port) => port.excluded !== "").map((port) => `${portName(port)}: ${port.excluded}`);
  const usable = ports.filter((port) => port.excluded === "");
  return pass(`usable: ${named(usable) || "none"}${out.length > 0 ? `; left out: ${out.join("; ")}` : ""}`, machine.options.ib_root);
}

const link = withPorts((ports, { options }) =>
  worstOf(
    ports.map((port) => {
      const source = `${options.ib_root}/${port.device}/ports/${port.port}/phys_state`;
      if (port.phys_state === "LinkUp") return pass(`${portName(port)} up`, source);
      if (port.phys_state === null) return unknown(`${portName(port)} does not tell`, source);
      if (port.phys_state === "Disabled")
        return fail(`${portName(port)} is disabled`, source, `ibportstate -C ${port.device} -P ${port.port} -D 0 ${port.port} enable`);
      return fail(`${portName(port)} ${port.phys_state}: no cable, or the far end is off`, source, "look at the cable and the switch port");
    }),
  ),
);

const state = withPorts((ports, { options }) =>
  worstOf(
    ports.map((port) => {
      const source = `${options.ib_root}/${port.device}/ports/${port.port}/state`;
      if (port.state === "ACTIVE") return pass(`${portName(port)} active`, source);
      if (port.state === "INIT") {
        const why = port.sm_lid === 0 ? "no subnet manager has ever configured it" : "the subnet manager has not configured it yet";
        return fail(`${portName(port)} initializing: ${why}`, source, "start the subnet manager on the switch or its own host");
      }
      if (port.state === "ARMED") return warn(`${portName(port)} armed: about to be active`, source, "run llmgw doctor again");
      return port.state === null
        ? unknown(`${portName(port)} does not tell`, source)
        : fail(`${portName(port)} ${port.state}`, source, "see ib.link");
    }),
  ),
);

async function manager(ports: readonly IbPort[], machine: Machine): Promise<Finding> {
  const answers = await machine.managers();
  return worstOf(
    ports.map((port) => {
      const answer = answers.get(portName(port));
      if (!answer) return unknown(`${portName(port)} was not asked`, "");
      if ("managers" in answer) {
        const words = answer.managers.map(
          (each) => `${each.state} ${each.guid}${each.priority === null ? "" : ` (priority ${each.priority})`}`,
        );
        return pass(`${portName(port)}: ${words.join(", ")}`, answer.source);
      }
      if (answer.unknown !== "no answer") return unknown(`${portName(port)}: ${answer.why}`, answer.source);
      const stale =
        port.state === "ACTIVE" ? `its last one (lid ${port.sm_lid}) is gone; the port is active from before` : "none has ever answered";
      return fail(
        `${portName(port)}: no subnet manager answers: ${stale}`,
        answer.source,
        "start the subnet manager on the switch or its own host",
      );
    }),
  );
}

async function standby(_ports: readonly IbPort[], machine: Machine): Promise<Finding> {
  const known = managersOf(await machine.managers());
  if (known.length === 0) return unknown("no subnet manager answers", "saquery");
  const alone = known.filter(({ answer }) => answer.source.startsWith("saquery") && answer.managers.length < 2);
  if (alone.length === 0) return pass("each port has a standby, or only the manager in charge is known", "saquery");
  return warn(
    `one subnet manager and no standby: ${alone.map(({ port }) => port).join(", ")}`,
    "saquery",
    "start a second one on another host",
  );
}

function here(ports: readonly IbPort[]): Finding {
  const running = ports.filter((port) => port.runs_manager);
  if (running.length === 0) return pass("no subnet manager runs on this node", "cap_mask");
  return warn(
    `a subnet manager runs on this node (${named(running)})`,
    "cap_mask",
    "systemctl disable --now opensm: it stops when this node does",
  );
}

async function same(machine: Machine): Promise<Finding> {
  const assigned = await machine.assigned();
  if (machine.options.fabrics.length === 0) return skipped("no --fabric given");
  if ("wrong" in assigned) return skipped("see ib.declared");
  const known = managersOf(await machine.managers());
  const source = "saquery SMIR of each port";
  const findings = machine.options.fabrics.map(({ name }) => {
    const mine = known.filter(({ port }) => assigned.of.get(port) === name);
    if (mine.length === 0) return unknown(`${name}: no subnet manager answers, so it is not proved`, source);
    const [first] = mine;
    const other = mine.find((each) => first && isDistinct(first, each));
    if (!first || !other) return pass(`${name}: ${mine.map(({ port }) => port).join(", ")} see the same subnet managers`, source);
    const words = [first, other].map(({ port, guids }) => `${port} {${guids.join(", ")}}`).join(" vs ");
    return fail(`${name} is two fabrics: ${words}`, source, "recable, or give each its own name with --fabric");
  });
  return worstOf(findings);
}

async function alias(machine: Machine): Promise<Finding> {
  const assigned = await machine.assigned();
  if (machine.options.fabrics.length < 2 || "wrong" in assigned) return skipped("fewer than two fabrics declared");
  const known = managersOf(await machine.managers());
  for (const one of known)
    for (const other of known) {
      const names = [assigned.of.get(one.port), assigned.of.get(other.port)];
      if (names[0] === names[1] || isDistinct(one, other)) continue;
      const both = `${one.port} (${names[0]}) and ${other.port} (${names[1]})`;
      const words = `${both} see the same subnet managers: one fabric with two names, or a wrong cable`;
      return warn(words, "saquery SMIR of each port", "recable, or use one name");
    }
  return known.length < 2
    ? unknown("not enough subnet managers answer", "saquery")
    : pass("each name is a fabric of its own", "saquery SMIR of each port");
}

async function count(machine: Machine): Promise<Finding> {
  const assigned = await machine.assigned();
  if (machine.options.fabrics.length === 0 || "wrong" in assigned) return skipped("no --fabric given, or see ib.declared");
  const findings = machine.options.fabrics.map(({ name, members }) => {
    const ports = assigned.ports.filter((port) => assigned.of.get(portName(port)) === name);
    const good = ports.filter((port) => port.state === "ACTIVE").length;
    const wanted = members.length || ADAPTERS_PER_FABRIC_COUNT;
    const words = `${name}: ${good} of ${wanted} adapters active`;
    if (good >= wanted) return pass(words, machine.options.ib_root);
    return good === 0
      ? fail(words, machine.options.ib_root, "see ib.link and ib.state")
      : warn(words, machine.options.ib_root, "see ib.link and ib.state");
  });
  return worstOf(findings);
}

function rate(ports: readonly IbPort[], { options }: Machine): Finding {
  const known = ports.filter((port) => port.rate_gbps !== null && port.state === "ACTIVE");
  if (known.length === 0) return unknown("no active port tells its rate", options.ib_root);
  const best = Math.max(...known.map((port) => port.rate_gbps ?? 0));
  const slow = known.filter((port) => (port.rate_gbps ?? 0) < best);
  if (slow.length === 0) return pass(`all at ${best} Gb/s`, options.ib_root);
  const words = slow.map((port) => `${portName(port)} at ${port.rate_gbps} Gb/s`).join(", ");
  return warn(`${words}, others at ${best}`, options.ib_root, "look at the cable and the switch port");
}

function errors(ports: readonly IbPort[], { options }: Machine): Finding {
  const known = ports.filter((port) => port.link_downed !== null);
  if (known.length === 0) return unknown("no port counts", options.ib_root);
  const flapping = known.filter((port) => (port.link_downed ?? 0) > 3);
  if (flapping.length === 0) return pass("no link went down often", options.ib_root);
  return warn(
    flapping.map((port) => `${portName(port)} went down ${port.link_downed} times since boot`).join(", "),
    options.ib_root,
    "replace the cable",
  );
}

async function prefix(machine: Machine): Promise<Finding> {
  const assigned = await machine.assigned();
  if (machine.options.fabrics.length < 2 || "wrong" in assigned) return skipped("fewer than two fabrics declared");
  const names = Map.groupBy(assigned.ports, (port) => port.gid_prefix);
  const shared = [...names].filter(
    ([gid, ports]) => gid !== null && new Set(ports.map((port) => assigned.of.get(portName(port)))).size > 1,
  );
  if (shared.length === 0) return pass("each fabric has a GID prefix of its own", "gids/0");
  const words = `fabrics share the GID prefix ${shared.map(([gid]) => gid).join(", ")}: UCX and MPI take them for one`;
  return warn(words, "gids/0", "set subnet_prefix in each subnet manager's configuration; llmgw's own ranks name their adapters");
}

function pkey(ports: readonly IbPort[], { options }: Machine): Finding {
  const limited = ports.filter((port) => port.pkeys.length > 0 && !port.pkeys.some((key) => (Number(key) & 0x8000) !== 0));
  if (limited.length === 0) return pass("full member of a partition", `${options.ib_root}/*/ports/*/pkeys`);
  return warn(
    `only a limited member: ${named(limited)}`,
    `${options.ib_root}/*/ports/*/pkeys`,
    "give full membership in the subnet manager's partitions",
  );
}

function guid(ports: readonly IbPort[], { options }: Machine): Finding {
  const twice = [...Map.groupBy(ports, (port) => port.guid)].filter(([value, same]) => value !== null && same.length > 1);
  if (twice.length > 0)
    return fail(
      `same GUID: ${twice.map(([value, same]) => `${named(same)} ${value}`).join("; ")}`,
      options.ib_root,
      "a clone: set its own GUIDs",
    );
  const silent = ports.filter((port) => port.guid === null);
  return silent.length > 0
    ? unknown(`no GUID to be read: ${named(silent)}`, options.ib_root)
    : pass("each port has its own", options.ib_root);
}

function affinity(ports: readonly IbPort[], { options }: Machine): Finding {
  const nodes = new Set(ports.map((port) => port.numa));
  if (nodes.has(null)) return unknown("not every adapter tells its NUMA node", options.ib_root);
  const words = ports.map((port) => `${portName(port)} on ${port.numa}`).join(", ");
  return ports.length > 1 && nodes.size === 1 && ![...nodes].includes(0)
    ? warn(`NUMA nodes: ${words}: all far from the others`, options.ib_root, "choose adapters of several nodes")
    : pass(`NUMA nodes: ${words}`, options.ib_root);
}

const row = (id: string, title: string, why: string, remedy: string, run: Check["run"]): Check => ({ id, title, why, remedy, run });

export const FABRIC_CHECKS: readonly Check[] = [
  row(
    "ib.declared",
    "declared adapters",
    "A declared adapter that is not here, or under two fabrics, keeps the agent from starting.",
    "Correct `--fabric`.",
    declared,
  ),
  row("ib.kind", "InfiniBand adapters", "Ethernet ports and the NVSwitches' own functions look like adapters and are none.", "", kinds),
  row(
    "ib.tools",
    "tools that ask subnet managers",
    "The subnet manager's GUID is all that tells two fabrics apart.",
    "Install `infiniband-diags`.",
    withPorts(tools),
  ),
  row("ib.umad", "module ib_umad", "Without it no tool reaches a subnet manager.", "`modprobe ib_umad`.", withPorts(umad)),
  row("ib.link", "links up", "No link, no fabric.", "Look at the cable and the switch port.", link),
  row("ib.state", "ports active", "A subnet manager makes ports active.", "Start one.", state),
  row(
    "ib.sm",
    "subnet manager answers",
    "Without one new paths are not found: ranks hang when they connect.",
    "Start it on the switch or its own host.",
    withPorts(manager),
  ),
  row("ib.sm.standby", "standby subnet manager", "One alone takes the fabric down with it.", "Start a second.", withPorts(standby)),
  row("ib.sm.here", "no subnet manager on this node", "It would stop with this node.", "Disable opensm here.", withPorts(here)),
  row(
    "ib.fabric.same",
    "one name, one fabric",
    "Ranks on two fabrics hang at their first all-reduce.",
    "Recable, or give each fabric its own name.",
    same,
  ),
  row("ib.fabric.alias", "one fabric, one name", "Two names for one fabric hide a wrong cable.", "Use one name.", alias),
  row("ib.count", "adapters per fabric", "A gang needs the declared adapters on every node.", "See `ib.link`.", count),
  row("ib.rate", "link rates", "The slowest adapter sets the pace.", "Look at the cable.", withPorts(rate)),
  row("ib.errors", "links stay up", "A link that flaps ends gangs.", "Replace the cable.", withPorts(errors)),
  row("ib.prefix", "GID prefixes", "UCX and MPI take fabrics of one prefix for one network.", "Set `subnet_prefix`.", prefix),
  row("ib.pkey", "partition membership", "Limited members cannot talk to each other.", "Give full membership.", withPorts(pkey)),
  row("ib.guid", "port GUIDs", "Clones with one GUID confuse the subnet manager.", "Set their own GUIDs.", withPorts(guid)),
  row("ib.affinity", "adapters and NUMA", "Traffic across sockets is slow.", "Choose other adapters.", withPorts(affinity)),
];
