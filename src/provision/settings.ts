import { isIPv4 } from "node:net";
import * as v from "valibot";
import { ProvisionFile } from "../protocol/config.ts";
import { OperatorError } from "../protocol/errors.ts";
import { NodeId } from "../protocol/ids.ts";

const NUMBERS: readonly (keyof ProvisionFile)[] = ["vmid", "cores", "memory", "disk", "vlan", "mtu"];

/** Debian 13's generic cloud image; what it was published with. Source: its folder's SHA512SUMS. */
const DEFAULT_IMAGE = {
  url: "https://cloud.debian.org/images/cloud/trixie/20260914-2601/debian-13-genericcloud-amd64-20260914-2601.qcow2",
  checksum: [
    "sha512:95e110dfcdbd0ed8a82a75ed9579802f9950cabf51a810dcc6388e81bc778188",
    "713878b9f28d583a0ea602fbf48b35996ae9ad37f584166d8fbd6489df248f53",
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
  const said = new Map<string, string>();
  for (const key of Object.keys(ProvisionFile.entries) as (keyof ProvisionFile)[]) {
    const variable = `LLMGW_${key.toUpperCase()}`;
    const text = env[variable];
    if (text !== undefined && text !== "") {
      merged[key] = fromText(key, text);
      said.set(key, variable);
    }
    const given = flags[key];
    if (given !== undefined && !(Array.isArray(given) && given.length === 0)) {
      merged[key] = given;
      said.set(key, `--${key.replaceAll("_", "-")}`);
    }
  }
  const read = v.safeParse(ProvisionFile, merged);
  if (!read.success) {
    const [issue] = read.issues;
    const [key = ""] = (v.getDotPath(issue) ?? "").split(".");
    throw wrong(`${said.get(key) ?? key} is not usable`, issue.message.replace(/^Invalid [^:]*: E/, "e"));
  }
  const { output } = read;
  if (!v.safeParse(NodeId, who.name).success)
    throw wrong(`"${who.name}" cannot be a node`, "a name takes 1-63 of a-z 0-9 -, not starting or ending with -");
  const { address, bits } = networkOf(who.ip);
  if (output.gateway !== undefined) refuseGateway(output.gateway, address, bits, said.get("gateway") ?? "gateway");
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
  // What is no number is left as it is, for the schema to refuse.
  if (NUMBERS.includes(key)) return /^\d+$/.test(text) ? Number(text) : text;
  return key === "hostpci" ? text.split(/[,\s]+/).filter((word) => word !== "") : text;
}

const wrong = (what: string, why: string) => new OperatorError("E_USAGE", what, why, "see llmgw provision --help");

/** The address and network of `10.0.0.145/24`. @throws OperatorError E_USAGE */
export function networkOf(cidr: string): { address: string; bits: number } {
  const [, address = "", length = ""] = /^([\d.]+)\/(\d{1,2})$/.exec(cidr) ?? [];
  const bits = Number(length);
  const refused = (why: string) => wrong(`--ip cannot be "${shortened(cidr)}"`, why);
  if (!isIPv4(address) || bits < 1 || bits > 31) throw refused("it is an IPv4 address with the bits of its network, as in 10.0.0.145/24");
  if (/^(0|2[45]\d)\./.test(address)) throw refused("no machine can have an address of that range");
  const role = roleOf(address, bits);
  if (role !== null) throw refused(`${address} is ${role} of that network`);
  return { address, bits };
}

/** What an address is when no machine can have it; networks of two addresses have no such. */
function roleOf(address: string, bits: number): string | null {
  if (bits >= 31) return null;
  const size = 2 ** (32 - bits);
  const part = numberOf(address) % size;
  return part === 0 ? "the number" : part === size - 1 ? "the broadcast address" : null;
}

/** @throws OperatorError E_USAGE when nothing can be reached by way of it */
function refuseGateway(gateway: string, address: string, bits: number, named: string): void {
  const role = roleOf(gateway, bits);
  const why =
    gateway === address
      ? "it is the machine's own address"
      : !sameNetwork(gateway, address, bits)
        ? `it is not in the network of ${address}/${bits}`
        : role === null
          ? null
          : `it is ${role} of that network`;
  if (why !== null) throw wrong(`${named} cannot be ${gateway}`, why);
}

const shortened = (text: string) => (text.length > 60 ? `${text.slice(0, 60)}...` : text);

/** The number a machine gets when none is named: the last part of its address. @throws OperatorError E_USAGE */
export function vmidOf(address: string): number {
  const last = Number(address.split(".").at(-1));
  if (last >= 100) return last;
  throw wrong("--vmid is missing", `the last part of ${address} would be VMID ${last}, and Proxmox begins at 100`);
}

const numberOf = (address: string) => address.split(".").reduce((sum, part) => sum * 256 + Number(part), 0);

/** Whether two addresses are in one network. */
export function sameNetwork(a: string, b: string, bits: number): boolean {
  const size = 2 ** (32 - bits);
  return Math.floor(numberOf(a) / size) === Math.floor(numberOf(b) / size);
}
