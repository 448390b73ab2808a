import { X509Certificate } from "node:crypto";
import { readdir, stat } from "node:fs/promises";
import { homedir } from "node:os";
import { join, resolve } from "node:path";
import { readSmall } from "../os/files.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { SMALL_FILE_BYTES } from "../protocol/limits.ts";
import { HttpsTransport, type PveLogin } from "../provision/https-transport.ts";
import type { PveTransport } from "../provision/pve.ts";
import { PveshTransport } from "../provision/pvesh-transport.ts";
import type { Settings } from "../provision/settings.ts";
import { distinctKeys, readPublicKeys, type PublicKey } from "../provision/ssh-keys.ts";

/** Where the settings of new machines are kept. */
export const PROVISION_FILE = "/etc/llmgw/provision.yaml";

/** Whose machine this is, and who is told what is not as it should be. */
export interface Surroundings {
  readonly cwd: string;
  readonly note: (text: string) => void;
}

/** Reads a file that holds one secret. @throws OperatorError E_FILE; the secret is never in it */
async function secretIn(path: string, { cwd, note }: Surroundings): Promise<string> {
  const full = resolve(cwd, path);
  const text = await readSmall(full, SMALL_FILE_BYTES);
  if (text.trim() === "")
    throw new OperatorError("E_FILE", `${path} is empty`, "a secret is expected in it", "write it there, readable by you alone");
  const kind = await stat(full);
  if (kind.isFile() && (kind.mode & 0o077) !== 0) note(`warning: others than you may read ${path}; chmod 600 ${path} ends that`);
  return text.trim();
}

/** Who we are to Proxmox. @throws OperatorError E_USAGE, E_CONFIG, E_FILE */
async function loginOf({ pve_token_file, pve_user, pve_password_file }: Settings, around: Surroundings): Promise<PveLogin> {
  if (pve_token_file !== undefined) {
    const token = await secretIn(pve_token_file, around);
    if (/^[\x21-\x7e]+$/.test(token) && /^[^@]+@[^!]+![^=]+=[0-9a-fA-F-]{36}$/.test(token)) return { kind: "token", token };
    throw new OperatorError(
      "E_CONFIG",
      `${pve_token_file} holds no API token`,
      "it is USER@REALM!NAME=UUID, as Proxmox shows it once",
      "copy both parts into the file",
    );
  }
  if (pve_user !== undefined && pve_password_file !== undefined)
    return { kind: "password", user: pve_user, password: await secretIn(pve_password_file, around) };
  throw new OperatorError(
    "E_USAGE",
    "there is nothing to log in to Proxmox with",
    "--pve-token-file, or --pve-user with --pve-password-file, is missing",
    "make a token: docs/adding-a-node.md has the commands",
  );
}

/** The certificates of a file. @throws OperatorError E_FILE, E_CONFIG when there is none in it */
async function authorityIn(path: string, cwd: string): Promise<string> {
  const text = await readSmall(resolve(cwd, path), SMALL_FILE_BYTES);
  const blocks = text.match(/-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g) ?? [];
  try {
    if (blocks.length === 0) throw new Error("there is no certificate in it");
    for (const block of blocks) new X509Certificate(block);
    return blocks.join("\n");
  } catch (error) {
    const remedy = "copy /etc/pve/pve-root-ca.pem of Proxmox, or pin its certificate with --pve-fingerprint";
    throw new OperatorError("E_CONFIG", `${path} cannot be Proxmox's authority`, messageOf(error), remedy);
  }
}

/** @throws OperatorError E_USAGE when there is no way to Proxmox, naming all of them; E_CONFIG, E_FILE */
export async function transportOf(settings: Settings, around: Surroundings): Promise<PveTransport> {
  const { pve_host, pve_ca, pve_fingerprint } = settings;
  if (pve_host !== undefined) {
    const ca = pve_ca === undefined ? null : await authorityIn(pve_ca, around.cwd);
    return new HttpsTransport(pve_host, { ca, fingerprint: pve_fingerprint ?? null }, await loginOf(settings, around));
  }
  if (process.getuid?.() === 0 && Bun.which("pvesh") !== null) return new PveshTransport();
  throw new OperatorError(
    "E_USAGE",
    "it is not known where Proxmox is",
    `none of --pve-host, LLMGW_PVE_HOST and pve_host in ${PROVISION_FILE} is given, ` +
      "and this is no Proxmox host with pvesh that root runs it on",
    "give --pve-host https://PROXMOX:8006 with --pve-token-file, or run it as root on the Proxmox host",
  );
}

/** The usable keys of a folder; what is no file, or cannot be read, is passed over. */
async function keysIn(folder: string): Promise<PublicKey[]> {
  const names = (await readdir(folder).catch(() => [])).filter((name) => name === "authorized_keys" || name.endsWith(".pub"));
  const texts = await Promise.all(
    names.map(async (name) => {
      const path = join(folder, name);
      const kind = await stat(path).catch(() => null);
      return kind?.isFile() ? await readSmall(path, SMALL_FILE_BYTES).catch(() => "") : "";
    }),
  );
  return texts.flatMap(readPublicKeys);
}

/**
 * Keys that may log in: those this user accepts, this user's own, and given ones.
 * @throws OperatorError E_SSH when there is none, E_FILE and E_CONFIG when a named file has none
 */
export async function keysOf({ ssh_keys }: Settings, cwd: string): Promise<PublicKey[]> {
  const folder = join(homedir(), ".ssh");
  const own = await keysIn(folder);
  const given = ssh_keys === undefined ? [] : readPublicKeys(await readSmall(resolve(cwd, ssh_keys), SMALL_FILE_BYTES));
  if (ssh_keys !== undefined && given.length === 0)
    throw new OperatorError(
      "E_CONFIG",
      `there is no public key in ${ssh_keys}`,
      "lines with options are not taken, nor what ssh-keygen -l cannot read",
      "name a file as ~/.ssh/id_ed25519.pub",
    );
  const keys = distinctKeys([...own, ...given]);
  if (keys.length > 0) return keys;
  throw new OperatorError(
    "E_SSH",
    "nobody could log in to the machine",
    `there is no public key in ${folder}`,
    "make one with ssh-keygen, or name a file with --ssh-keys",
  );
}
