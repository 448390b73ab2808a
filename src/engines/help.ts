import type { FlagFinding } from "../protocol/engine-check.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { Flag } from "./engine.ts";
import { renamed } from "./renames.ts";

/** One option of an engine as its help documents it. */
export interface HelpFlag {
  /** All names, with dashes, in the order of the help. */
  readonly names: readonly string[];
  /** The form of its value as printed (`N`, `[on|off|auto]`), or "" when it takes none. */
  readonly value: string;
  /** The values it allows, when the help lists them. */
  readonly choices: readonly string[] | null;
  readonly state: "current" | "deprecated" | "removed";
  /** What the help says of a removed or deprecated flag. */
  readonly note: string;
}

/**
 * A help text, read. `whole` says that its end was recognised: only then is a flag that is not in it missing;
 * in a text that was cut it is merely unproved. `none` means that the text lists no flags at all.
 */
interface Help {
  readonly kind: EngineKind;
  readonly state: "whole" | "cut" | "none";
  /** Why it is not whole and what to do; "" when it is. */
  readonly reason: string;
  readonly flags: ReadonlyMap<string, HelpFlag>;
}

/** Reads the output of an engine's `--help` (stdout and stderr may be mixed). */
export function readHelp(kind: EngineKind, output: string): Help {
  const lines = output.replaceAll("\r\n", "\n").split("\n");
  const flags = new Map<string, HelpFlag>();
  for (const flag of readFlags(kind, lines)) for (const name of flag.names) flags.set(name, flag);
  const problem = incomplete(kind, output, lines, flags);
  return { kind, state: problem?.state ?? "whole", reason: problem?.reason ?? "", flags };
}

/** The option heads stand at the left margin in llama.cpp, behind two blanks in Python's argparse. */
function headOf(kind: EngineKind, line: string): string | null {
  const indent = kind === "llamacpp" || kind === "sim" ? "" : "  ";
  if (!line.startsWith(indent) || !/^--?[A-Za-z0-9]/.test(line.slice(indent.length))) return null;
  return line.slice(indent.length);
}

function* readFlags(kind: EngineKind, lines: readonly string[]): Generator<HelpFlag> {
  for (let at = 0; at < lines.length; at += 1) {
    const line = headOf(kind, lines[at] ?? "");
    if (line === null) continue;
    // Short names are padded into a column of their own: `-t,    --threads N`.
    const [head = "", ...rest] = line.replaceAll(/,\s+(?=-)/g, ", ").split(/\s{2,}/);
    const description = [rest.join(" ")];
    for (let next = at + 1; next < lines.length && /^\s{4,}\S/.test(lines[next] ?? ""); next += 1)
      description.push((lines[next] ?? "").trim());
    yield flagOf(head, description.join(" ").trim());
  }
}

function flagOf(head: string, description: string): HelpFlag {
  const parts = head.split(/,\s(?=-)/);
  const names = parts.map((part) => part.split(/\s/, 1)[0] ?? "");
  // argparse repeats the value behind each name, llama.cpp gives it once, behind the last.
  const value = (parts.at(-1) ?? "").replace(/^\S+\s*/, "").trim();
  // `{a,b}`, `[a|b]` and `<0|1>` list choices; `<dev1,dev2,..>` is a form.
  const braced = /^\{(\S+)\}$/.exec(value)?.[1];
  const barred = /^[[<]([^\s,]+\|[^\s,]+)[\]>]$/.exec(value)?.[1];
  const choices = braced?.split(",") ?? barred?.split("|") ?? null;
  if (/argument has been removed/i.test(description)) return { names, value, choices, state: "removed", note: description };
  if (/\bdeprecated\b/i.test(description)) return { names, value, choices, state: "deprecated", note: description };
  return { names, value, choices, state: "current", note: "" };
}

type Problem = { readonly state: "cut" | "none"; readonly reason: string };

function incomplete(kind: EngineKind, output: string, lines: readonly string[], flags: ReadonlyMap<string, HelpFlag>): Problem | null {
  switch (kind) {
    case "llamacpp":
      return incompleteLlamacpp(lines, flags);
    case "vllm":
      return incompleteVllm(output, flags);
    case "sglang":
      return incompleteSglang(lines, flags);
    case "sim":
      return flags.size === 0 ? { state: "none", reason: "the text lists no options" } : null;
  }
}

/** Sections of llama-server's help, in order; the first three are as old as the last two years' builds. */
const LLAMACPP_SECTIONS = ["common params", "sampling params", "example-specific params"];

