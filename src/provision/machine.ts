import * as v from "valibot";
import { OperatorError } from "../protocol/errors.ts";
import type { PveParameters } from "./pve.ts";
import { sameNetwork, type Settings } from "./settings.ts";
import type { PublicKey } from "./ssh-keys.ts";

const Flag = v.optional(v.union([v.number(), v.string()]));
const Count = v.optional(v.union([v.number(), v.string()]));

/** What Proxmox lists, as far as it is used. */
export const NodeRow = v.looseObject({ node: v.string(), status: v.optional(v.string()) });
export const VmRow = v.looseObject({
  vmid: v.optional(v.union([v.number(), v.string()])),
  name: v.optional(v.string()),
  node: v.optional(v.string()),
  type: v.optional(v.string()),
});
export const StorageRow = v.looseObject({ storage: v.string(), content: v.optional(v.string()), avail: Count, active: Flag });
export const NetworkRow = v.looseObject({
  iface: v.string(),
  type: v.optional(v.string()),
  cidr: v.optional(v.string()),
  gateway: v.optional(v.string()),
});
export const VolumeRow = v.looseObject({ volid: v.string() });
export type NodeRow = v.InferOutput<typeof NodeRow>;
export type VmRow = v.InferOutput<typeof VmRow>;
export type StorageRow = v.InferOutput<typeof StorageRow>;
export type NetworkRow = v.InferOutput<typeof NetworkRow>;

const refuse = (code: "E_EXISTS" | "E_PROXMOX" | "E_NO_ROOM" | "E_USAGE", what: string, why: string, remedy: string) =>
  new OperatorError(code, what, why, remedy);

/** The Proxmox node for the machine: the one that is named, this very host, or the only one. @throws OperatorError E_USAGE, E_PROXMOX */
export function chooseNode(rows: readonly NodeRow[], wanted: string | undefined, local: string | null): string {
  const names = rows.map(({ node }) => node).sort((a, b) => a.localeCompare(b));
  if (names.length === 0)
    throw refuse(
      "E_PROXMOX",
      "Proxmox lists no node",
      "this login may see none",
      "give it the role: docs/adding-a-node.md has the commands",
    );
  const name = wanted ?? local ?? (names.length === 1 ? names[0] : undefined);
  if (name === undefined)
    throw refuse("E_USAGE", "--pve-node is missing", `the cluster has ${names.join(", ")}`, "name the node that is to run the machine");
  const row = rows.find(({ node }) => node === name);
  if (!row)
    throw refuse(
      "E_USAGE",
      `there is no Proxmox node ${name}`,
      `the cluster has ${names.join(", ")}`,
      "write it as Proxmox does, without a domain",
    );
  if (row.status !== undefined && row.status !== "online")
    throw refuse("E_PROXMOX", `Proxmox node ${name} is ${row.status}`, "nothing can be made on it", "name another with --pve-node");
  return name;
}

export const vmidTaken = (vmid: number, why: string) =>
  refuse("E_EXISTS", `VMID ${vmid} is taken`, why, "take another with --vmid, or another address");

/** Refuses what is taken already, before anything is made. @throws OperatorError E_EXISTS */
export function refuseTaken(rows: readonly VmRow[], { vmid, name }: Pick<Settings, "vmid" | "name">): void {
  const same = rows.find((row) => Number(row.vmid) === vmid);
  if (same) throw vmidTaken(vmid, `it is ${same.name ?? "a machine"} on ${same.node ?? "this cluster"}`);
  const named = rows.find((row) => row.name === name);
  if (named)
    throw refuse(
      "E_EXISTS",
      `there is a machine called ${name}`,
      `it is VMID ${named.vmid} on ${named.node ?? "this cluster"}`,
      "take another name, or onboard that one with --onboard-only",
    );
}

const holds = (row: StorageRow, content: string) => (row.content ?? "").split(",").includes(content) && Number(row.active ?? 1) === 1;

/**
 * Where the machine's disk and where its image are kept.
 * @throws OperatorError E_PROXMOX when no storage will do, E_NO_ROOM
 */
