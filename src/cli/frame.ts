/**
 * cli/ is the command line: one file per command, which reads flags, calls one function and prints. This file is
 * the frame around them. citty describes and runs each command; what it is lax about (unknown flags, extra
 * arguments, exit codes, colours in pipes) is decided here and in parse.ts. Nothing below cli/ reads flags or prints.
 */
import { basename } from "node:path";
import { defineCommand, runCommand } from "citty";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { nearest } from "../protocol/nearest.ts";
import { commandHelp, groupHelp } from "./help.ts";
import { printable } from "./output.ts";
import { parse, usageError } from "./parse.ts";
import type { ArgSpec, Command, CommandSpec, Entry, FlagSpecs, Group, Invocation, Io, Lazy } from "./spec.ts";
import { GLOBAL_FLAGS } from "./spec.ts";
import { processIo } from "./terminal.ts";

const INTERRUPTED = 130;

/** Makes a command from its specification. Flag and argument types follow from it. */
export function command<const F extends FlagSpecs, const A extends readonly ArgSpec[]>(spec: CommandSpec<F, A>): Command {
  const { name, about, examples, flags, args, hidden = false } = spec;
  const citty = defineCommand({
    meta: { name, description: about, hidden },
    // The invocation was made by parse() from the same specification, so its types are those of F and A.
    run: ({ data }) => spec.run(data as Invocation<F, A>),
  });
  return { kind: "command", name, about, examples, flags, args, hidden, citty };
}

/** Makes a group of commands: `llmgw ctl`. */
export function group(
  spec: Omit<Group, "kind" | "examples"> & {
    readonly examples?: readonly string[];
  },
): Group {
  return { ...spec, kind: "group", examples: spec.examples ?? [] };
}

/** A command whose module is loaded only when it is called or listed. */
export function lazy(name: string, load: () => Promise<Command | Group>): Lazy {
  return { kind: "lazy", name, load };
}

/** The command or group of an entry. */
export async function resolveEntry(entry: Entry): Promise<Command | Group> {
  return entry.kind === "lazy" ? entry.load() : entry;
}

interface Found {
  readonly target: Command | Group;
  readonly path: string;
  readonly rest: readonly string[];
}

/** Follows the words down the tree as far as they name commands; flags of every command may stand in between. */
async function find(root: Group, words: readonly string[]): Promise<Found> {
  let target: Command | Group = root;
  let path = root.name;
  let rest = [...words];
  while (target.kind === "group") {
    const at = rest.findIndex((word) => !isGlobalFlag(word));
    const word = rest[at];
    if (word === undefined) break;
    const entries: readonly Entry[] = target.commands();
    const entry = entries.find(({ name }) => name === word);
    if (!entry) throw await unknownCommand(path, entries, word);
    target = await resolveEntry(entry);
    path = `${path} ${word}`;
    rest = rest.toSpliced(at, 1);
  }
  return { target, path, rest };
}

function isGlobalFlag(word: string): boolean {
  return word === "-h" || (word.startsWith("--") && Object.hasOwn(GLOBAL_FLAGS, word.slice(2)));
}

async function unknownCommand(path: string, entries: readonly Entry[], word: string): Promise<OperatorError> {
  if (word.startsWith("-")) return usageError(path, `unknown flag ${word}`, `${path} takes a command first`);
  const visible = (await Promise.all(entries.map(resolveEntry))).filter((entry) => !entry.hidden).map((entry) => entry.name);
  const meant = nearest(word, visible);
  return usageError(path, `unknown command "${word}"`, `${path} has no such command`, meant ? `${path} ${meant}` : undefined);
}

/** Runs one command line and returns its exit code; throws what the command throws. */
export async function dispatch(root: Group, words: readonly string[], io: Io): Promise<number> {
  // What everybody tries on a program they do not know.
  const { target, path, rest } = await find(root, words.length === 1 && words[0] === "--version" ? ["version"] : words);
  if (target.kind === "group") {
    const help = groupHelp(path, target, await Promise.all(target.commands().map(resolveEntry)), io.color);
    const asked = rest.includes("--help") || rest.includes("-h");
    if (asked) io.out(help);
    else io.err(help);
    return asked ? 0 : 2;
  }
  const { flags, args } = parse(path, { ...GLOBAL_FLAGS, ...target.flags }, target.args, rest);
  if (flags["help"] === true) {
    io.out(commandHelp(path, target, io.color));
    return 0;
  }
  const { result } = await runCommand(target.citty, {
    rawArgs: [],
    data: { flags, args, io },
  });
  return typeof result === "number" ? result : 0;
}

/** The three lines an operator sees: what failed, why, what to try. */
export function errorLines(error: unknown, debug: boolean): string {
  const known = error instanceof OperatorError ? error : null;
  const what = known ? messageOf(known) : messageOf(error);
  const why = known?.why ?? "this is a fault in llmgw itself";
  const remedy = known?.remedy ?? "run it again with --debug and report what it prints";
  // Words of other machines are in it.
  const lines = [`llmgw: ${what} (${known?.code ?? "E_INTERNAL"})`, `  ${why}`, `  try: ${remedy}`].map(printable);
  if (debug && error instanceof Error) lines.push(error.stack ?? "", ...(error.cause instanceof Error ? [error.cause.stack ?? ""] : []));
  return lines.join("\n");
}

/**
 * Links named `llmgw-add-node`, `llmgw-provision-node` and so on are the subcommand of that name; the runbook's
 * `-node` may be left out.
 */
export function calledName(argv0: string, root: Group): readonly string[] {
  const name = basename(argv0);
  if (!name.startsWith("llmgw-")) return [];
  const wanted = name.slice("llmgw-".length);
  const names = root.commands().map((entry) => entry.name);
  const found = [wanted, wanted.replace(/-node$/, "")].find((candidate) => names.includes(candidate));
  return found ? [found] : [];
}

/** Runs the process's own command line, prints an error as three lines, and ends the process. */
export async function main(root: Group, argv0: string, given: readonly string[]): Promise<never> {
  const words = [...calledName(argv0, root), ...given];
  const io = processIo(words);
  const fail = (error: unknown): never => {
    io.err(errorLines(error, words.includes("--debug")));
    process.exit(error instanceof OperatorError ? error.exit : 1);
  };
  // A command that runs long sets its own handler; the others end at once.
  process.on("SIGINT", () => {
    if (process.listenerCount("SIGINT") === 1) process.exit(INTERRUPTED);
  });
  // What nobody waited for is told in the same form.
  process.on("uncaughtException", fail);
  process.on("unhandledRejection", fail);
  try {
    process.exit(await dispatch(root, words, io));
  } catch (error) {
    return fail(error);
  }
}
