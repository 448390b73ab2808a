import { isIPv4 } from "node:net";
import * as v from "valibot";
import { OperatorError } from "../protocol/errors.ts";
import { NodeId } from "../protocol/ids.ts";

const Text = v.pipe(v.string(), v.minLength(1));
const Whole = (least: number, most: number) => v.pipe(v.number(), v.integer(), v.minValue(least), v.maxValue(most));
const Duration = v.pipe(v.string(), v.regex(/^\d+(ms|s|m|h)?$/, "write a time such as 90s or 5m"));

/** What a machine is made of, and where; each key is also a flag (`-` for `_`) and a variable (`LLMGW_` and capitals). */
export const ProvisionFile = v.strictObject({
  vmid: v.optional(Whole(100, 999_999_999)),
  cores: v.optional(Whole(1, 512)),
  /** MiB. */
  memory: v.optional(Whole(512, 16_777_216)),
  /** GiB. */
  disk: v.optional(Whole(8, 65_536)),
  cpu: v.optional(Text),
  gateway: v.optional(v.pipe(v.string(), v.ipv4("an IPv4 address is needed"))),
  bridge: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9_]{0,14}$/, "not the name of a bridge"))),
  vlan: v.optional(Whole(1, 4_094)),
  mtu: v.optional(Whole(576, 65_520)),
  storage: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9._-]*$/, "not the name of a storage"))),
  image: v.optional(Text),
  image_checksum: v.optional(v.pipe(v.string(), v.regex(/^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$/, "write sha256:HEX or sha512:HEX"))),
  ssh_keys: v.optional(Text),
  user: v.optional(v.pipe(v.string(), v.regex(/^[a-z_][a-z0-9_-]{0,31}$/, "not the name of a user"))),
  hostpci: v.optional(v.array(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9_-]*$/, "not the name of a PCI mapping")))),
  pve_host: v.optional(Text),
  pve_node: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$/, "not the name of a Proxmox node"))),
  pve_token_file: v.optional(Text),
  pve_user: v.optional(v.pipe(v.string(), v.regex(/^[^@\s]+@[^@\s]+$/, "write USER@REALM"))),
  pve_password_file: v.optional(Text),
  pve_ca: v.optional(Text),
  pve_fingerprint: v.optional(
    v.pipe(v.string(), v.regex(/^([0-9A-Fa-f]{2}:){31}[0-9A-Fa-f]{2}$/, "write a SHA-256 fingerprint, AA:BB:...")),
  ),
  timeout: v.optional(Duration),
});
export type ProvisionFile = v.InferOutput<typeof ProvisionFile>;

const NUMBERS: readonly (keyof ProvisionFile)[] = ["vmid", "cores", "memory", "disk", "vlan", "mtu"];

/** Debian 13's generic cloud image; what it was published with. Source: its folder's SHA512SUMS. */
export const DEFAULT_IMAGE = {
  url: "https://cloud.debian.org/images/cloud/trixie/20260712-2537/debian-13-genericcloud-amd64-20260712-2537.qcow2",
  checksum: [
    "sha512:7ae53e9dbee282bfc16f289dec483dde3a8598769c38a267948310f7a2a52c66",
    "2620198603bc52c142627efba379863d16079698a10b34102d55bcedd40e8d32",
  ].join(""),
} as const;

/** All that is known of the machine before Proxmox is asked. */
export interface Settings extends Omit<ProvisionFile, "vmid" | "cores" | "memory" | "disk" | "cpu" | "user" | "image" | "hostpci"> {
  readonly name: string;
  readonly address: string;
  /** Bits of its network. */
  readonly bits: number;
  readonly vmid: number;
  readonly cores: number;
  readonly memory: number;
  readonly disk: number;
  readonly cpu: string;
  readonly user: string;
  readonly image: string;
  readonly hostpci: readonly string[];
}

/**
 * Lays flags over the environment over a file.
 * @param flags by key, undefined where not given
 * @throws OperatorError E_USAGE when something cannot be so
 */
export function settingsOf(
  who: { readonly name: string; readonly ip: string },
  flags: Readonly<Record<string, unknown>>,
  env: Readonly<Record<string, string | undefined>>,
  file: ProvisionFile,
): Settings {
  const merged: Record<string, unknown> = { ...file };
  for (const key of Object.keys(ProvisionFile.entries) as (keyof ProvisionFile)[]) {
    const text = env[`LLMGW_${key.toUpperCase()}`];
    if (text !== undefined && text !== "") merged[key] = fromText(key, text);
    const given = flags[key];
    if (given !== undefined && !(Array.isArray(given) && given.length === 0)) merged[key] = given;
  }
  const read = v.safeParse(ProvisionFile, merged);
  if (!read.success) {
    const [issue] = read.issues;
    throw wrong(`--${(v.getDotPath(issue) ?? "").replace(/\.\d+$/, "").replaceAll("_", "-")} is not usable`, issue.message);
  }
  const { output } = read;
  if (!v.safeParse(NodeId, who.name).success)
    throw wrong(`"${who.name}" cannot be a node`, "a name takes 1-63 of a-z 0-9 -, not starting or ending with -");
  const { address, bits } = networkOf(who.ip);
  const image = output.image ?? DEFAULT_IMAGE.url;
  const checksum = output.image_checksum ?? (image === DEFAULT_IMAGE.url ? DEFAULT_IMAGE.checksum : undefined);
  return {
    ...output,
    ...(checksum !== undefined && { image_checksum: checksum }),
    name: who.name,
    address,
    bits,
    vmid: output.vmid ?? vmidOf(address),
    cores: output.cores ?? 8,
    memory: output.memory ?? 32_768,
    disk: output.disk ?? 60,
    cpu: output.cpu ?? "host",
    user: output.user ?? "root",
    image,
    hostpci: output.hostpci ?? [],
  };
}

function fromText(key: keyof ProvisionFile, text: string): unknown {
  if (NUMBERS.includes(key)) return Number(text);
  return key === "hostpci" ? text.split(/[,\s]+/) : text;
}

const wrong = (what: string, why: string) => new OperatorError("E_USAGE", what, why, "see llmgw provision --help");

/** The address and network of `10.0.0.145/24`. @throws OperatorError E_USAGE */
export function networkOf(cidr: string): { address: string; bits: number } {
  const [address = "", length = ""] = cidr.split("/");
  const bits = Number(length);
  if (!isIPv4(address) || !/^\d{1,2}$/.test(length) || bits < 1 || bits > 31)
    throw wrong(`--ip cannot be "${cidr}"`, "it is an IPv4 address with the bits of its network, as in 10.0.0.145/24");
  return { address, bits };
}

/** The number a machine gets when none is named: the last part of its address. @throws OperatorError E_USAGE */
export function vmidOf(address: string): number {
  const last = Number(address.split(".").at(-1));
  if (last >= 100) return last;
  throw wrong("--vmid is missing", `the last part of ${address} would be VMID ${last}, and Proxmox begins at 100`);
}

/** Whether two addresses are in one network. */
export function sameNetwork(a: string, b: string, bits: number): boolean {
  const number = (address: string) => address.split(".").reduce((sum, part) => sum * 256 + Number(part), 0);
  const size = 2 ** (32 - bits);
  return Math.floor(number(a) / size) === Math.floor(number(b) / size);
}
