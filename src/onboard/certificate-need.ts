import { X509Certificate } from "node:crypto";
import { CERTIFICATE_DAYS, readRequest } from "../pki/authority.ts";
import { CLIENT_AUTH, faultOf, readCertificate, type Certificate } from "../pki/certificate.ts";
import type { NodeFacts } from "./facts.ts";

/** A certificate is renewed once this share of its life is over. */
const RENEW_AFTER = 2 / 3;
const DAY_MS = 86_400_000;

export interface CertificateWish {
  readonly node: string;
  readonly address: string;
  /** The authority's certificate, PEM. */
  readonly ca: string;
  readonly now_ms: number;
  /** Renew whatever is there. */
  readonly renew: boolean;
}

/** Why the node needs a new certificate; null when the one it has will do. */
export async function certificateNeed(facts: Pick<NodeFacts, "cert" | "key" | "csr">, wish: CertificateWish): Promise<string | null> {
  if (!facts.key) return "it has no key yet";
  if (facts.cert === null) return "it has no certificate yet";
  const certificate = readCertificate(facts.cert);
  if ("unreadable" in certificate) return `its certificate: ${certificate.unreadable}`;
  const fault = faultOf(certificate, new X509Certificate(wish.ca), CLIENT_AUTH, wish.now_ms);
  if (fault !== null) return `its certificate: ${fault}`;
  if (certificate.role !== "node" || certificate.name !== wish.node)
    return `its certificate is that of ${certificate.role} ${certificate.name}`;
  if (!addressesOf(certificate).includes(wish.address)) return `its certificate does not name ${wish.address}`;
  if (facts.csr !== null) {
    const request = await readRequest(facts.csr);
    const shown = certificate.x509.publicKey.export({ type: "spki", format: "der" });
    if (!("unreadable" in request) && !request.public_key.equals(shown)) return "its certificate is not that of its key";
  }
  const { issued_ms, expires_ms } = certificate;
  const left = `${Math.floor((expires_ms - wish.now_ms) / DAY_MS)} of ${CERTIFICATE_DAYS} days are left`;
  if (wish.renew) return `--renew (${left})`;
  return wish.now_ms > issued_ms + (expires_ms - issued_ms) * RENEW_AFTER ? left : null;
}

function addressesOf({ x509 }: Certificate): string[] {
  const names = (x509.subjectAltName ?? "").split(", ");
  return names.flatMap((name) => (name.startsWith("IP Address:") ? [name.slice("IP Address:".length)] : []));
}
