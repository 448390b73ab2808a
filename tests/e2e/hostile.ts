/** Certificates that must not be admitted, and how a test tries them. */
import type { KeyedCertificate } from "../../src/pki/authority.ts";
import type { Role } from "../../src/protocol/ids.ts";
import { issue, strangeAuthority } from "./authority.ts";

const DAY_MS = 86_400_000;

/** The authority of a fleet, and one it knows nothing of but whose name is the same. */
export interface Authorities {
  readonly own: KeyedCertificate;
  readonly other: KeyedCertificate;
}

/** One way of not being who one should be. Null = shows no certificate at all. */
export interface Imposture {
  readonly what: string;
  readonly make: (authorities: Authorities, role: Role, name: string) => Promise<KeyedCertificate | null>;
}

export const IMPOSTURES: readonly Imposture[] = [
  { what: "no certificate", make: async () => null },
  { what: "another authority", make: ({ other }, role, name) => issue(other, { role, name }) },
  { what: "signed by itself", make: async (_, role, name) => issue(await strangeAuthority(name), { role, name }) },
  { what: "expired", make: ({ own }, role, name) => issue(own, { role, name, at_ms: Date.now() - 40 * DAY_MS }) },
  { what: "not yet valid", make: ({ own }, role, name) => issue(own, { role, name, at_ms: Date.now() + 30 * DAY_MS }) },
];

export interface Try {
  readonly url: string;
  readonly method?: string;
  readonly headers?: Record<string, string>;
  readonly body?: string;
}

/** Asks with a certificate and says the answer's status, or 0 when there was none. The far side's own certificate is not judged. */
export async function statusOf(shown: KeyedCertificate | null, { url, ...init }: Try): Promise<number> {
  const tls = { rejectUnauthorized: false, ...shown };
  try {
    const response = await fetch(url, { ...init, tls, signal: AbortSignal.timeout(20_000), keepalive: false } as RequestInit);
    await response.arrayBuffer();
    return response.status;
  } catch {
    return 0;
  }
}

/** The same items in another order. */
export function shuffled<T>(items: readonly T[]): T[] {
  return items
    .map((item) => ({ item, place: Math.random() }))
    .toSorted((left, right) => left.place - right.place)
    .map(({ item }) => item);
}
