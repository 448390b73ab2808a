import { fingerprintOf } from "../os/ssh-key.ts";

/** A public key, as a machine is given it. */
export interface PublicKey {
  /** `type base64 comment`, of harmless letters: Proxmox writes it into YAML as it is. */
  readonly line: string;
  /** As `ssh-keygen -l` shows it. */
  readonly fingerprint: string;
}

/** The fields of each type after its name, by their lengths in bytes where these are fixed. Sources: RFC 4253, 5656, 8709; PROTOCOL.u2f. */
const FIELDS: Readonly<Record<string, readonly (number | null)[]>> = {
  "ssh-ed25519": [32],
  "ssh-rsa": [null, null],
  "ecdsa-sha2-nistp256": [8, 65],
  "ecdsa-sha2-nistp384": [8, 97],
  "ecdsa-sha2-nistp521": [8, 133],
  "sk-ssh-ed25519@openssh.com": [32, null],
  "sk-ecdsa-sha2-nistp256@openssh.com": [8, 65, null],
};

/**
 * Reads authorized_keys or a public key file. Comments, blank lines, lines with options and what is no key are left out: a key
 * that may only do one thing must not become one that may do all, and Proxmox refuses all keys for one it cannot read.
 */
export function readPublicKeys(text: string): PublicKey[] {
  return text.split("\n").flatMap((whole) => {
    const [type = "", data = "", ...rest] = whole.trim().split(/\s+/);
    if (!Object.hasOwn(FIELDS, type)) return [];
    const blob = Buffer.from(data, "base64");
    if (blob.toString("base64") !== data || !isKeyOf(type, partsOf(blob))) return [];
    const comment = rest
      .join("-")
      .replaceAll(/[^A-Za-z0-9@._-]/g, "-")
      .slice(0, 64)
      .replace(/^-+/, "");
    return [{ line: `${type} ${data}${comment === "" ? "" : ` ${comment}`}`, fingerprint: fingerprintOf(blob) }];
  });
}

function isKeyOf(type: string, [name, ...fields]: readonly Buffer[]): boolean {
  const wanted = FIELDS[type] ?? [];
  if (name?.toString("latin1") !== type || fields.length !== wanted.length) return false;
  return wanted.every((length, index) => fields[index]?.length === (length ?? fields[index]?.length));
}

/** The fields of a key (RFC 4253, 6.6), the first is its type; none when it was cut. */
function partsOf(blob: Buffer): Buffer[] {
  const parts: Buffer[] = [];
  let at = 0;
  while (at + 4 <= blob.length) {
    const length = blob.readUInt32BE(at);
    parts.push(blob.subarray(at + 4, at + 4 + length));
    at += 4 + length;
  }
  return at === blob.length ? parts : [];
}

/** Each key once, in order. */
export function distinctKeys(keys: readonly PublicKey[]): PublicKey[] {
  return [...new Map(keys.map((key) => [key.fingerprint, key])).values()];
}
