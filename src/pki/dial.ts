import { X509Certificate } from "node:crypto";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { Role } from "../protocol/ids.ts";
import type { Revocation } from "../protocol/plan.ts";
import { isRevoked } from "../protocol/plan.ts";
import { faultOf, readCertificate, SERVER_AUTH } from "./certificate.ts";
import type { Identity } from "./identity.ts";
import { refuseUnsafeEnvironment } from "./listener.ts";

/** Whom a client means to speak to. */
interface Expectation {
  readonly role: Role;
  /** Common name; any of that role when absent. */
  readonly name?: string;
}

interface DialInit {
  readonly method?: string;
  readonly headers?: Record<string, string> | Headers;
  readonly body?: NonNullable<RequestInit["body"]> | null;
  readonly signal?: AbortSignal;
  readonly expect: Expectation;
}

/** The client side of mutual TLS. */
export interface Dialer {
  /**
   * Sends a request once the far side has proved who it is; nothing of it leaves before. The answer's body is as it
   * came (not decompressed). Without a signal it waits for ever.
   * @throws OperatorError E_UNREACHABLE (nobody answers), E_TLS (no trust), E_IDENTITY (somebody else); the signal's reason when aborted
   */
  request(url: string, init: DialInit): Promise<Response>;
  /** Shows another certificate from the next request on. */
  setIdentity(identity: Identity): void;
}

export interface DialerOptions {
  /** Names whose certificates are trusted no longer; asked at each connection. */
  readonly revocations?: () => readonly Revocation[];
  readonly now?: () => number;
}

/** Makes a dialer that speaks as `identity` and trusts its authority. */
export function makeDialer(identity: Identity, { revocations = () => [], now = Date.now }: DialerOptions = {}): Dialer {
  refuseUnsafeEnvironment();
  let current = identity;
  return {
    setIdentity: (next) => {
      current = next;
    },
    request: async (url, { expect, ...init }) => {
      let verdict: OperatorError | null = null;
      const tls = {
        ca: current.ca,
        cert: current.cert,
        key: current.key,
        // Replaces the check of host names: identity is role and name, wherever the far side listens. With an own check
        // Bun 1.4.5 makes a new connection for each request, so that none is reused for another expectation (tried).
        checkServerIdentity: (_host: string, shown: { readonly raw?: Uint8Array }) => {
          verdict = judge(shown.raw ?? null, current.ca, expect, new URL(url).host, { now_ms: now(), revocations: revocations() });
          return verdict ?? undefined;
        },
      };
      try {
        return await fetch(url, { ...init, tls, redirect: "manual", decompress: false, timeout: false } as RequestInit);
      } catch (error) {
        if (verdict) throw verdict;
        if (init.signal?.aborted) throw error;
        throw explain(error, url);
      }
    },
  };
}

/**
 * Why the far side is not the one that is meant; null when it is.
 * @param shown its certificate as it came (DER), null when it showed none
 * @param host what the error calls it
 */
export function judge(
  shown: Uint8Array | null,
  ca: string,
  expect: Expectation,
  host: string,
  { now_ms, revocations }: { readonly now_ms: number; readonly revocations: readonly Revocation[] },
): OperatorError | null {
  const noTrust = (why: string) =>
    new OperatorError("E_TLS", `${host} is not trusted`, `its certificate: ${why}`, "check the address, the CA file and both clocks");
  if (!shown) return noTrust("it showed none");
  const certificate = readCertificate(shown);
  if ("unreadable" in certificate) return noTrust(certificate.unreadable);
  const fault = faultOf(certificate, new X509Certificate(ca), SERVER_AUTH, now_ms);
  if (fault) return noTrust(fault);
  if (isRevoked(revocations, certificate)) return noTrust("it was revoked");
  const is = `${certificate.role} ${certificate.name}`;
  if (certificate.role === expect.role && (expect.name === undefined || certificate.name === expect.name)) return null;
  const meant = expect.name === undefined ? `a ${expect.role}` : `${expect.role} ${expect.name}`;
  return new OperatorError("E_IDENTITY", `${host} is not ${meant}`, `its certificate says ${is}`, "check the address");
}

/** Codes with which a handshake or a connection fails because of certificates. */
const TRUST_CODES: readonly string[] = [
  "SELF_SIGNED_CERT_IN_CHAIN",
  "DEPTH_ZERO_SELF_SIGNED_CERT",
  "UNABLE_TO_VERIFY_LEAF_SIGNATURE",
  "UNABLE_TO_GET_ISSUER_CERT",
  "UNABLE_TO_GET_ISSUER_CERT_LOCALLY",
  "CERT_SIGNATURE_FAILURE",
  "INVALID_PURPOSE",
  "CERT_HAS_EXPIRED",
  "CERT_NOT_YET_VALID",
];

/** What Bun's error codes mean, where its own words say less. */
const PLAIN_WORDS: Readonly<Record<string, string>> = {
  ECONNREFUSED: "nothing listens there (connection refused)",
  ConnectionRefused: "nothing listens there (connection refused)",
  ECONNRESET: "it ended the connection without an answer",
  EHOSTUNREACH: "no route to that host",
  ENETUNREACH: "no route to that network",
};

function explain(error: unknown, url: string): OperatorError {
  const { host } = new URL(url);
  const code = (error as { readonly code?: unknown }).code;
  const why = PLAIN_WORDS[String(code)] ?? messageOf(error).replace(/; For more information.*$/, "");
  if (typeof code === "string" && TRUST_CODES.includes(code)) {
    const clocks = code.startsWith("CERT_")
      ? "check both clocks, or issue a new certificate"
      : "check that both sides have the same CA file";
    return new OperatorError("E_TLS", `${host} is not trusted`, why, clocks, { cause: error });
  }
  if (code === "EPROTO") {
    const remedy = "check that the certificate is valid and of this CA; the far side's log says why it refused";
    return new OperatorError("E_TLS", `no mutual TLS with ${host}`, why, remedy, { cause: error });
  }
  if (code === "ECONNRESET") {
    const remedy = "the far side's log says whether it refused this certificate";
    return new OperatorError("E_UNREACHABLE", `${host} closed the connection`, why, remedy, { cause: error });
  }
  return new OperatorError("E_UNREACHABLE", `cannot reach ${host}`, why, "check that it runs, its address and the firewall", {
    cause: error,
  });
}
