/** Certificates as an authority could issue them, and as no command would. */
import { randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { issueWithKey, makeAuthority, type KeyedCertificate } from "../../src/pki/authority.ts";
import type { Role } from "../../src/protocol/ids.ts";

const random = (bytes: number) => new Uint8Array(randomBytes(bytes));

export interface Wanted {
  readonly role: Role;
  readonly name: string;
  /** When it was issued; now when absent. */
  readonly at_ms?: number;
}

/** Issues a certificate for 30 days. */
export function issue(authority: KeyedCertificate, { role, name, at_ms = Date.now() }: Wanted): Promise<KeyedCertificate> {
  return issueWithKey(authority, { name, role, ips: ["127.0.0.1"], dns: [], days: 30 }, { now_ms: at_ms, random });
}

/** An authority nobody trusts. */
export const strangeAuthority = (name = "llmgw"): Promise<KeyedCertificate> => makeAuthority(name, { now_ms: Date.now(), random });

/** The authority in a folder of `llmgw ca`. */
export async function readAuthority(folder: string): Promise<KeyedCertificate> {
  const [cert, key] = await Promise.all(["ca.crt", "ca.key"].map((name) => readFile(join(folder, name), "utf8")));
  return { cert: cert as string, key: key as string };
}
