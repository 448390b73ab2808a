import { X509Certificate } from "node:crypto";
import type { ErrorCode } from "../protocol/errors.ts";
import type { Role } from "../protocol/ids.ts";
import type { Revocation } from "../protocol/plan.ts";
import { CLIENT_AUTH, faultOf, readCertificate } from "./certificate.ts";

/** Who is at the other end of a link, as its certificate proves. */
export interface Peer {
  readonly name: string;
  readonly role: Role;
  readonly serial: string;
  readonly issued_ms: number;
  readonly expires_ms: number;
  /** Address it came from. */
  readonly address: string;
}

/** Why a certificate was not admitted, and what is known of it for the log. */
interface Refusal {
  readonly refused: string;
  readonly code: ErrorCode;
  readonly name: string;
  readonly role: Role | "";
  readonly serial: string;
}

const UNKNOWN = { name: "", role: "", serial: "" } as const;

const newestKey = (role: Role, name: string): string => `${role}/${name}`;

/**
 * Decides whom to admit: the authority's signature, dates, use, role, revocations, and that no newer certificate of
 * the same name has been seen. Every connection and every request is asked anew, since a resumed TLS session is not
 * verified again and a certificate may have been revoked since.
 */
export class Trust {
  readonly #authority: X509Certificate;
  #revoked = new Map<string, number>();
  readonly #newest = new Map<string, string>();

  /** @param ca the authority's certificate, PEM */
  constructor(ca: string) {
    this.#authority = new X509Certificate(ca);
  }

  /** Replaces the list of revocations. */
  setRevocations(list: readonly Revocation[]): void {
    this.#revoked = new Map();
    for (const { name, until_ms } of list) this.#revoked.set(name, Math.max(until_ms, this.#revoked.get(name) ?? 0));
  }

  /** The newest serial seen of a name; what a restarted server puts back. */
  setNewest(role: Role, name: string, serial: string): void {
    const key = newestKey(role, name);
    if (serial > (this.#newest.get(key) ?? "")) this.#newest.set(key, serial);
  }

  /** @param source the peer's certificate, DER or PEM; null when it showed none */
  admit(source: string | Uint8Array | null, roles: readonly Role[], address: string, now_ms: number): Peer | Refusal {
    if (source === null) return { refused: "it showed no certificate", code: "E_TLS", ...UNKNOWN };
    const certificate = readCertificate(source);
    if ("unreadable" in certificate) return { refused: certificate.unreadable, code: "E_TLS", ...UNKNOWN };
    const { name, role, serial, issued_ms, expires_ms } = certificate;
    const refuse = (refused: string, code: ErrorCode): Refusal => ({ refused, code, name, role, serial });
    const fault = faultOf(certificate, this.#authority, CLIENT_AUTH, now_ms);
    if (fault) return refuse(fault, "E_TLS");
    if (!roles.includes(role)) return refuse(`its role is ${role}, this door is for ${roles.join(", ")}`, "E_NOT_ALLOWED");
    if (issued_ms <= (this.#revoked.get(name) ?? -1)) return refuse("it was revoked", "E_REVOKED");
    const newest = this.#newest.get(newestKey(role, name));
    if (newest !== undefined && serial < newest)
      return refuse(`a newer certificate of that name is in use (serial ${newest})`, "E_REVOKED");
    this.setNewest(role, name, serial);
    return { name, role, serial, issued_ms, expires_ms, address };
  }
}
