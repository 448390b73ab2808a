import { readdir, readFile, realpath } from "node:fs/promises";
import { basename, join } from "node:path";

/** The kernel's own list of InfiniBand devices. */
export const REAL_IB_ROOT = "/sys/class/infiniband";

/** One port of one device under /sys/class/infiniband: the unit of everything about fabrics. Null = could not be read. */
export interface IbPort {
  readonly device: string;
  readonly port: number;
  /** GUID of the port, `0x` and 16 hex digits; null when none is set. */
  readonly guid: string | null;
  /** `INIT`, `ACTIVE`, ... and `Polling`, `LinkUp`, ... */
  readonly state: string | null;
  readonly phys_state: string | null;
  readonly rate_gbps: number | null;
  readonly lid: number | null;
  readonly sm_lid: number | null;
  /** The first 8 bytes of the GID: what UCX and MPI tell fabrics apart by. */
  readonly gid_prefix: string | null;
  readonly link_downed: number | null;
  readonly pkeys: readonly string[];
  /** A subnet manager runs behind this very port. */
  readonly runs_manager: boolean;
  /** PCI address of the function; "" for software devices. */
  readonly pci: string;
  readonly pci_path: string;
  /** NUMA node; null = unknown. */
  readonly numa: number | null;
  /** Kind of adapter (`MT4129`) and network device names (`ib0`). */
  readonly hca: string;
  readonly netdevs: readonly string[];
  /** Why it cannot carry a fabric; "" when it can. */
  readonly excluded: string;
}

/** Reads every port below an `--ib-root`. Files that fail to read are taken as absent; a folder that is not there has no ports. */
export async function readIbPorts(ib_root: string = REAL_IB_ROOT): Promise<IbPort[]> {
  const devices = await readdir(ib_root).catch((): string[] => []);
  const found = await Promise.all(devices.map((device) => readDevice(ib_root, device)));
  return found.flat().toSorted((a, b) => a.device.localeCompare(b.device, "en", { numeric: true }) || a.port - b.port);
}

const text = (...path: string[]) =>
  readFile(join(...path), "latin1").then(
    (read) => read.trim(),
    () => null,
  );

const names = (...path: string[]) => readdir(join(...path)).catch((): string[] => []);

interface Device {
  readonly name: string;
  readonly node_type: string | null;
  readonly pci_class: string | null;
  readonly is_virtual: boolean;
  /** Vital product data: it alone tells an NVSwitch's management function from an adapter. */
  readonly vpd: string | null;
}

async function readDevice(root: string, name: string): Promise<IbPort[]> {
  const folder = join(root, name);
  // The product data come first: a restricted function fails on most other reads and floods the kernel's log.
  const vpd = await text(folder, "device", "vpd");
  if (vpd?.includes("SW_MNG")) {
    const ports = await names(folder, "ports");
    return ports.map((port) => ({
      ...NOTHING,
      device: name,
      port: Number(port),
      excluded: "it manages the NVSwitch, it is no network adapter",
    }));
  }
  const [node_type, pci_class, numa, hca, pci_path, netdevs, ports, inside] = await Promise.all([
    text(folder, "node_type"),
    text(folder, "device", "class"),
    text(folder, "device", "numa_node"),
    text(folder, "hca_type"),
    realpath(join(folder, "device")).catch(() => ""),
    names(folder, "device", "net"),
    names(folder, "ports"),
    names(folder, "device"),
  ]);
  const device: Device = { name, node_type, pci_class, is_virtual: inside.includes("physfn"), vpd };
  const about = {
    hca: hca ?? "",
    pci: basename(pci_path).match(/^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d$/)?.[0] ?? "",
    pci_path,
    numa: numa === null || Number(numa) < 0 ? null : Number(numa),
    netdevs,
  };
  const numbers = ports.map(Number).filter((port) => Number.isInteger(port));
  return Promise.all(numbers.map(async (port) => ({ ...(await readPort(device, join(folder, "ports", String(port)), port)), ...about })));
}

