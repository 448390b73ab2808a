/**
 * pki/ is who is who: the authority that issues certificates, the identities made from them, and the two ends of
 * every mutual TLS link (listener.ts, dial.ts) with their own checks. It does not know what is said on a link.
 */
import { X509Certificate } from "node:crypto";
import type { Role } from "../protocol/ids.ts";
import { ROLES } from "../protocol/ids.ts";

/** `O=llmgw:<role>` of a subject. */
const ROLE_PREFIX = "llmgw:";
/** Extended key usages (RFC 5280 4.2.1.12). */
export const SERVER_AUTH = "1.3.6.1.5.5.7.3.1";
export const CLIENT_AUTH = "1.3.6.1.5.5.7.3.2";

/** What llmgw reads of a certificate. Nothing here says that it is trusted. */
export interface Certificate {
  readonly x509: X509Certificate;
  /** Common name: the node id of a node. */
  readonly name: string;
  readonly role: Role;
  /** 32 lower-case hex digits; the first 12 are the issue time in ms. */
  readonly serial: string;
  readonly issued_ms: number;
  readonly starts_ms: number;
  readonly expires_ms: number;
  readonly usages: readonly string[];
}

/** The organisation a role is written as. */
export function organisationOf(role: Role): string {
  return `${ROLE_PREFIX}${role}`;
}

/** The role an organisation names, or null. */
function roleOf(organisation: string | undefined): Role | null {
  if (!organisation?.startsWith(ROLE_PREFIX)) return null;
  const word = organisation.slice(ROLE_PREFIX.length);
  return ROLES.find((role) => role === word) ?? null;
}

/** The one value of a subject's attribute, or undefined when it is missing or there are several. */
function attribute(subject: string, key: string): string | undefined {
  const values = subject.split("\n").filter((line) => line.startsWith(`${key}=`));
  return values.length === 1 ? values[0]?.slice(key.length + 1) : undefined;
}

/**
 * Reads a certificate.
 * @param source PEM text or DER bytes
 * @returns what it says, or why it cannot be one of llmgw's
 */
export function readCertificate(source: string | Uint8Array): Certificate | { readonly unreadable: string } {
  let x509: X509Certificate;
  try {
    x509 = new X509Certificate(source);
  } catch {
    return { unreadable: "not a certificate" };
  }
  const name = attribute(x509.subject, "CN");
  const role = roleOf(attribute(x509.subject, "O"));
  if (!name) return { unreadable: "its subject has no single common name" };
  if (!role) return { unreadable: `its subject has no role of llmgw (O=${ROLE_PREFIX}…)` };
  const serial = x509.serialNumber.toLowerCase().padStart(32, "0");
  return {
    x509,
    name,
    role,
    serial,
    issued_ms: Number.parseInt(serial.slice(0, 12), 16),
    starts_ms: Date.parse(x509.validFrom),
    expires_ms: Date.parse(x509.validTo),
    usages: x509.keyUsage ?? [],
  };
}

/** Why a certificate is not one of this authority's, within its dates and meant for this use; null when it is. */
export function faultOf(certificate: Certificate, authority: X509Certificate, usage: string, now_ms: number): string | null {
  const { x509, starts_ms, expires_ms } = certificate;
  if (!x509.checkIssued(authority) || !x509.verify(authority.publicKey)) return "it was issued by another authority";
  if (x509.ca) return "it is an authority's certificate";
  // Written so that a date nobody can read (NaN) is a fault too.
  if (!(now_ms >= starts_ms)) return `it is not valid before ${x509.validFrom}: check the clocks`;
  if (!(now_ms < expires_ms)) return `it expired at ${x509.validTo}`;
  if (!certificate.usages.includes(usage)) return `it is not meant for ${usage === CLIENT_AUTH ? "clients" : "servers"}`;
  return null;
}
