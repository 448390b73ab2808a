/** The pages of docs/reference/, made from the sources they describe. `npm run docs` writes them; a test compares. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { resolveEntry } from "../src/cli/frame.ts";
import { commandHelp, groupHelp } from "../src/cli/help.ts";
import { root } from "../src/cli/root.ts";
import type { Command, Group } from "../src/cli/spec.ts";
import { CHECKS } from "../src/doctor/checks.ts";
import { ModelSpec } from "../src/protocol/catalog.ts";
import { AgentConfig, ProvisionFile, ServerConfig } from "../src/protocol/config.ts";
import { ERRORS } from "../src/protocol/errors.ts";
import * as limits from "../src/protocol/limits.ts";
import { enginesPage } from "./engine-reference.ts";

const source = (name: string) => readFileSync(join(import.meta.dir, "..", "src", "protocol", name), "utf8");

/** A documentation comment as one line. */
const flat = (comment: string) => comment.replaceAll(/\s*\n\s*\*?\s*/g, " ").trim();
const cell = (text: string) => text.replaceAll("|", "\\|");
const row = (...cells: string[]) => `| ${cells.map(cell).join(" | ")} |`;
const heading = (...cells: string[]) => [row(...cells), row(...cells.map(() => "---"))];
const made = (from: string) => `Made from \`${from}\` by \`npm run docs\`.`;

function readable(name: string, value: number): string {
  if (name.endsWith("_BYTES")) {
    const units: [number, string][] = [
      [1024 ** 3, "GiB"],
      [1024 ** 2, "MiB"],
      [1024, "KiB"],
    ];
    const [size, unit] = units.find(([size]) => value >= size && value % size === 0) ?? [1, "bytes"];
    return `${value / size} ${unit}`;
  }
  if (!name.endsWith("_MS")) return String(value);
  if (value % 60_000 === 0) return `${value / 60_000} min`;
  return value % 1_000 === 0 ? `${value / 1_000} s` : `${value} ms`;
}

function limitsPage(): string {
  const values: Record<string, unknown> = { ...limits };
  const found = [...source("limits.ts").matchAll(/\/\*\*((?:(?!\*\/)[\s\S])*)\*\/\s*export const (\w+)/g)];
  const rows = found.map(([, about = "", name = ""]) => row(`\`${name}\``, readable(name, Number(values[name])), flat(about)));
  if (rows.length !== Object.keys(values).length) throw new Error("a limit of src/protocol/limits.ts has no comment");
  return ["# Limits", "", made("src/protocol/limits.ts"), "", ...heading("Name", "Value", "Meaning"), ...rows, ""].join("\n");
}

function errorsPage(): string {
  const rows = Object.entries(ERRORS).map(([code, { exit, status, about }]) => row(`\`${code}\``, String(exit), String(status), about));
  return [
    "# Errors",
    "",
    made("src/protocol/errors.ts"),
    "",
    "An error has three lines: what failed and its code, why, and what to try. The command line ends with the exit code,",
    'the admin and agent APIs answer with the HTTP status and `{"error": {"code", "what", "why", "remedy"}}`.',
    "",
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 cannot reach or not allowed, 4 timed out, 130 interrupted.",
    "",
    ...heading("Code", "Exit", "Status", "Meaning"),
    ...rows,
    "",
  ].join("\n");
}

async function cliSections(path: string, entry: Command | Group): Promise<string[]> {
  if (entry.hidden) return [];
  const section = (help: string) => ["", `## ${path}`, "", "```text", help, "```"];
  if (entry.kind === "command") return section(commandHelp(path, entry, false));
  const commands = await Promise.all(entry.commands().map(resolveEntry));
  const below: string[] = [];
  for (const command of commands) below.push(...(await cliSections(`${path} ${command.name}`, command)));
  return [...section(groupHelp(path, entry, commands, false)), ...below];
}

async function cliPage(): Promise<string> {
  return ["# Command line", "", made("src/cli/"), ...(await cliSections(root.name, root)), ""].join("\n");
}

/** What the walk needs of a valibot schema. */
interface Shape {
  readonly type: string;
  readonly entries?: Record<string, Shape>;
  readonly wrapped?: Shape;
  readonly default?: unknown;
  readonly item?: Shape;
  readonly options?: readonly unknown[];
  readonly pipe?: readonly { type: string; requirement?: unknown; message?: unknown }[];
}

