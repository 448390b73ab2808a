import { resolve } from "node:path";
import { readFile } from "node:fs/promises";
import { parseAs, messageOf, OperatorError } from "../../protocol/errors.ts";
import { identityOf } from "../context-identity.ts";
import {
  absolute,
  chooseContext,
  type Context,
  ContextFile,
  contextNamed,
  contextPath,
  isPem,
  readContexts,
  writeContexts,
} from "../context.ts";
import { command, group } from "../frame.ts";
import { outputFlag, printList, printOne } from "../output.ts";
import type { Io } from "../spec.ts";
import { dryRunFlag, reachFlags } from "./reach.ts";

const { config, context } = reachFlags;

/** What stands in place of a private key. */
const MASKED = "(a private key, not shown)";

/** A context without its private key; a path to one is no secret. */
function masked(shown: Context): Context {
  return { ...shown, key: isPem(shown.key) ? MASKED : shown.key };
}

const shortPem = (text: string) => (text === MASKED || !isPem(text) ? text : "(in this file)");

/** The current context's name, if any, without an error when there is none. */
function currentName(file: ContextFile, env: Io["env"]): string | undefined {
  const names = Object.keys(file.contexts);
  return (env["LLMGW_CONTEXT"] || undefined) ?? file.current ?? (names.length === 1 ? names[0] : undefined);
}

const ls = command({
  name: "ls",
  about: "Lists the fleets known here",
  examples: ["llmgw ctl context ls"],
  flags: { config, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const file = await readContexts(contextPath(flags.config, io));
    const current = currentName(file, io.env);
    const items = Object.entries(file.contexts).map(([name, each]) => ({ name, current: name === current, ...masked(each) }));
    printList(io, flags.output, items, {
      columns: [
        { title: "", cell: (item) => (item.current ? "*" : " ") },
        { title: "NAME", cell: (item) => item.name },
        { title: "SERVERS", cell: (item) => item.servers.join(" ") },
        { title: "CERTIFICATE", cell: (item) => shortPem(item.cert) },
        { title: "KEY", cell: (item) => shortPem(item.key), wide: true },
        { title: "AUTHORITY", cell: (item) => shortPem(item.ca), wide: true },
      ],
      name: (item) => item.name,
      document: { items },
      empty: "no fleet is known here yet; llmgw ctl context add",
    });
  },
});

const use = command({
  name: "use",
  about: "Chooses the fleet that commands ask from now on",
  examples: ["llmgw ctl context use prod"],
  flags: { config, "dry-run": dryRunFlag },
  args: [{ name: "NAME", about: "the context" }],
  run: async ({ flags, args, io }) => {
    const path = contextPath(flags.config, io);
    const file = await readContexts(path);
    contextNamed(file, args.NAME, path);
    if (flags["dry-run"]) return io.err(`would use ${args.NAME}`);
    await writeContexts(path, { ...file, current: args.NAME });
    io.err(`using ${args.NAME}`);
  },
});

const show = command({
  name: "show",
  about: "Shows one fleet's servers and certificates, never its key",
  examples: ["llmgw ctl context show", "llmgw ctl context show prod -o yaml"],
  flags: { config, context, output: outputFlag },
  args: [{ name: "NAME", about: "the context; the current one when absent", optional: true }],
  run: async ({ flags, args, io }) => {
    const path = contextPath(flags.config, io);
    const found = chooseContext(await readContexts(path), args.NAME ?? flags.context, io.env, path);
    const shown = masked(found.context);
    printOne(io, flags.output, {
      rows: [
        ["name", found.name],
        ["file", path],
        ["servers", shown.servers.join(" ")],
        ["authority", shortPem(shown.ca)],
        ["certificate", shortPem(shown.cert)],
        ["key", shown.key],
      ],
      name: found.name,
      document: { name: found.name, file: path, ...shown },
    });
  },
});

async function inlined(text: string): Promise<string> {
  if (isPem(text)) return text;
  try {
    return await readFile(text, "utf8");
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot read ${text}`, messageOf(error), "check the path and its mode");
  }
}

/** The same context with the PEM texts themselves in place of their paths. */
async function withTexts(given: Context): Promise<Context> {
  const [ca, cert, key] = await Promise.all([inlined(given.ca), inlined(given.cert), inlined(given.key)]);
  return { servers: given.servers, ca, cert, key };
}

const add = command({
  name: "add",
  about: "Adds a fleet to the ones known here; the first becomes the current one",
  examples: ["llmgw ctl context add prod --server https://10.0.0.2:7443 --ca ca.crt --cert admin.crt --key admin.key"],
  flags: {
    config,
    server: { type: "list", value: "URL", about: "the server, https://host:port; repeat for more", required: true },
    ca: { type: "string", value: "FILE", about: "the authority to trust", required: true },
    cert: { type: "string", value: "FILE", about: "your certificate", required: true },
    key: { type: "string", value: "FILE", about: "its private key", required: true },
    inline: { type: "boolean", about: "keep the certificates and the key themselves in the file of contexts" },
    "dry-run": dryRunFlag,
  },
  args: [{ name: "NAME", about: "what to call it" }],
  run: async ({ flags, args, io }) => {
    const path = contextPath(flags.config, io);
    const file = await readContexts(path);
    if (Object.hasOwn(file.contexts, args.NAME)) {
      throw new OperatorError(
        "E_EXISTS",
        `there is a context "${args.NAME}" already`,
        `${path} holds it`,
        `llmgw ctl context rm ${args.NAME}`,
      );
    }
    const { ca, cert, key, server } = flags;
    const given = absolute({ servers: server, ca: resolve(io.cwd, ca), cert: resolve(io.cwd, cert), key: resolve(io.cwd, key) }, io.cwd);
    const next = { current: file.current ?? args.NAME, contexts: { ...file.contexts, [args.NAME]: given } };
    checked(next);
    await identityOf(args.NAME, given);
    if (flags["dry-run"]) return io.err(`would add ${args.NAME} to ${path}`);
    await writeContexts(path, flags.inline ? { ...next, contexts: { ...next.contexts, [args.NAME]: await withTexts(given) } } : next);
    io.err(`added ${args.NAME}${next.current === args.NAME ? ", and using it" : `; llmgw ctl context use ${args.NAME} chooses it`}`);
  },
});

function checked(file: ContextFile): void {
  try {
    parseAs(ContextFile, file, "this context");
  } catch (error) {
    throw error instanceof OperatorError ? new OperatorError("E_USAGE", error.message, error.why, "llmgw ctl context add --help") : error;
  }
}

const rm = command({
  name: "rm",
  about: "Forgets a fleet; its certificate files stay",
  examples: ["llmgw ctl context rm old"],
  flags: { config, "dry-run": dryRunFlag },
  args: [{ name: "NAME", about: "the context" }],
  run: async ({ flags, args, io }) => {
    const path = contextPath(flags.config, io);
    const file = await readContexts(path);
    contextNamed(file, args.NAME, path);
    if (flags["dry-run"]) return io.err(`would forget ${args.NAME}`);
    const contexts = Object.fromEntries(Object.entries(file.contexts).filter(([name]) => name !== args.NAME));
    const current = file.current === args.NAME ? undefined : file.current;
    await writeContexts(path, { ...(current === undefined ? {} : { current }), contexts });
    io.err(`forgot ${args.NAME}`);
  },
});

export const contextCommands = group({
  name: "context",
  about: "The fleets this machine knows, and the certificates to ask them with",
  commands: () => [ls, use, show, add, rm],
});
