import { OperatorError } from "../protocol/errors.ts";
import { nearest } from "../protocol/nearest.ts";
import type { ArgSpec, FlagSpec, FlagSpecs } from "./spec.ts";

type Value = string | number | boolean | string[] | undefined;

interface Parsed {
  readonly flags: Record<string, Value>;
  readonly args: Record<string, string | string[] | undefined>;
}

/** A mistake on the command line. `path` is the command as written: `llmgw ctl nodes`. */
export function usageError(path: string, what: string, why: string, remedy?: string): OperatorError {
  return new OperatorError("E_USAGE", what, why, remedy ?? `${path} --help`);
}

function findFlag(specs: FlagSpecs, written: string): [string, FlagSpec] | null {
  if (written.startsWith("--")) {
    const name = written.slice(2);
    const spec = Object.hasOwn(specs, name) ? specs[name] : undefined;
    return spec ? [name, spec] : null;
  }
  return Object.entries(specs).find(([, spec]) => spec.short !== undefined && `-${spec.short}` === written) ?? null;
}

function unknownFlag(path: string, specs: FlagSpecs, written: string): OperatorError {
  const visible = Object.entries(specs).filter(([, spec]) => !spec.hidden);
  const meant = nearest(
    written.replace(/^-+/, ""),
    visible.map(([name]) => name),
  );
  return usageError(path, `unknown flag ${written}`, `${path} has no such flag`, meant ? `--${meant}` : undefined);
}

function readNumber(path: string, name: string, spec: FlagSpec, text: string): number {
  const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : Number.NaN;
  if (!Number.isFinite(number)) throw usageError(path, `--${name} needs a number`, `"${text}" is not one`);
  if (!spec.fraction && !Number.isSafeInteger(number)) throw usageError(path, `--${name} needs a whole number`, `"${text}" is not one`);
  const { min = Number.NEGATIVE_INFINITY, max = Number.POSITIVE_INFINITY } = spec;
  if (number < min || number > max) throw usageError(path, `--${name} ${text} is out of range`, rangeOf(spec));
  return number;
}

function rangeOf({ min, max }: FlagSpec): string {
  if (min === undefined) return `it may be at most ${max}`;
  return max === undefined ? `it must be at least ${min}` : `it must be between ${min} and ${max}`;
}

function readValue(path: string, name: string, spec: FlagSpec, text: string): string | number {
  if (spec.type === "number") return readNumber(path, name, spec, text);
  if (spec.choices && !spec.choices.includes(text)) {
    const meant = nearest(text, spec.choices);
    const remedy = meant ? `--${name} ${meant}` : undefined;
    throw usageError(path, `--${name} cannot be "${text}"`, `it is one of ${spec.choices.join(", ")}`, remedy);
  }
  return text;
}

function readBoolean(path: string, name: string, text: string | undefined): boolean {
  if (text === undefined || text === "true") return true;
  if (text === "false") return false;
  throw usageError(path, `--${name} takes no value`, `"${text}" was given`, `--${name}`);
}

/** `-abc` is one flag here; `--name=value` and `-o=value` are split; `-` alone and numbers are arguments. */
function splitFlag(word: string): { written: string; inline: string | undefined } | null {
  if (word === "-" || !word.startsWith("-") || /^-\d/.test(word)) return null;
  const equals = word.indexOf("=");
  return equals < 0 ? { written: word, inline: undefined } : { written: word.slice(0, equals), inline: word.slice(equals + 1) };
}

function store(path: string, flags: Record<string, Value>, name: string, spec: FlagSpec, value: string | number | boolean): void {
  if (spec.type === "list") {
    const list = flags[name];
    flags[name] = [...(Array.isArray(list) ? list : []), String(value)];
    return;
  }
  if (Object.hasOwn(flags, name)) throw usageError(path, `--${name} was given twice`, "it takes one value");
  flags[name] = value;
}

