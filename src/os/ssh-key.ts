import { createHash } from "node:crypto";

/**
 * The fingerprint of a public key as ssh shows it: `SHA256:` and base64 without its end.
 * @param blob the key as it stands, decoded, in authorized_keys and known_hosts (RFC 4253, 6.6)
 */
export function fingerprintOf(blob: Uint8Array): string {
  return `SHA256:${createHash("sha256").update(blob).digest("base64").replace(/=+$/, "")}`;
}
