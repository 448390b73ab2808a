import type { Args } from "../protocol/catalog.ts";
import { OperatorError } from "../protocol/errors.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import type { Engine, Flag, FlagRules } from "./engine.ts";

/** Names of flags or variables, written several to a line. */
export function wordsOf(...lines: readonly string[]): readonly string[] {
  return lines.flatMap((line) => line.split(" "));
}

/** A flag as a command has it; numbers as text. */
export function flag(name: string, value: string | number | null = null): Flag {
  return { name, value: value === null ? null : String(value) };
}

/** Flags as arguments of a command. */
export function argvOf(flags: readonly Flag[]): string[] {
  return flags.flatMap(({ name, value, joined }) => (value === null ? [name] : joined ? [`${name}=${value}`] : [name, value]));
}

/** What may not stand in `args` beside the other keys of its catalog entry. */
type ArgsOf = Pick<RankLaunch, "args" | "context" | "parallel">;

/** The name that a parser would read in a key of `args`: dashes at its front, a value behind it and `_` do not hide it. */
function nameOf(key: string): string {
  return `--${key
    .replace(/^-+/, "")
    .replace(/[=.\s].*$/s, "")
    .replaceAll("_", "-")}`;
}

/** The flag that a name stands for among these: itself, a short name of that letter, or what it is the beginning of. */
function meant(name: string, flags: readonly string[], { parser, whole }: FlagRules): string | null {
  const same = flags.find((each) => each === name || each === name.slice(1));
  if (same !== undefined) return same;
  if (parser === "exact" || whole.includes(name)) return null;
  return flags.find((each) => each.startsWith(name)) ?? null;
}

/** What is wrong with the `args` of a catalog entry before any engine is asked, one sentence each. */
export function argFaults({ rules }: Pick<Engine, "rules">, entry: ArgsOf): string[] {
  return Object.entries(entry.args).flatMap(([key, value]) => {
    const name = nameOf(key);
    const owned = meant(name, rules.owned, rules);
    if (owned !== null)
      return owned === name
        ? [`args may not set ${key}, llmgw sets it itself`]
        : [`args may not set ${key}, it means ${owned}, which llmgw sets itself`];
    const keyed = meant(name, Object.keys(rules.keyed), rules);
    const by = keyed === null ? undefined : rules.keyed[keyed];
    if (by !== undefined && entry[by] !== null) return [`args may not set ${key} beside ${by}, which says the same`];
    // Where a value stands apart, one that looks like a flag is one.
    if (rules.parser === "exact" && typeof value === "string" && /^--|^-[^\d.]/.test(value))
      return [`args may not give ${key} the value "${value}", which reads as a flag`];
    return [];
  });
}

/**
 * The catalog's `args` as flags: `--name value`, a bare `--name` for true, nothing for false.
 * @throws OperatorError E_ENGINE naming what is llmgw's own
 */
export function argsOf(engine: Pick<Engine, "kind" | "rules">, entry: ArgsOf): Flag[] {
  const [fault] = argFaults(engine, entry);
  if (fault !== undefined)
    throw new OperatorError("E_ENGINE", `cannot start ${engine.kind} with these args`, fault, "take it out of args in the catalog");
  return Object.entries(entry.args).flatMap(([name, value]) => {
    if (value === false) return [];
    const given = flag(`--${name}`, value === true ? null : value);
    return [engine.rules.parser === "argparse" ? { ...given, joined: true as const } : given];
  });
}

/** What llmgw chooses where `args` does not say it, by any of these names. */
export function chosen(args: Args, names: readonly [string, ...string[]], value: string | number): Flag[] {
  return names.some((name) => name.slice(2) in args) ? [] : [flag(names[0], value)];
}

/** A number from `args`, by any of these names; null when it is not there. */
export function numberIn(args: Args, names: readonly string[]): number | null {
  for (const name of names) if (name.slice(2) in args) return Number(args[name.slice(2)]);
  return null;
}
