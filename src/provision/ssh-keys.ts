import { fingerprintOf } from "../os/ssh-key.ts";

/** A public key, as a machine is given it. */
export interface PublicKey {
  /** `type base64 comment`, of harmless letters: Proxmox writes it into YAML as it is. */
  readonly line: string;
  /** As `ssh-keygen -l` shows it. */
  readonly fingerprint: string;
}

const TYPES = ["ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"];
const SECURITY_KEYS = ["sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"];

/**
 * Reads authorized_keys or a public key file. Comments, blank lines, lines with options and what is no key are left out: a key
 * that may only do one thing must not become one that may do all.
 */
export function readPublicKeys(text: string): PublicKey[] {
  return text.split("\n").flatMap((whole) => {
    const [type = "", data = "", ...rest] = whole.trim().split(/\s+/);
    if (![...TYPES, ...SECURITY_KEYS].includes(type) || !/^[A-Za-z0-9+/]+={0,2}$/.test(data)) return [];
    const blob = Buffer.from(data, "base64");
    if (partsOf(blob)[0] !== type) return [];
    const comment = rest
      .join("-")
      .replaceAll(/[^A-Za-z0-9@._-]/g, "-")
      .slice(0, 64)
      .replace(/^-+/, "");
    return [{ line: `${type} ${data}${comment === "" ? "" : ` ${comment}`}`, fingerprint: fingerprintOf(blob) }];
  });
}

/** The fields of a key (RFC 4253, 6.6), the first is its type; none when it was cut. */
function partsOf(blob: Buffer): string[] {
  const parts: string[] = [];
  let at = 0;
  while (at + 4 <= blob.length) {
    const length = blob.readUInt32BE(at);
    parts.push(blob.subarray(at + 4, at + 4 + length).toString("latin1"));
    at += 4 + length;
  }
  return at === blob.length && parts.length > 1 ? parts : [];
}

/** Each key once, in order. */
export function distinctKeys(keys: readonly PublicKey[]): PublicKey[] {
  return [...new Map(keys.map((key) => [key.fingerprint, key])).values()];
}
