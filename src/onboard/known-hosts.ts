import { createHmac, timingSafeEqual } from "node:crypto";
import { appendFile, mkdir, stat } from "node:fs/promises";
import { dirname } from "node:path";
import { readIfThere, writeAtomic } from "../os/files.ts";
import { fingerprintOf } from "../os/ssh-key.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";

/** One usable line of a known_hosts file (sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT"). */
interface KnownHost {
  readonly file: string;
  /** Counts from 1. */
  readonly line: number;
  readonly marker: "" | "@revoked" | "@cert-authority";
  /** Host patterns as they are written: plain, with wildcards, negated or hashed. */
  readonly patterns: readonly string[];
  readonly type: string;
  /** The key, base64. */
  readonly key: string;
}

/** Reads the lines of a known_hosts file; lines that mean nothing are left out, as ssh does. */
export function parseKnownHosts(text: string, file: string): KnownHost[] {
  return text.split("\n").flatMap((written, index) => {
    const words = written.trim().split(/\s+/);
    if (words[0] === undefined || words[0] === "" || words[0].startsWith("#")) return [];
    const marker = words[0].startsWith("@") ? words.shift() : "";
    const [patterns, type, key] = words;
    if (patterns === undefined || type === undefined || key === undefined) return [];
    if (marker !== "" && marker !== "@revoked" && marker !== "@cert-authority") return [];
    return [{ file, line: index + 1, marker, patterns: patterns.split(","), type, key }];
  });
}

/** The name a host has in known_hosts files: with its port when that is not 22. */
export function hostName(host: string, port: number): string {
  return port === 22 ? host.toLowerCase() : `[${host.toLowerCase()}]:${port}`;
}

function matchesPattern(pattern: string, name: string): boolean {
  if (pattern.startsWith("|1|")) {
    const [, , salt = "", hash = ""] = pattern.split("|");
    const made = createHmac("sha1", Buffer.from(salt, "base64")).update(name).digest();
    const kept = Buffer.from(hash, "base64");
    return kept.length === made.length && timingSafeEqual(kept, made);
  }
  const expression = RegExp.escape(pattern.toLowerCase()).replaceAll("\\*", ".*").replaceAll("\\?", ".");
  return new RegExp(`^${expression}$`).test(name);
}

/** Whether a line speaks of a host: one pattern matches, and no negated one does. */
function speaksOf({ patterns }: KnownHost, name: string): boolean {
  const denied = patterns.some((pattern) => pattern.startsWith("!") && matchesPattern(pattern.slice(1), name));
  return !denied && patterns.some((pattern) => !pattern.startsWith("!") && matchesPattern(pattern, name));
}

type HostKeyVerdict =
  | { readonly verdict: "known" }
  | { readonly verdict: "unknown" }
  | { readonly verdict: "changed"; readonly entries: readonly KnownHost[] }
  | { readonly verdict: "revoked"; readonly entries: readonly KnownHost[] };

/**
 * Judges the key a host showed. Any line of that host without a line that has this key means that the key changed, also
 * when the known one is of another type: a new type must not be a way around the check.
 * @param key the key, base64
 */
export function judgeHostKey(known: readonly KnownHost[], name: string, key: string): HostKeyVerdict {
  const about = known.filter((entry) => entry.marker !== "@cert-authority" && speaksOf(entry, name));
  const revoked = about.filter((entry) => entry.marker === "@revoked" && entry.key === key);
  if (revoked.length > 0) return { verdict: "revoked", entries: revoked };
  const trusted = about.filter((entry) => entry.marker === "");
  if (trusted.some((entry) => entry.key === key)) return { verdict: "known" };
  return trusted.length === 0 ? { verdict: "unknown" } : { verdict: "changed", entries: trusted };
}

/** The signature algorithms to ask the host for first: those of the key types it is known by. */
export function algorithmsFor(known: readonly KnownHost[], name: string): string[] {
  const types = known.filter((entry) => entry.marker === "" && speaksOf(entry, name)).map((entry) => entry.type);
  return [...new Set(types)].flatMap((type) => (type === "ssh-rsa" ? ["rsa-sha2-512", "rsa-sha2-256"] : [type]));
}

/** A key's type, the first string of its blob. */
export function keyTypeOf(blob: Buffer): string {
  return blob.length < 4 ? "" : blob.subarray(4, 4 + blob.readUInt32BE(0)).toString("latin1");
}

/** Reads all files that are there. */
export async function readKnownHosts(files: readonly string[]): Promise<KnownHost[]> {
  const texts = await Promise.all(files.map(async (file) => parseKnownHosts((await readIfThere(file)) ?? "", file)));
  return texts.flat();
}

/** Adds a host's key to a file with one write, so that two writers never mix their lines. */
export async function learnHostKey(file: string, name: string, blob: Buffer): Promise<void> {
  const line = `${name} ${keyTypeOf(blob)} ${blob.toString("base64")}\n`;
  try {
    await mkdir(dirname(file), { recursive: true, mode: 0o700 });
    const before = (await readIfThere(file)) ?? "";
    await appendFile(file, before === "" || before.endsWith("\n") ? line : `\n${line}`, { mode: 0o600 });
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot note the host key in ${file}`, messageOf(error), "name another file with --known-hosts");
  }
}

/**
 * Takes a host out of a file, for a machine that was just made at its address. Lines that speak of others as well, and marked
 * ones, stay.
 * @returns how many lines went
 */
export async function forgetHost(file: string, name: string): Promise<number> {
  const text = await readIfThere(file);
  if (text === null) return 0;
  const own = parseKnownHosts(text, file).filter((entry) => entry.marker === "" && entry.patterns.length === 1 && speaksOf(entry, name));
  if (own.length === 0) return 0;
  const gone = new Set(own.map(({ line }) => line));
  const { mode } = await stat(file);
  const kept = text.split("\n").filter((_line, index) => !gone.has(index + 1));
  await writeAtomic(file, kept.join("\n"), mode & 0o777);
  return own.length;
}

/** What an operator reads when a host's key is refused. */
export function hostKeyError(host: string, name: string, blob: Buffer, { verdict, entries }: Refused): OperatorError {
  const shown = `it shows ${keyTypeOf(blob)} ${fingerprintOf(blob)}`;
  const places = entries.map(({ file, line, type }) => `${file}:${line} (${type})`).join(", ");
  if (verdict === "revoked")
    return new OperatorError("E_SSH", `the host key of ${host} is revoked`, `${shown}, refused by ${places}`, "do not use this machine");
  const file = entries[0]?.file ?? "";
  return new OperatorError(
    "E_SSH",
    `the host key of ${host} has changed: it may be another machine`,
    `${shown}; ${places} has another`,
    `when the machine was made anew: ssh-keygen -R '${name}' -f ${file}`,
  );
}
type Refused = Extract<HostKeyVerdict, { entries: readonly KnownHost[] }>;
