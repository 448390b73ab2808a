import { randomBytes } from "node:crypto";
import { issueWithKey, makeAuthority } from "../../../src/pki/authority.ts";
import type { KeyedCertificate, Subject } from "../../../src/pki/authority.ts";
import { makeIdentity } from "../../../src/pki/identity.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import type { Role } from "../../../src/protocol/ids.ts";

const FILES = { ca: "ca.crt", cert: "cert", key: "key" };

/** A throw-away authority and the identities it gives out, for tests. */
export interface TestAuthority {
  readonly ca: KeyedCertificate;
  /** An identity for loopback; `more` overrides what it says, `at_ms` when it was issued. */
  identity(role: Role, name: string, more?: Partial<Subject>, at_ms?: number): Promise<Identity>;
}

export async function testAuthority(name = "test authority"): Promise<TestAuthority> {
  const ca = await makeAuthority(name, { now_ms: Date.now(), random: (bytes) => randomBytes(bytes) });
  return {
    ca,
    identity: async (role, identity, more = {}, at_ms = Date.now()) => {
      const subject = { name: identity, role, ips: ["127.0.0.1"], dns: [identity], days: 30, ...more };
      const issued = await issueWithKey(ca, subject, { now_ms: at_ms, random: (bytes) => randomBytes(bytes) });
      return makeIdentity({ ca: ca.cert, ...issued }, FILES);
    },
  };
}