export function chooseStorages(
  rows: readonly StorageRow[],
  { storage: wanted, disk }: Pick<Settings, "storage" | "disk">,
): { disks: string; images: string } {
  const free = ({ avail }: StorageRow) => Number(avail ?? 0);
  const fit = rows.filter((row) => holds(row, "images")).sort((a, b) => free(b) - free(a));
  const names = fit.map(({ storage }) => storage).join(", ") || "none";
  const disks = wanted === undefined ? fit[0] : fit.find(({ storage }) => storage === wanted);
  if (!disks)
    throw refuse(
      "E_PROXMOX",
      wanted === undefined ? "no storage takes disks" : `storage ${wanted} takes no disks`,
      `those that do: ${names}`,
      "name one with --storage, or allow the content Disk image on it",
    );
  const needed = disk * 2 ** 30;
  if (disks.avail !== undefined && free(disks) < needed)
    throw refuse(
      "E_NO_ROOM",
      `storage ${disks.storage} has no room`,
      `${disk} GiB are needed, and ${Math.floor(free(disks) / 2 ** 30)} GiB are free`,
      "name another with --storage, or a smaller --disk",
    );
  const imports = rows.filter((row) => holds(row, "import"));
  const images = imports.find(({ storage }) => storage === disks.storage) ?? imports[0];
  if (!images)
    throw refuse(
      "E_PROXMOX",
      "no storage takes images to import",
      "none has the content Import",
      "allow it: Datacenter, Storage, local, Edit, Content: Import (Proxmox 8.4 or later)",
    );
  return { disks: disks.storage, images: images.storage };
}

/** The bridge and the way out. @throws OperatorError E_PROXMOX, E_USAGE */
export function chooseNetwork(
  rows: readonly NetworkRow[],
  settings: Pick<Settings, "bridge" | "gateway" | "address" | "bits" | "vlan">,
): { bridge: string; gateway: string | null } {
  const bridges = rows.filter(({ type }) => type === "bridge" || type === "OVSBridge").sort((a, b) => a.iface.localeCompare(b.iface));
  const { address, bits } = settings;
  const names = bridges.map(({ iface }) => iface).join(", ") || "none";
  const holder = bridges.find(({ cidr, gateway }) => cidr?.split("/")[0] === address || gateway === address);
  if (holder)
    throw refuse("E_EXISTS", `${address} is taken`, `it is that of bridge ${holder.iface}, or its way out`, "take another address");
  const near = bridges.find(({ cidr }) => cidr !== undefined && sameNetwork(cidr.split("/")[0] ?? "", address, bits));
  const bridge =
    settings.bridge === undefined
      ? (near ?? bridges.find(({ iface }) => iface === "vmbr0") ?? bridges[0])
      : bridges.find(({ iface }) => iface === settings.bridge);
  if (!bridge)
    throw refuse(
      "E_PROXMOX",
      settings.bridge === undefined ? "there is no bridge" : `there is no bridge ${settings.bridge}`,
      `the node has ${names}`,
      "name one with --bridge",
    );
  if (settings.gateway !== undefined) return { bridge: bridge.iface, gateway: settings.gateway };
  // A tagged network is another one than the bridge's own.
  if (settings.vlan !== undefined)
    throw refuse(
      "E_USAGE",
      "--gateway is missing",
      `the network of VLAN ${settings.vlan} is not that of ${bridge.iface}`,
      "name the way out with --gateway",
    );
  if (bridge.gateway !== undefined && sameNetwork(bridge.gateway, address, bits)) return { bridge: bridge.iface, gateway: bridge.gateway };
  const [own] = (bridge.cidr ?? "").split("/");
  if (own && sameNetwork(own, address, bits)) return { bridge: bridge.iface, gateway: own };
  throw refuse(
    "E_USAGE",
    "--gateway is missing",
    `${bridge.iface} is not in the network of ${address}/${bits}`,
    "name the way out with --gateway, or another bridge with --bridge",
  );
}