function typeName(shape: Shape): string {
  if (shape.wrapped) return typeName(shape.wrapped);
  if (shape.type === "picklist") return (shape.options ?? []).map((option) => `\`${String(option)}\``).join(", ");
  if (shape.type === "array") return `list of ${shape.item ? typeName(shape.item) : "values"}`;
  if (shape.type === "record") return "keys and values";
  if (shape.entries) return "section";
  const bounds = (shape.pipe ?? []).flatMap(({ type, requirement, message }) => {
    if (typeof message === "string" && type !== "min_length") return [message];
    if (type === "min_value") return [`at least ${String(requirement)}`];
    return type === "max_value" && requirement !== Number.MAX_SAFE_INTEGER ? [`at most ${String(requirement)}`] : [];
  });
  return [shape.type, ...bounds].join(", ");
}

function configRows(shape: Shape, prefix: string, about: ReadonlyMap<string, string>): string[] {
  return Object.entries(shape.entries ?? {}).flatMap(([key, entry]) => {
    const inner = entry.wrapped ?? entry;
    const name = `${prefix}${key}`;
    const optional = entry.type === "optional";
    const value = optional && entry.default !== undefined ? `\`${JSON.stringify(entry.default)}\`` : "";
    if (inner.entries && value === "`{}`") return configRows(inner, `${name}.`, about);
    const rows = [row(`\`${name}\``, typeName(inner), optional ? value : "required", about.get(name) ?? "")];
    return inner.entries ? [...rows, ...configRows(inner, `${name}.`, about)] : rows;
  });
}

/** The comments above the keys of a schema's source, by the keys' paths. The formatter's indents tell the nesting. */
function keyComments(text: string): Map<string, string> {
  const comments = new Map<string, string>();
  const trail: { indent: number; key: string }[] = [];
  let above = "";
  for (const [, indent = "", comment, key] of text.matchAll(/^( *)(?:\/\*\*((?:(?!\*\/)[\s\S])*)\*\/|(\w+):)/gm)) {
    if (comment !== undefined) above = flat(comment);
    if (key === undefined) continue;
    while ((trail.at(-1)?.indent ?? -1) >= indent.length) trail.pop();
    trail.push({ indent: indent.length, key });
    if (above) comments.set(trail.map((step) => step.key).join("."), above);
    above = "";
  }
  return comments;
}

function configPage(): string {
  const [server = "", rest = ""] = source("config.ts").split("export const AgentConfig");
  const [agent = "", provision = ""] = rest.split("export const ProvisionFile");
  const section = (title: string, about: string, shape: unknown, text: string) => [
    "",
    `## ${title}`,
    "",
    about,
    "",
    ...heading("Key", "Value", "Default", "Meaning"),
    ...configRows(shape as Shape, "", keyComments(text)),
  ];
  return [
    "# Configuration files",
    "",
    made("src/protocol/config.ts"),
    "",
    "YAML. An unknown key or a wrong value is an error with file, line and column: `llmgw config check FILE`.",
    "Relative paths are relative to the file they stand in.",
    ...section("server.yaml", "For `llmgw server`.", ServerConfig, server),
    ...section("agent.yaml", "For `llmgw agent`; every key is also a flag, with `-` for `_`.", AgentConfig, agent),
    ...section(
      "provision.yaml",
      "For `llmgw provision` and `add-node`; every key is also a flag, with `-` for `_`, and a variable, `LLMGW_` and capitals.",
      ProvisionFile,
      provision,
    ),
    ...section("catalog.yaml", "The models to serve: a list under `models`. Each entry:", ModelSpec, source("catalog.ts")),
    "",
  ].join("\n");
}

function doctorPage(): string {
  const rows = CHECKS.map(({ id, title, why, remedy }) => row(`\`${id}\``, title, why, remedy));
  return [
    "# Checks of llmgw doctor",
    "",
    made("src/doctor/"),
    "",
    "Each check ends as `pass`, `warn`, `fail`, `unknown` (it could not be read: neither good nor bad) or `skipped` (it does",
    "not apply here). The exit code is 1 when a check failed; with `--strict` also when one warned. `-o json` prints",
    '`{"version", "node", "checks": [{"id", "title", "verdict", "found", "source", "remedy"}]}`. Nothing is changed on the machine.',
    "",
    ...heading("Check", "What", "Why", "Remedy"),
    ...rows,
    "",
  ].join("\n");
}

/** Every generated page by its path from the root. */
export async function referencePages(): Promise<Record<string, string>> {
  return {
    "docs/reference/cli.md": await cliPage(),
    "docs/reference/config.md": configPage(),
    "docs/reference/doctor.md": doctorPage(),
    "docs/reference/engines.md": enginesPage(),
    "docs/reference/errors.md": errorsPage(),
    "docs/reference/limits.md": limitsPage(),
  };
}
