import { randomBytes } from "node:crypto";
import { appendFile, chmod, readFile, rename, rm, stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import * as v from "valibot";
import { makeFolderOnce, makePrivateFolder, readIfThere, writeAtomic, writeNew } from "../os/files.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { ROLES, type Role } from "../protocol/ids.ts";
import {
  issueForRequest,
  issueWithKey,
  makeAuthority,
  makeKey,
  makeRequest,
  readRequest,
  type Circumstances,
  type KeyedCertificate,
  type Subject,
} from "./authority.ts";
import { readCertificate } from "./certificate.ts";

const CERT = "ca.crt";
const KEY = "ca.key";
const RECORD = "issued.jsonl";

/** One line of the authority's record: what it issued. */
export const IssuedCertificate = v.object({
  serial: v.string(),
  role: v.picklist(ROLES),
  name: v.string(),
  issued_ms: v.number(),
  expires_ms: v.number(),
  addresses: v.array(v.string()),
});
export type IssuedCertificate = v.InferOutput<typeof IssuedCertificate>;

/** Time and chance of this machine. */
export function circumstancesNow(): Circumstances {
  return { now_ms: Date.now(), random: (bytes) => randomBytes(bytes) };
}

const exists = (path: string) =>
  stat(path).then(
    () => true,
    () => false,
  );

/**
 * Makes a new authority in a folder only its owner can enter. An authority that is there is never touched; an
 * interrupted try leaves nothing that a later one would trip over.
 * @throws OperatorError E_EXISTS, E_FILE
 */
export async function initAuthority(folder: string, name: string, circumstances: Circumstances): Promise<{ cert: string; key: string }> {
  const paths = { cert: join(folder, CERT), key: join(folder, KEY) };
  const refuse: Refuse = (file) =>
    new OperatorError(
      "E_EXISTS",
      `there is an authority in ${folder}`,
      `${file} exists and is never overwritten`,
      "use it, or give another --dir",
    );
  for (const file of [paths.cert, paths.key]) if (await exists(file)) throw refuse(file);
  const authority = await makeAuthority(name, circumstances);
  if (await exists(folder)) await fillFolder(folder, authority, refuse);
  else await appearWhole(folder, authority, refuse);
  return paths;
}

type Refuse = (file: string) => OperatorError;

/** Puts an authority into a folder that is there already, maybe a mount or with other files in it. */
async function fillFolder(folder: string, { cert, key }: KeyedCertificate, refuse: Refuse): Promise<void> {
  await makePrivateFolder(folder);
  if (!(await writeNew(join(folder, KEY), key, 0o600))) throw refuse(join(folder, KEY));
  try {
    if (!(await writeNew(join(folder, CERT), cert, 0o644))) throw refuse(join(folder, CERT));
  } catch (error) {
    await rm(join(folder, KEY), { force: true });
    throw error;
  }
}

/** Makes the folder beside its place and moves it there whole, so that a crash leaves no half of an authority. */
async function appearWhole(folder: string, authority: KeyedCertificate, refuse: Refuse): Promise<void> {
  const beside = `${folder}.${randomBytes(6).toString("hex")}`;
  try {
    await fillFolder(beside, authority, refuse);
    await rename(beside, folder);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === "ENOTEMPTY" || code === "EEXIST") throw refuse(join(folder, KEY));
    if (error instanceof OperatorError) throw error;
    throw new OperatorError("E_FILE", `cannot make the folder ${folder}`, messageOf(error), "check the owner of the folder above");
  } finally {
    await rm(beside, { recursive: true, force: true });
  }
}

/** @throws OperatorError E_NOT_FOUND when there is no authority, E_NOT_ALLOWED when others can read its key */
export async function openAuthority(folder: string): Promise<KeyedCertificate> {
  const [cert, key] = await Promise.all([readIfThere(join(folder, CERT)), readIfThere(join(folder, KEY))]);
  if (cert === null || key === null) {
    throw new OperatorError(
      "E_NOT_FOUND",
      `there is no authority in ${folder}`,
      `${CERT} or ${KEY} is missing`,
      "make one with llmgw ca init, or name its folder with --dir",
    );
  }
  const { mode } = await stat(join(folder, KEY));
  if ((mode & 0o077) !== 0) {
    throw new OperatorError(
      "E_NOT_ALLOWED",
      `the authority's key can be read by others`,
      `${join(folder, KEY)} has mode ${(mode & 0o777).toString(8)}`,
      `chmod 600 ${join(folder, KEY)}`,
    );
  }
  return { cert, key };
}

interface IssueOptions {
  /** The authority's folder. */
  readonly folder: string;
  readonly subject: Subject;
  /** Where the files go; made when missing. */
  readonly out: string;
  /** Name of the files without ending: `node`, `server`, `admin`. */
  readonly file_name: string;
  /** A request whose key stays where it is; null = make a key too. */
  readonly csr: string | null;
}

/** Files that were written. */
interface Issued {
  readonly ca: string;
  readonly cert: string;
  /** Null when the key stayed where its request came from. */
  readonly key: string | null;
  readonly serial: string;
  readonly expires_ms: number;
}