/** The image: where it is, or what has to be fetched for it. */
export interface Image {
  readonly volid: string;
  readonly fetch: ImageFetch | null;
}

/** An image that Proxmox has to fetch from a URL into a file of a storage. */
export interface ImageFetch {
  readonly url: string;
  readonly storage: string;
  readonly file: string;
}

/** @param image a volume that is there (`local:import/debian.qcow2`), or a URL */
export function imageOf(image: string, storage: string, volumes: readonly string[]): Image {
  if (!/^https?:\/\//.test(image)) return { volid: image, fetch: null };
  const name = (new URL(image).pathname.split("/").at(-1) ?? "").replaceAll(/%20|[^a-zA-Z0-9.+=_-]/g, "_");
  // Proxmox knows what a file is by its ending; that of Ubuntu's says nothing.
  const file = /\.(qcow2|raw|vmdk)$/.test(name) ? name : `${name.replace(/\.(img|bin)$/, "") || "image"}.qcow2`;
  const volid = `${storage}:import/${file}`;
  return { volid, fetch: volumes.includes(volid) ? null : { url: image, storage, file } };
}

export interface Place {
  readonly node: string;
  readonly disks: string;
  readonly bridge: string;
  readonly gateway: string | null;
  readonly volid: string;
}

/**
 * The one call that claims the VMID and says all there is to say of the machine: a later change would give it new host keys.
 * @param run names the run that makes it, in the machine's notes
 * Sources: Proxmox's own qemu-server and the traps of Debian's cloud images under it.
 */
export function createParameters(
  settings: Settings,
  { disks, bridge, gateway, volid }: Place,
  keys: readonly PublicKey[],
  run: string,
): PveParameters {
  const { vmid, name, cores, memory, cpu, user, address, bits, vlan, mtu, hostpci } = settings;
  const net = ["virtio", `bridge=${bridge}`, ...(vlan === undefined ? [] : [`tag=${vlan}`]), ...(mtu === undefined ? [] : [`mtu=${mtu}`])];
  return {
    vmid,
    name,
    ostype: "l26",
    machine: "q35",
    cpu,
    sockets: 1,
    cores,
    numa: 1,
    memory,
    balloon: 0,
    scsihw: "virtio-scsi-single",
    scsi0: `${disks}:0,import-from=${volid},discard=on,iothread=1,ssd=1`,
    // Debian's cloud kernel never sees an IDE drive on q35.
    scsi1: `${disks}:cloudinit`,
    boot: "order=scsi0",
    // Without a serial port the first boot after a resize panics.
    serial0: "socket",
    net0: net.join(","),
    ipconfig0: [`ip=${address}/${bits}`, ...(gateway === null ? [] : [`gw=${gateway}`])].join(","),
    ciuser: user,
    // Encoded once here and once more as a form.
    sshkeys: encodeURIComponent(keys.map(({ line }) => line).join("\n")),
    // Else the first boot upgrades every package, for minutes.
    ciupgrade: 0,
    agent: "enabled=1",
    onboot: 1,
    tags: "llmgw",
    description: `Made by llmgw provision, run ${run}`,
    ...(hostpci.length > 0 && { bios: "ovmf", efidisk0: `${disks}:1,efitype=4m,pre-enrolled-keys=0` }),
    ...Object.fromEntries(hostpci.map((mapping, index) => [`hostpci${index}`, `mapping=${mapping},pcie=1`])),
  };
}

/** What a processor type other than the host's own costs, and the host's own. Measured on a Xeon E5-2680 v4. */
export function cpuNote(cpu: string): string | null {
  if (cpu.split(",")[0] === "host") return null;
  const words = ["1.5B 5.80 instead of 39.09", "3B 2.90 instead of 20.51", "7B 1.33 instead of 9.88"];
  return (
    `--cpu ${cpu} hides AVX2 and more from the engines: ${words.join(", ")} tokens/s, prompts 7.6 instead of 143.8 ` +
    `(Xeon E5-2680 v4). --cpu host has them all; it costs live migration to other processors`
  );
}