const NOTHING: IbPort = {
  device: "",
  port: 1,
  guid: null,
  state: null,
  phys_state: null,
  rate_gbps: null,
  lid: null,
  sm_lid: null,
  gid_prefix: null,
  link_downed: null,
  pkeys: [],
  runs_manager: false,
  pci: "",
  pci_path: "",
  numa: null,
  hca: "",
  netdevs: [],
  excluded: "",
};

async function readPort(device: Device, folder: string, port: number): Promise<IbPort> {
  const [state, phys, rate, lid, sm_lid, cap, link_layer, gid, downed] = await Promise.all(
    ["state", "phys_state", "rate", "lid", "sm_lid", "cap_mask", "link_layer", "gids/0", "counters/link_downed"].map((file) =>
      text(folder, file),
    ),
  );
  const pkeys = await Promise.all((await names(folder, "pkeys")).slice(0, 16).map((slot) => text(folder, "pkeys", slot)));
  const guid = portGuid(gid ?? null);
  return {
    ...NOTHING,
    device: device.name,
    port,
    guid,
    state: word(state ?? null),
    phys_state: word(phys ?? null),
    rate_gbps: numberIn(/^([\d.]+) Gb\/sec/, rate ?? null),
    lid: numberIn(/^(0x[0-9a-fA-F]+|\d+)$/, lid ?? null),
    sm_lid: numberIn(/^(0x[0-9a-fA-F]+|\d+)$/, sm_lid ?? null),
    gid_prefix: gid?.split(":").slice(0, 4).join(":") ?? null,
    link_downed: numberIn(/^(\d+)$/, downed ?? null),
    pkeys: pkeys.flatMap((key) => (key === null || key === "0x0000" ? [] : [key])),
    runs_manager: (Number(cap ?? 0) & 0x2) !== 0,
    excluded: excludedBecause(device, { link_layer: link_layer ?? null, state: state ?? null, zero_guid: Boolean(gid) && guid === null }),
  };
}

/** `4: ACTIVE` without its number; the number decides where the word is not known. */
function word(value: string | null): string | null {
  return value?.replace(/^\d+:\s*/, "") ?? null;
}

function numberIn(form: RegExp, value: string | null): number | null {
  const found = value === null ? undefined : form.exec(value)?.[1];
  const number = Number(found);
  return found === undefined || Number.isNaN(number) ? null : number;
}

/** The port's GUID from its first GID (prefix and GUID in 8 groups); null when it is all zero. */
function portGuid(gid: string | null): string | null {
  const digits = gid?.split(":").slice(4).join("") ?? "";
  return /^[0-9a-fA-F]{16}$/.test(digits) && !/^0+$/.test(digits) ? `0x${digits.toLowerCase()}` : null;
}

/** Why a port cannot carry a fabric; "" when it can. The words follow "mlx5_8 cannot be used: ". */
function excludedBecause(device: Device, port: { link_layer: string | null; state: string | null; zero_guid: boolean }): string {
  if (device.node_type !== null && !device.node_type.startsWith("1:")) return `it is no adapter (node type ${device.node_type})`;
  if (/^smi\d+$/.test(device.name)) return "it is the management side of another adapter";
  // A kernel that has no link_layer file knows InfiniBand only.
  if (port.link_layer !== null && port.link_layer !== "InfiniBand") return `it is ${port.link_layer}, not InfiniBand`;
  if (port.link_layer === null && device.pci_class === "0x020000") return "it is Ethernet, not InfiniBand";
  if (port.state === null) return "its files cannot be read";
  if (port.zero_guid) return device.is_virtual ? "it is a virtual function without a GUID" : "it has no GUID";
  return "";
}

/** How a port is named by people and by NCCL: `mlx5_2:1`. */
export function portName(port: { readonly device: string; readonly port: number }): string {
  return `${port.device}:${port.port}`;
}