/** Takes the flag at `words[at]`, and its value. Returns how many words that were. */
function takeFlag(
  path: string,
  specs: FlagSpecs,
  flags: Record<string, Value>,
  words: readonly string[],
  at: number,
  split: { written: string; inline: string | undefined },
): number {
  const { written, inline } = split;
  const negated = written.startsWith("--no-") ? findFlag(specs, `--${written.slice(5)}`) : null;
  const found = findFlag(specs, written);
  if (!found && negated?.[1].type === "boolean" && inline === undefined) {
    store(path, flags, negated[0], negated[1], false);
    return 1;
  }
  if (!found) throw unknownFlag(path, specs, written);
  const [name, spec] = found;
  if (spec.type === "boolean") {
    store(path, flags, name, spec, readBoolean(path, name, inline));
    return 1;
  }
  const next = words[at + 1];
  const text = inline ?? (next !== undefined && splitFlag(next) === null ? next : undefined);
  if (text === undefined || text === "--") throw usageError(path, `--${name} needs a value`, `write --${name} ${spec.value ?? "VALUE"}`);
  store(path, flags, name, spec, readValue(path, name, spec, text));
  return inline === undefined ? 2 : 1;
}

function fillFlags(path: string, specs: FlagSpecs, flags: Record<string, Value>): void {
  for (const [name, spec] of Object.entries(specs)) {
    if (Object.hasOwn(flags, name)) continue;
    if (spec.required) throw usageError(path, `--${name} is missing`, `${path} needs it`, `add --${name} ${spec.value ?? "VALUE"}`);
    flags[name] = spec.default ?? (spec.type === "list" ? [] : spec.type === "boolean" ? false : undefined);
  }
}

function checkChoice(path: string, { name, choices }: ArgSpec, word: string): void {
  if (!choices || choices.includes(word)) return;
  const meant = nearest(word, choices);
  throw usageError(path, `${name} cannot be "${word}"`, `it is one of ${choices.join(", ")}`, meant ? `${path} ${meant}` : undefined);
}

function fillArgs(path: string, specs: readonly ArgSpec[], words: readonly string[]): Parsed["args"] {
  const args: Parsed["args"] = {};
  let taken = 0;
  for (const spec of specs) {
    for (const word of words.slice(taken, spec.rest ? undefined : taken + 1)) checkChoice(path, spec, word);
    if (spec.rest) {
      args[spec.name] = words.slice(taken);
      taken = words.length;
    } else args[spec.name] = words[taken++];
    if (!spec.optional && (args[spec.name] === undefined || args[spec.name]?.length === 0)) {
      throw usageError(path, `${spec.name} is missing`, `${path} needs it: ${spec.about}`);
    }
  }
  if (words.length > taken) {
    const most = specs.length === 0 ? "takes no argument" : `takes ${specs.map((spec) => spec.name).join(" ")} and nothing more`;
    throw usageError(path, `unexpected argument "${words[taken]}"`, `${path} ${most}`);
  }
  return args;
}

/**
 * Reads a command line strictly: every flag and argument must be known, given once, and of its type.
 * @throws OperatorError E_USAGE naming the nearest right name
 */
export function parse(path: string, specs: FlagSpecs, argSpecs: readonly ArgSpec[], words: readonly string[]): Parsed {
  const flags: Record<string, Value> = {};
  const plain: string[] = [];
  for (let at = 0; at < words.length;) {
    const word = words[at] as string;
    if (word === "--") {
      plain.push(...words.slice(at + 1));
      break;
    }
    const split = splitFlag(word);
    if (split) at += takeFlag(path, specs, flags, words, at, split);
    else {
      plain.push(word);
      at += 1;
    }
  }
  // Help is answered whatever is missing.
  if (flags["help"] === true) return { flags, args: {} };
  const args = fillArgs(path, argSpecs, plain);
  fillFlags(path, specs, flags);
  return { flags, args };
}
