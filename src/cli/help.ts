import type { ArgSpec, Command, FlagSpec, FlagSpecs, Group } from "./spec.ts";
import { GLOBAL_FLAGS } from "./spec.ts";

/** Bold where colour is allowed, plain elsewhere. */
type Paint = (text: string) => string;
const paint = (color: boolean): Paint => (color ? (text) => `\u001b[1m${text}\u001b[0m` : (text) => text);

function columns(rows: readonly (readonly [string, string])[]): string {
  const width = Math.max(...rows.map(([left]) => left.length));
  return rows.map(([left, right]) => `  ${left.padEnd(width)}  ${right}`.trimEnd()).join("\n");
}

function flagName(name: string, spec: FlagSpec): string {
  const short = spec.short ? `-${spec.short}, ` : "    ";
  if (spec.type === "boolean") return `${short}--${spec.default === true ? `no-${name}` : name}`;
  return `${short}--${name} ${spec.value ?? (spec.type === "number" ? "N" : "VALUE")}`;
}

function flagAbout(spec: FlagSpec): string {
  const notes: string[] = [];
  if (spec.choices) notes.push(`one of ${spec.choices.join(", ")}`);
  if (spec.type === "list") notes.push("may be repeated");
  if (spec.required) notes.push("required");
  if (spec.default !== undefined && spec.type !== "boolean") notes.push(`default ${spec.default}`);
  return notes.length > 0 ? `${spec.about} (${notes.join("; ")})` : spec.about;
}

function flagSection(title: string, flags: FlagSpecs, bold: Paint): string[] {
  const visible = Object.entries(flags).filter(([, spec]) => !spec.hidden);
  if (visible.length === 0) return [];
  return [`${bold(title)}\n${columns(visible.map(([name, spec]) => [flagName(name, spec), flagAbout(spec)]))}`];
}

function argUsage(spec: ArgSpec): string {
  const name = spec.rest ? `${spec.name}...` : spec.name;
  return spec.optional ? `[${name}]` : name;
}

function exampleSection(examples: readonly string[], bold: Paint): string[] {
  return examples.length === 0 ? [] : [`${bold("Examples")}\n${examples.map((example) => `  ${example}`).join("\n")}`];
}

/** The help of one command. `path` is the command as written: `llmgw ctl nodes`. */
export function commandHelp(path: string, command: Command, color: boolean): string {
  const bold = paint(color);
  const flags = Object.values(command.flags).some((spec) => !spec.hidden) ? [" [flags]"] : [];
  const usage = [path, ...command.args.map(argUsage)].join(" ") + flags.join("");
  const args = command.args.map((spec): [string, string] => [argUsage(spec), spec.about]);
  return [
    `${command.about}.`,
    `${bold("Usage")}\n  ${usage}`,
    ...exampleSection(command.examples, bold),
    ...(args.length > 0 ? [`${bold("Arguments")}\n${columns(args)}`] : []),
    ...flagSection("Flags", command.flags, bold),
    ...flagSection("Flags of every command", GLOBAL_FLAGS, bold),
  ].join("\n\n");
}

/** The help of a group: its commands, one line each. */
export function groupHelp(path: string, group: Group, commands: readonly (Command | Group)[], color: boolean): string {
  const bold = paint(color);
  const rows = commands.filter((entry) => !entry.hidden).map((entry): [string, string] => [entry.name, entry.about]);
  return [
    `${group.about}.`,
    `${bold("Usage")}\n  ${path} COMMAND [flags]`,
    ...exampleSection(group.examples, bold),
    `${bold("Commands")}\n${columns(rows)}`,
    ...flagSection("Flags of every command", GLOBAL_FLAGS, bold),
    `${path} COMMAND --help tells more.`,
  ].join("\n\n");
}
