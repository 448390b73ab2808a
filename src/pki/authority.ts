import "reflect-metadata";
import "./reflect.ts";
import * as x509 from "@peculiar/x509";
import type { Role } from "../protocol/ids.ts";
import { CLIENT_AUTH, organisationOf, SERVER_AUTH } from "./certificate.ts";

const ALGORITHM = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" } as const;
const DAY_MS = 86_400_000;
/** The authority lives 10 years, everything else one. */
const AUTHORITY_DAYS = 3_653;
export const CERTIFICATE_DAYS = 365;
/** Certificates start this long before they were issued, for clocks that are behind. */
const BACKDATE_MS = DAY_MS;

/** Key usages per role: nodes and servers are both ends of links, the others only ever call. */
const USAGES: Readonly<Record<Role, readonly string[]>> = {
  node: [SERVER_AUTH, CLIENT_AUTH],
  server: [SERVER_AUTH, CLIENT_AUTH],
  gateway: [CLIENT_AUTH],
  admin: [CLIENT_AUTH],
  viewer: [CLIENT_AUTH],
};

/** A certificate with its key, both PEM. */
export interface KeyedCertificate {
  readonly cert: string;
  readonly key: string;
}

/** Time and chance come in, so that tests can fix them. */
export interface Circumstances {
  readonly now_ms: number;
  /** Fills with random bytes. */
  random(bytes: number): Uint8Array;
}

/** Whom a certificate is for. */
export interface Subject {
  readonly name: string;
  readonly role: Role;
  /** IP addresses and host names it may be reached at. */
  readonly ips: readonly string[];
  readonly dns: readonly string[];
  readonly days: number;
}

/** 48 bits of issue time in ms and 80 random bits, as 32 hex digits: later certificates have greater serials. */
export function serialOf({ now_ms, random }: Circumstances): string {
  return now_ms.toString(16).padStart(12, "0") + Buffer.from(random(10)).toString("hex");
}

/** Makes a new authority: a key and its self-signed certificate. */
export async function makeAuthority(name: string, circumstances: Circumstances): Promise<KeyedCertificate> {
  const keys = await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"]);
  const certificate = await x509.X509CertificateGenerator.createSelfSigned({
    serialNumber: serialOf(circumstances),
    name: [{ O: ["llmgw:ca"] }, { CN: [name] }],
    ...validity(circumstances.now_ms, AUTHORITY_DAYS),
    signingAlgorithm: ALGORITHM,
    keys,
    extensions: [
      new x509.BasicConstraintsExtension(true, 0, true),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.keyCertSign | x509.KeyUsageFlags.cRLSign, true),
      await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
    ],
  });
  return { cert: pem(certificate), key: await keyPem(keys.privateKey) };
}

/** Issues a certificate together with a new key. */
export async function issueWithKey(authority: KeyedCertificate, subject: Subject, circumstances: Circumstances): Promise<KeyedCertificate> {
  const keys = await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"]);
  return { cert: await issue(authority, subject, keys.publicKey, circumstances), key: await keyPem(keys.privateKey) };
}

/** Issues a certificate for a key that stays where it was made. */
export async function issueForRequest(
  authority: KeyedCertificate,
  subject: Subject,
  csr: string,
  circumstances: Circumstances,
): Promise<string> {
  return issue(authority, subject, await new x509.Pkcs10CertificateRequest(csr).publicKey.export(), circumstances);
}

async function issue(authority: KeyedCertificate, subject: Subject, publicKey: CryptoKey, circumstances: Circumstances): Promise<string> {
  const issuer = new x509.X509Certificate(authority.cert);
  const { name, role, ips, dns, days } = subject;
  const names = [...dns.map((value) => ({ type: "dns" as const, value })), ...ips.map((value) => ({ type: "ip" as const, value }))];
  const certificate = await x509.X509CertificateGenerator.create({
    serialNumber: serialOf(circumstances),
    subject: [{ O: [organisationOf(role)] }, { CN: [name] }],
    issuer: issuer.subject,
    ...validity(circumstances.now_ms, days),
    signingAlgorithm: ALGORITHM,
    publicKey,
    signingKey: await readKey(authority.key),
    extensions: [
      new x509.BasicConstraintsExtension(false, undefined, true),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.digitalSignature, true),
      new x509.ExtendedKeyUsageExtension([...USAGES[role]]),
      ...(names.length > 0 ? [new x509.SubjectAlternativeNameExtension(names)] : []),
      await x509.SubjectKeyIdentifierExtension.create(publicKey),
      await x509.AuthorityKeyIdentifierExtension.create(issuer.publicKey),
    ],
  });
  return pem(certificate);
}

/** A request for a certificate, signed with the key it is for. PEM. */
export async function makeRequest(name: string, role: Role, key: string): Promise<string> {
  const privateKey = await readKey(key);
  const request = await x509.Pkcs10CertificateRequestGenerator.create({
    name: [{ O: [organisationOf(role)] }, { CN: [name] }],
    keys: { privateKey, publicKey: await publicKeyOf(privateKey) },
    signingAlgorithm: ALGORITHM,
  });
  return `${request.toString("pem")}\n`;
}

/** What a request says once its signature is checked: the common name, and the public key (SPKI, DER). */
type CertificateRequest = { readonly name: string; readonly public_key: Buffer };

/** Reads a request; says why when it is not one signed with a P-256 key of its own. */
export async function readRequest(csr: string): Promise<CertificateRequest | { readonly unreadable: string }> {
  try {
    const request = new x509.Pkcs10CertificateRequest(csr);
    const names = request.subjectName.getField("CN");
    const [name] = names;
    if (name === undefined || names.length !== 1) return { unreadable: "it has no single common name" };
    const key = await request.publicKey.export();
    if ((key.algorithm as { namedCurve?: string }).namedCurve !== "P-256") return { unreadable: "its key is not ECDSA P-256" };
    const public_key = Buffer.from(request.publicKey.rawData);
    return (await request.verify()) ? { name, public_key } : { unreadable: "its signature is not that of its key" };
  } catch {
    return { unreadable: "not a certificate request in PEM form" };
  }
}

/** A new private key, PEM (PKCS #8). */
export async function makeKey(): Promise<string> {
  return keyPem((await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"])).privateKey);
}

function validity(now_ms: number, days: number): { notBefore: Date; notAfter: Date } {
  return { notBefore: new Date(now_ms - BACKDATE_MS), notAfter: new Date(now_ms + days * DAY_MS) };
}

function pem(certificate: x509.X509Certificate): string {
  return `${certificate.toString("pem")}\n`;
}

async function keyPem(key: CryptoKey): Promise<string> {
  return `${x509.PemConverter.encode(await crypto.subtle.exportKey("pkcs8", key), "PRIVATE KEY")}\n`;
}

async function readKey(key: string): Promise<CryptoKey> {
  const [der] = x509.PemConverter.decode(key);
  if (!der) throw new Error("not a private key");
  return crypto.subtle.importKey("pkcs8", der, ALGORITHM, true, ["sign"]);
}

async function publicKeyOf(key: CryptoKey): Promise<CryptoKey> {
  const { d: _secret, key_ops: _use, ...rest } = await crypto.subtle.exportKey("jwk", key);
  return crypto.subtle.importKey("jwk", { ...rest, key_ops: ["verify"] }, ALGORITHM, true, ["verify"]);
}
