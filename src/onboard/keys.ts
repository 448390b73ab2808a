import { createPrivateKey } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import ssh2 from "ssh2";
import type { AnyAuthMethod, ParsedKey } from "ssh2";
import { fingerprintOf } from "../os/ssh-key.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";

/** One way to log in, with what an error calls it. */
export interface Credential {
  readonly shown: string;
  readonly method: (user: string) => AnyAuthMethod;
}

interface CredentialSource {
  /** A key file of `--ssh-key`; null = the agent and the usual files. */
  readonly key_file: string | null;
  /** Socket of an ssh agent; null when there is none. */
  readonly agent: string | null;
  readonly home: string;
  /** Asks for a key's passphrase; null when nobody can be asked. */
  readonly passphrase: (file: string) => Promise<string | null>;
}

const USUAL_FILES = ["id_ed25519", "id_ecdsa", "id_rsa"];

/**
 * What can be tried, in order: the key that was named, the agent, the usual files. Encrypted usual files are asked for
 * only when there is nothing else.
 * @returns also the keys that are left out, with the reason
 * @throws OperatorError E_SSH when there is nothing to try, E_FILE, E_CONFIG when a named key is not usable
 */
export async function credentialsOf(source: CredentialSource): Promise<{ credentials: Credential[]; left_out: string[] }> {
  const { key_file, agent, home } = source;
  const credentials: Credential[] = [];
  const left_out: string[] = [];
  if (key_file !== null) {
    const key = await readKey(key_file, source);
    if (typeof key !== "string") credentials.push(credentialOf(key_file, key));
    else if (agent === null) throw unusable(key_file, key);
    else left_out.push(`${key_file} (${key})`);
  }
  if (agent !== null) credentials.push({ shown: "the ssh agent's keys", method: (username) => ({ type: "agent", username, agent }) });
  if (key_file === null) {
    for (const file of USUAL_FILES.map((name) => join(home, ".ssh", name))) {
      const key = await readKey(file, { ...source, passphrase: async () => null }).catch((error) => messageOf(error));
      if (typeof key !== "string") credentials.push(credentialOf(file, key));
      else if (await isThere(file)) left_out.push(`${file} (${key})`);
    }
    if (credentials.length === 0) {
      for (const file of USUAL_FILES.map((name) => join(home, ".ssh", name))) {
        if (credentials.length > 0 || !(await isThere(file))) continue;
        const key = await readKey(file, source);
        if (typeof key !== "string") credentials.push(credentialOf(file, key));
      }
    }
  }
  if (credentials.length > 0) return { credentials, left_out };
  const why = left_out.length > 0 ? `these cannot be used: ${left_out.join(", ")}` : `no agent runs, and ${home}/.ssh has no key`;
  throw new OperatorError("E_SSH", "there is no ssh key to log in with", why, "start an agent with ssh-add, or name a key with --ssh-key");
}

const isThere = (file: string) => Bun.file(file).exists();

function credentialOf(file: string, key: ParsedKey): Credential {
  const shown = `${file} (${fingerprintOf(key.getPublicSSH())})`;
  return { shown, method: (username) => ({ type: "publickey", username, key }) };
}

/** A key of a file, or why it cannot be used. @throws OperatorError E_FILE, E_CONFIG (not a key, or another passphrase) */
async function readKey(file: string, { passphrase }: CredentialSource): Promise<ParsedKey | string> {
  let text: string;
  try {
    text = await readFile(file, "utf8");
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot read the ssh key ${file}`, messageOf(error), "check the path of --ssh-key");
  }
  const plain = parse(text);
  if (!(plain instanceof Error)) return plain;
  if (!/encrypted/i.test(plain.message) && !text.includes("ENCRYPTED")) throw unusable(file, plain.message);
  const phrase = await passphrase(file);
  if (phrase === null) return "it is encrypted, and there is no terminal to ask for its passphrase";
  const opened = parse(text, phrase);
  if (opened instanceof Error) throw unusable(file, "it does not open with that passphrase");
  return opened;
}

/** Reads a private key; what ssh2 does not know (PKCS #8) is written in a form it knows. */
function parse(text: string, passphrase?: string): ParsedKey | Error {
  let key: string | Buffer = text;
  let phrase = passphrase;
  if (/-----BEGIN (ENCRYPTED )?PRIVATE KEY-----/.test(text)) {
    if (text.includes("BEGIN ENCRYPTED") && passphrase === undefined) return new Error("encrypted");
    try {
      const made = createPrivateKey({ key: text, format: "pem", ...(passphrase !== undefined && { passphrase }) });
      key = made.export({ type: made.asymmetricKeyType === "ec" ? "sec1" : "pkcs1", format: "pem" });
      phrase = undefined;
    } catch (error) {
      return new Error(`its form cannot be read (${messageOf(error)})`);
    }
  }
  const parsed = ssh2.utils.parseKey(key, phrase);
  const one = Array.isArray(parsed) ? parsed[0] : parsed;
  if (one === undefined) return new Error("it holds no key");
  if (!(one instanceof Error) && !one.isPrivateKey()) return new Error("it is a public key; name the private one");
  return one;
}

function unusable(file: string, why: string): OperatorError {
  return new OperatorError("E_CONFIG", `the ssh key ${file} cannot be used`, why, "ssh-add it and leave --ssh-key away, or name another");
}
