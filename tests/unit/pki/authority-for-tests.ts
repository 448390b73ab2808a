import "reflect-metadata";
import { randomBytes } from "node:crypto";
import * as x509 from "@peculiar/x509";
import { issueWithKey, makeAuthority, serialOf } from "../../../src/pki/authority.ts";
import type { Circumstances, KeyedCertificate, Subject } from "../../../src/pki/authority.ts";
import { makeIdentity } from "../../../src/pki/identity.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import type { Role } from "../../../src/protocol/ids.ts";

const FILES = { ca: "ca.crt", cert: "cert", key: "key" };
const DAY_MS = 86_400_000;
const ALGORITHM = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" } as const;
const at = (now_ms: number): Circumstances => ({ now_ms, random: (bytes) => randomBytes(bytes) });

/** A throw-away authority and the identities it gives out, for tests. */
export interface TestAuthority {
  readonly ca: KeyedCertificate;
  /** An identity for loopback; `more` overrides what it says, `at_ms` when it was issued. */
  identity(role: Role, name: string, more?: Partial<Subject>, at_ms?: number): Promise<Identity>;
}

export async function testAuthority(name = "test authority"): Promise<TestAuthority> {
  const ca = await makeAuthority(name, at(Date.now()));
  return {
    ca,
    identity: async (role, identity, more = {}, at_ms = Date.now()) =>
      makeIdentity({ ca: ca.cert, ...(await issued(ca, role, identity, more, at_ms)) }, FILES),
  };
}

/** A certificate signed by whatever key is given, an authority's or not. */
export function issued(
  signer: KeyedCertificate,
  role: Role,
  name: string,
  more: Partial<Subject> = {},
  at_ms = Date.now(),
): Promise<KeyedCertificate> {
  return issueWithKey(signer, { name, role, ips: ["127.0.0.1"], dns: [name], days: 30, ...more }, at(at_ms));
}

export interface Odd {
  /** Attributes of its subject, as X.509 writes them. */
  readonly subject: string;
  /** Extended key usages; none at all when absent. */
  readonly usages?: readonly string[];
  readonly authority?: boolean;
}

/** A certificate as `llmgw ca` never issues it: signed by `signer`, or by itself when that is null. */
export async function oddCertificate(
  signer: KeyedCertificate | null,
  { subject, usages, authority = false }: Odd,
): Promise<KeyedCertificate> {
  const keys = await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"]);
  const issuer = signer && new x509.X509Certificate(signer.cert);
  const key = signer && x509.PemConverter.decode(signer.key)[0];
  const certificate = await x509.X509CertificateGenerator.create({
    serialNumber: serialOf(at(Date.now())),
    subject,
    issuer: issuer?.subject ?? subject,
    notBefore: new Date(Date.now() - DAY_MS),
    notAfter: new Date(Date.now() + DAY_MS),
    signingAlgorithm: ALGORITHM,
    publicKey: keys.publicKey,
    signingKey: key ? await crypto.subtle.importKey("pkcs8", key, ALGORITHM, true, ["sign"]) : keys.privateKey,
    extensions: [
      new x509.BasicConstraintsExtension(authority, undefined, true),
      ...(usages ? [new x509.ExtendedKeyUsageExtension([...usages])] : []),
    ],
  });
  const secret = x509.PemConverter.encode(await crypto.subtle.exportKey("pkcs8", keys.privateKey), "PRIVATE KEY");
  return { cert: `${certificate.toString("pem")}\n`, key: `${secret}\n` };
}