/**
 * Issues a certificate into a folder and notes it in the authority's record. Earlier files of that name are replaced
 * whole, key first, so that what lies there belongs together or is refused.
 * @throws OperatorError E_NOT_FOUND, E_NOT_ALLOWED, E_BAD_REQUEST (the request), E_FILE
 */
export async function issueInto(options: IssueOptions, circumstances: Circumstances): Promise<Issued> {
  const { folder, subject, out, file_name, csr } = options;
  const authority = await openAuthority(folder);
  if (csr !== null) await checkRequest(csr, subject.name);
  const made =
    csr === null
      ? await issueWithKey(authority, subject, circumstances)
      : { cert: await issueForRequest(authority, subject, csr, circumstances), key: null };
  const certificate = readCertificate(made.cert);
  if ("unreadable" in certificate)
    throw new OperatorError("E_INTERNAL", "the issued certificate is not right", certificate.unreadable, "report it");
  await makeFolderOnce(out, 0o700);
  const paths = { ca: join(out, CERT), cert: join(out, `${file_name}.crt`), key: made.key === null ? null : join(out, `${file_name}.key`) };
  await note(folder, {
    serial: certificate.serial,
    role: subject.role,
    name: subject.name,
    issued_ms: circumstances.now_ms,
    expires_ms: certificate.expires_ms,
    addresses: [...subject.ips, ...subject.dns],
  });
  if (paths.key !== null && made.key !== null) await writeAtomic(paths.key, made.key, 0o600);
  await writeAtomic(paths.cert, made.cert, 0o644);
  await writeAtomic(paths.ca, authority.cert, 0o644);
  return { ...paths, serial: certificate.serial, expires_ms: certificate.expires_ms };
}

/**
 * Issues a certificate with its key for a moment's use: noted in the authority's record, written nowhere.
 * @throws OperatorError E_NOT_FOUND, E_NOT_ALLOWED, E_FILE
 */
export async function issueForMoment(
  folder: string,
  subject: Subject,
  circumstances: Circumstances,
): Promise<KeyedCertificate & { ca: string }> {
  const authority = await openAuthority(folder);
  const made = await issueWithKey(authority, subject, circumstances);
  const certificate = readCertificate(made.cert);
  if ("unreadable" in certificate)
    throw new OperatorError("E_INTERNAL", "the issued certificate is not right", certificate.unreadable, "report it");
  const { serial, expires_ms } = certificate;
  const { role, name } = subject;
  await note(folder, { serial, role, name, issued_ms: circumstances.now_ms, expires_ms, addresses: [] });
  return { ...made, ca: authority.cert };
}

async function checkRequest(csr: string, name: string): Promise<void> {
  const request = await readRequest(csr);
  const refuse = (why: string) =>
    new OperatorError("E_BAD_REQUEST", "the certificate request is refused", why, "make it with llmgw keygen on the node");
  if ("unreadable" in request) throw refuse(request.unreadable);
  if (request.name !== name) throw refuse(`it asks for ${request.name}, not ${name}`);
}

async function note(folder: string, issued: IssuedCertificate): Promise<void> {
  const path = join(folder, RECORD);
  try {
    await appendFile(path, `${JSON.stringify(issued)}\n`, { mode: 0o600 });
    await chmod(path, 0o600);
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot write ${path}`, messageOf(error), "check the folder's owner and the free space");
  }
}

/** Everything the authority issued, oldest first. A line that was cut by a crash is left out. */
export async function listIssued(folder: string): Promise<IssuedCertificate[]> {
  await openAuthority(folder);
  const lines = ((await readIfThere(join(folder, RECORD))) ?? "").split("\n");
  return lines.flatMap((line) => {
    const read = v.safeParse(v.pipe(v.string(), v.parseJson(), IssuedCertificate), line);
    return read.success ? [read.output] : [];
  });
}

/**
 * A request for a certificate with the key of a file, which is made when it is not there and never replaced.
 * @throws OperatorError E_FILE, E_NOT_ALLOWED, E_CONFIG (the file is no key)
 */
export async function requestWithKeyFile(key_file: string, name: string, role: Role): Promise<{ csr: string; made: boolean }> {
  let made = false;
  if (!(await exists(key_file))) {
    await makeFolderOnce(dirname(key_file), 0o700);
    made = await writeNew(key_file, await makeKey(), 0o600);
    if (!made)
      throw new OperatorError("E_EXISTS", `${key_file} was made by somebody else meanwhile`, "it is never overwritten", "run it again");
  }
  const { mode } = await stat(key_file);
  if ((mode & 0o077) !== 0)
    throw new OperatorError(
      "E_NOT_ALLOWED",
      `the key ${key_file} can be read by others`,
      `its mode is ${(mode & 0o777).toString(8)}`,
      `chmod 600 ${key_file}`,
    );
  try {
    return { csr: await makeRequest(name, role, await readFile(key_file, "utf8")), made };
  } catch (error) {
    throw new OperatorError(
      "E_CONFIG",
      `${key_file} is not usable`,
      `not an ECDSA P-256 key: ${messageOf(error)}`,
      "move it away and run llmgw keygen again",
    );
  }
}