function incompleteLlamacpp(lines: readonly string[], flags: ReadonlyMap<string, HelpFlag>): Problem | null {
  if (flags.size === 0) return { state: "none", reason: "the text lists no options: is this the output of llama-server --help?" };
  const missing = LLAMACPP_SECTIONS.filter((section) => !lines.some((line) => line.startsWith("-----") && line.includes(section)));
  if (missing.length > 0) return { state: "cut", reason: `the text is cut: its section "${missing.join('", "')}" is not there` };
  // The last section ends with the presets (`--gpt-oss-120b-default`, …, `--spec-default`).
  const last = [...flags.keys()].slice(-6);
  if (!last.some((name) => name.endsWith("-default"))) {
    return { state: "cut", reason: `the text is cut: it ends at ${last.at(-1)}, before the presets that close it` };
  }
  return null;
}

function incompleteVllm(output: string, flags: ReadonlyMap<string, HelpFlag>): Problem | null {
  if (output.includes("Failed to infer device type")) {
    return { state: "none", reason: "vLLM prints its options only where it sees an accelerator: run the check on a GPU node" };
  }
  if (output.includes("Config Groups:"))
    return { state: "none", reason: "this is vLLM's summary: give the output of vllm serve --help=all" };
  if (flags.size === 0) return { state: "none", reason: "the text lists no options: is this the output of vllm serve --help=all?" };
  if (!/^(options|optional arguments):/m.test(output))
    return { state: "cut", reason: "this is a part of vLLM's help, a group or a search: give the output of vllm serve --help=all" };
  if (!/^VllmConfig:/m.test(output) || !output.includes("When passing JSON CLI arguments")) {
    return {
      state: "cut",
      reason: "the text is cut: the group VllmConfig and the note on JSON arguments that close it are not both there",
    };
  }
  return null;
}

/** argparse lists every option twice, in the usage and in the list: what only the usage names was cut off. */
function incompleteSglang(lines: readonly string[], flags: ReadonlyMap<string, HelpFlag>): Problem | null {
  const start = lines.findIndex((line) => line.startsWith("usage:"));
  const end = lines.findIndex((line) => /^(options|optional arguments):/.test(line));
  if (start < 0) return { state: "none", reason: "the text has no usage: is this the output of sglang's launch_server --help?" };
  if (end < 0) return { state: "cut", reason: "the text is cut: it ends before its list of options" };
  const usage = lines.slice(start, end).join(" ");
  const unlisted = [...usage.matchAll(/(?:^|[\s[|(])(--[a-z][a-z0-9-]*)/g)]
    .map((match) => match[1] ?? "")
    .filter((name) => !flags.has(name));
  if (unlisted.length > 0)
    return {
      state: "cut",
      reason: `the text is cut: ${unlisted.length} options of its usage are not in its list, the first is ${unlisted[0]}`,
    };
  return null;
}

/** Says of each flag that a command would use what this help proves. Order and number as given. */
export function checkFlags(help: Help, wanted: readonly Flag[]): FlagFinding[] {
  return wanted.map(({ name, value }) => ({ flag: name, value, ...checkFlag(help, name, value) }));
}

function checkFlag(help: Help, flag: string, value: string | null): Pick<FlagFinding, "verdict" | "text"> {
  const found = help.flags.get(flag) ?? (help.kind === "vllm" ? help.flags.get(flag.replaceAll("_", "-")) : undefined);
  if (!found) {
    if (help.state !== "whole") return { verdict: "unproved", text: "not in this text, which is not whole" };
    return { verdict: "missing", text: instead(help, flag) };
  }
  if (found.state === "removed") return { verdict: "removed", text: found.note };
  const wrong = wrongValue(found, flag, value);
  if (wrong) return { verdict: "bad-value", text: wrong };
  if (found.state === "deprecated") return { verdict: "deprecated", text: found.note };
  return { verdict: "accepted", text: "" };
}

function wrongValue(found: HelpFlag, flag: string, value: string | null): string | null {
  if (found.value === "" && value !== null) return `${flag} takes no value, but is given "${value}"`;
  // argparse prints an optional value in brackets; llama.cpp's `[on|off|auto]` is a list of choices.
  const optional = found.value.startsWith("[") && found.choices === null;
  if (found.value !== "" && value === null && !optional) return `${flag} needs a value: ${found.value}`;
  if (value !== null && found.choices && !found.choices.includes(value))
    return `${flag} takes one of ${found.choices.join(", ")}, not "${value}"`;
  return null;
}

function instead(help: Help, flag: string): string {
  const known = renamed(help.kind, flag);
  if (known !== undefined) return known;
  const near = nearest(
    flag,
    [...help.flags.keys()].filter((name) => name.startsWith("--")),
  );
  return near ? `this build does not have it; the nearest it has is ${near}` : "this build does not have it";
}

function nearest(flag: string, names: readonly string[]): string | null {
  const words = new Set(flag.replace(/^--?(no-)?/, "").split("-"));
  let best: { readonly name: string; readonly score: number } | null = null;
  for (const name of names) {
    const other = name.replace(/^--?(no-)?/, "").split("-");
    const score = other.filter((word) => words.has(word)).length / Math.max(other.length, words.size);
    if (score >= 0.5 && (!best || score > best.score)) best = { name, score };
  }
  return best?.name ?? null;
}
