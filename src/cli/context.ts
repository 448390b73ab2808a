import { mkdir, stat } from "node:fs/promises";
import { dirname, isAbsolute, join, resolve } from "node:path";
import * as v from "valibot";
import { stringify } from "yaml";
import { readIfThere, writeAtomic } from "../os/files.ts";
import { parseYaml } from "../os/yaml.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { nearest } from "../protocol/nearest.ts";
import type { Io } from "./spec.ts";

/** A context's name: it stands on command lines and in file names. */
const ContextName = v.pipe(v.string(), v.regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/, "a context's name is 1-63 of letters, digits, . _ -"));
const ServerUrl = v.pipe(v.string(), v.regex(/^https:\/\/[^/\s]+:\d{1,5}\/?$/, "a server is https://host:port"));
/** A path (relative to the file it stands in), or the PEM text itself. */
const PemOrPath = v.pipe(v.string(), v.minLength(1, "a path or a PEM text is needed"));

/** One fleet and who asks it: its servers, tried in order, the authority to trust, and the caller's certificate and key. */
export const Context = v.strictObject({
  servers: v.pipe(v.array(ServerUrl), v.minLength(1, "name at least one server")),
  ca: PemOrPath,
  cert: PemOrPath,
  key: PemOrPath,
});
export type Context = v.InferOutput<typeof Context>;

/** The file of contexts: `config.yaml`. */
export const ContextFile = v.strictObject({
  current: v.optional(ContextName),
  contexts: v.optional(v.record(ContextName, Context), {}),
});
export type ContextFile = v.InferOutput<typeof ContextFile>;

export interface NamedContext {
  readonly name: string;
  readonly context: Context;
}

const SUBJECT = "the file of contexts";

/** Where contexts are kept: `--config`, else `$LLMGW_CONFIG`, else `llmgw/config.yaml` in the XDG configuration folder. */
export function contextPath(flag: string | undefined, io: Pick<Io, "env" | "cwd">): string {
  const given = flag ?? (io.env["LLMGW_CONFIG"] || undefined);
  if (given !== undefined) return resolve(io.cwd, given);
  const xdg = io.env["XDG_CONFIG_HOME"];
  if (xdg && isAbsolute(xdg)) return join(xdg, "llmgw", "config.yaml");
  const home = io.env["HOME"];
  if (home && isAbsolute(home)) return join(home, ".config", "llmgw", "config.yaml");
  throw new OperatorError(
    "E_CONFIG",
    "no file of contexts can be named",
    "neither HOME nor XDG_CONFIG_HOME is set",
    "name one with --config FILE",
  );
}

/** Whether a text is PEM itself rather than the path of a PEM file. */
export const isPem = (text: string) => text.trimStart().startsWith("-----BEGIN ");

/** A context's texts with the paths made absolute; paths in a file are relative to that file. */
export function absolute(context: Context, folder: string): Context {
  const place = (text: string) => (isPem(text) ? text : resolve(folder, text));
  return { servers: context.servers, ca: place(context.ca), cert: place(context.cert), key: place(context.key) };
}

async function refuseIfShared(path: string): Promise<void> {
  const { mode, uid } = await stat(path);
  const self = process.geteuid?.() ?? uid;
  if (uid !== self && uid !== 0) {
    throw new OperatorError(
      "E_CONFIG",
      `${path} is not used`,
      `it belongs to user ${uid}, not to you`,
      "name a file of your own with --config FILE",
    );
  }
  if ((mode & 0o077) === 0) return;
  const bits = (mode & 0o777).toString(8).padStart(4, "0");
  throw new OperatorError(
    "E_CONFIG",
    `${path} is not used`,
    `others can read or change it (mode ${bits}); it leads to private keys`,
    `chmod 600 ${path}`,
  );
}

/**
 * Reads the file of contexts; no file is an empty one.
 * @throws OperatorError E_CONFIG when others can read it, or it is not valid
 */
export async function readContexts(path: string): Promise<ContextFile> {
  const text = await readIfThere(path);
  if (text === null) return { contexts: {} };
  await refuseIfShared(path);
  return parseYaml(text, path, ContextFile, SUBJECT);
}

/** Writes the file of contexts, readable by its owner only, in a folder only its owner can enter when that has to be made. */
export async function writeContexts(path: string, file: ContextFile): Promise<void> {
  const folder = dirname(path);
  try {
    await mkdir(folder, { recursive: true, mode: 0o700 });
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot make the folder ${folder}`, messageOf(error), "name another file with --config FILE");
  }
  await writeAtomic(path, stringify(file, { lineWidth: 0 }), 0o600);
}

/** The context of a name. @throws OperatorError E_CONFIG naming the nearest right one */
export function contextNamed(file: ContextFile, name: string, path: string): Context {
  const context = Object.hasOwn(file.contexts, name) ? file.contexts[name] : undefined;
  if (context) return context;
  const names = Object.keys(file.contexts);
  const meant = nearest(name, names);
  const why = names.length === 0 ? `${path} holds no context` : `${path} holds ${names.join(", ")}`;
  throw new OperatorError("E_CONFIG", `there is no context "${name}"`, why, meant ? `--context ${meant}` : "llmgw ctl context ls");
}

/**
 * The context to use: `--context`, else `$LLMGW_CONTEXT`, else the file's current one, else its only one.
 * @throws OperatorError E_CONFIG when there is none
 */
export function chooseContext(file: ContextFile, flag: string | undefined, env: Io["env"], path: string): NamedContext {
  const names = Object.keys(file.contexts);
  const only = names.length === 1 ? names[0] : undefined;
  const name = flag ?? (env["LLMGW_CONTEXT"] || undefined) ?? file.current ?? only;
  if (name === undefined) {
    const [what, why, remedy] =
      names.length === 0
        ? [
            "no fleet is known here",
            `${path} holds no context`,
            "llmgw ctl context add NAME --server https://HOST:7443 --ca FILE --cert FILE --key FILE",
          ]
        : ["no context is chosen", `${path} holds ${names.join(", ")}`, "llmgw ctl context use NAME"];
    throw new OperatorError("E_CONFIG", what as string, why as string, remedy as string);
  }
  return { name, context: absolute(contextNamed(file, name, path), dirname(path)) };
}
