import { createPrivateKey, X509Certificate } from "node:crypto";
import { readFile, stat } from "node:fs/promises";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { Role } from "../protocol/ids.ts";
import { readCertificate } from "./certificate.ts";

/** Who this process is and whom it trusts. PEM texts; `key` never leaves the process. */
export interface Identity {
  readonly ca: string;
  readonly cert: string;
  readonly key: string;
  readonly name: string;
  readonly role: Role;
  readonly serial: string;
  readonly issued_ms: number;
  readonly expires_ms: number;
}

/** Paths of the PEM files of an identity. */
export interface IdentityPaths {
  readonly ca: string;
  readonly cert: string;
  readonly key: string;
}

/**
 * Reads an identity from its files and checks that they belong together. Whether the dates are right is left to the
 * far side, which judges by its own clock.
 * @throws OperatorError E_FILE (cannot be read), E_CONFIG (not what it should be), E_NOT_ALLOWED (others may read the key)
 */
export async function loadIdentity(paths: IdentityPaths): Promise<Identity> {
  const [ca, cert, key] = await Promise.all([read(paths.ca), read(paths.cert), read(paths.key)]);
  const { mode } = await stat(paths.key);
  if ((mode & 0o077) !== 0) {
    const shown = (mode & 0o777).toString(8).padStart(4, "0");
    throw new OperatorError(
      "E_NOT_ALLOWED",
      `the key ${paths.key} can be read by others`,
      `its mode is ${shown}`,
      `chmod 600 ${paths.key}`,
    );
  }
  return makeIdentity({ ca, cert, key }, paths);
}

/**
 * Puts an identity together from PEM texts.
 * @param names what to call the three in an error
 */
export function makeIdentity(pem: { readonly ca: string; readonly cert: string; readonly key: string }, names: IdentityPaths): Identity {
  const wrong = (file: string, why: string) => new OperatorError("E_CONFIG", `${file} is not usable`, why, "issue it again with llmgw ca");
  const certificate = readCertificate(pem.cert);
  if ("unreadable" in certificate) throw wrong(names.cert, certificate.unreadable);
  let authority: X509Certificate;
  try {
    authority = new X509Certificate(pem.ca);
  } catch {
    throw wrong(names.ca, "not a certificate");
  }
  if (!certificate.x509.checkIssued(authority) || !certificate.x509.verify(authority.publicKey)) {
    throw wrong(names.cert, `it was not issued by the authority in ${names.ca}`);
  }
  try {
    if (!certificate.x509.checkPrivateKey(createPrivateKey(pem.key))) throw wrong(names.key, `it is not the key of ${names.cert}`);
  } catch (error) {
    if (error instanceof OperatorError) throw error;
    throw wrong(names.key, "not a private key in PEM form");
  }
  const { name, role, serial, issued_ms, expires_ms } = certificate;
  return { ...pem, name, role, serial, issued_ms, expires_ms };
}

async function read(path: string): Promise<string> {
  try {
    return await readFile(path, "utf8");
  } catch (error) {
    throw new OperatorError(
      "E_FILE",
      `cannot read ${path}`,
      messageOf(error),
      "check the path in the configuration, the file's owner and mode",
    );
  }
}
