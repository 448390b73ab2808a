import { stat, readFile } from "node:fs/promises";
import type * as v from "valibot";
import { safeParse } from "valibot";
import { isMap, LineCounter, parseAllDocuments, type Document, type YAMLParseError, type YAMLWarning } from "yaml";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { CONFIG_FILE_BYTES, YAML_ALIASES_COUNT } from "../protocol/limits.ts";
import { nearest } from "../protocol/nearest.ts";

/** One thing wrong in a YAML file. Lines and columns count from 1. */
interface Fault {
  readonly line: number;
  readonly column: number;
  readonly what: string;
  /** What to write instead, where that is known. */
  readonly remedy: string | null;
}

type Checked<T> = { readonly value: T; readonly faults: null } | { readonly value: null; readonly faults: readonly [Fault, ...Fault[]] };

interface Source {
  readonly document: Document.Parsed;
  readonly lines: LineCounter;
}

function faultAt(lines: LineCounter, offset: number, what: string, remedy: string | null = null): Fault {
  const { line, col } = lines.linePos(offset);
  return { line: Math.max(1, line), column: Math.max(1, col), what, remedy };
}

/** The one document of a text, or why there is none. */
function readDocument(text: string): Source | [Fault, ...Fault[]] {
  const lines = new LineCounter();
  const parsed = parseAllDocuments(text, { lineCounter: lines, prettyErrors: false, version: "1.2", stringKeys: true });
  const documents = "empty" in parsed ? [] : parsed;
  const [first, second] = documents;
  if (!first?.contents) return [faultAt(lines, 0, "the file is empty")];
  const [error, ...more] = documents.flatMap((document) => [...document.errors, ...document.warnings]);
  if (error) return [error, ...more].map((each) => faultAt(lines, each.pos[0], wordsOf(each))) as [Fault, ...Fault[]];
  if (second) return [faultAt(lines, second.range[0], "a second document starts here; the file may hold only one")];
  return { document: first, lines };
}

function wordsOf(error: YAMLParseError | YAMLWarning): string {
  return error.code === "NON_STRING_KEY" ? "a key is a word, and not a list or a map" : messageOf(error);
}

type Path = readonly (string | number)[];

/** Where the deepest part of a path that the file has begins: its key's place, or else its value's. */
function offsetOf({ document }: Source, path: Path): number {
  for (let depth = path.length; depth > 0; depth--) {
    const key = path[depth - 1];
    const parent = depth === 1 ? document.contents : document.getIn(path.slice(0, depth - 1), true);
    const pair = isMap(parent)
      ? parent.items.find((item) => String((item.key as { value?: unknown } | null)?.value) === String(key))
      : undefined;
    const node = pair?.key ?? document.getIn(path.slice(0, depth), true);
    const range = (node as { range?: [number, number, number] } | null | undefined)?.range;
    if (range) return range[0];
  }
  return document.contents?.range[0] ?? 0;
}

/** A value's place is better than its key's when the value is what is wrong. */
function valueOffsetOf(source: Source, path: Path): number {
  const node = source.document.getIn(path, true) as { range?: [number, number, number] } | null | undefined;
  return node?.range?.[0] ?? offsetOf(source, path);
}

type Shape = { entries?: Record<string, Shape>; wrapped?: Shape; item?: Shape; value?: Shape; pipe?: readonly Shape[]; options?: unknown };

/** The keys a schema knows at a path; none where that cannot be told. */
function knownKeys(schema: Shape | undefined, path: Path): string[] {
  if (!schema) return [];
  if (schema.wrapped) return knownKeys(schema.wrapped, path);
  const [key, ...rest] = path;
  if (schema.entries) return key === undefined ? Object.keys(schema.entries) : knownKeys(schema.entries[String(key)], rest);
  if (key === undefined) return [];
  return knownKeys(schema.item ?? schema.value, rest);
}

function quotedWords(expected: string | null): string[] {
  return [...(expected ?? "").matchAll(/"([^"]*)"/g)].map((match) => match[1] as string);
}

function faultOf(source: Source, schema: Shape, issue: v.BaseIssue<unknown>): Fault {
  const path = (issue.path ?? []).map((item) => item.key as string | number);
  const place = path.join(".") || "the file";
  const last = path.at(-1);
  const parent = path.slice(0, -1);
  if (issue.type === "strict_object" && issue.expected === "never") {
    const meant = nearest(String(last), knownKeys(schema, parent));
    const known = knownKeys(schema, parent).join(", ");
    return faultAt(source.lines, offsetOf(source, path), `unknown key "${String(last)}"`, meant ?? (known && `one of ${known}`) ?? null);
  }
  if (issue.type === "strict_object" && last !== undefined && issue.input === undefined) {
    return faultAt(
      source.lines,
      offsetOf(source, path),
      `"${String(last)}" is missing${parent.length > 0 ? ` in ${parent.join(".")}` : ""}`,
    );
  }
  const meant = typeof issue.input === "string" ? nearest(issue.input, quotedWords(issue.expected)) : null;
  const why = issue.message.replace(/^Invalid [^:]*: E/, "e");
  return faultAt(source.lines, valueOffsetOf(source, path), `${place}: ${why}`, meant);
}

/** Checks a YAML text against a schema and says all that is wrong, with places. */
export function checkYaml<S extends v.GenericSchema>(text: string, schema: S): Checked<v.InferOutput<S>> {
  const source = readDocument(text);
  if (Array.isArray(source)) return { value: null, faults: source };
  let value: unknown;
  try {
    value = source.document.toJS({ maxAliasCount: YAML_ALIASES_COUNT });
  } catch (error) {
    return { value: null, faults: [faultAt(source.lines, 0, messageOf(error))] };
  }
  const result = safeParse(schema, value);
  if (result.success) return { value: result.output, faults: null };
  const [first, ...more] = result.issues;
  const fault = (issue: v.BaseIssue<unknown>) => faultOf(source, schema as Shape, issue);
  const faults = [first, ...more]
    .map(fault)
    .sort((a, b) => a.line - b.line || a.column - b.column || Number(a.remedy === null) - Number(b.remedy === null));
  return { value: null, faults: faults as [Fault, ...Fault[]] };
}

/**
 * Reads a YAML text by its schema.
 * @param path the file it came from, for the error
 * @param subject what the file is: "the server's configuration"
 * @throws OperatorError E_CONFIG with file, line, column and the nearest right key
 */
export function parseYaml<S extends v.GenericSchema>(text: string, path: string, schema: S, subject: string): v.InferOutput<S> {
  const { value, faults } = checkYaml(text, schema);
  if (faults === null) return value;
  const [{ line, column, what, remedy }, ...more] = faults;
  const others = more.length === 0 ? "" : `; ${more.length} more ${more.length === 1 ? "place is" : "places are"} wrong`;
  throw new OperatorError(
    "E_CONFIG",
    `${path}:${line}:${column}: ${what}`,
    `${subject} is not valid${others}`,
    remedy ? `write ${remedy}` : `correct it, then run llmgw config check ${path}`,
  );
}

/**
 * The text of a configuration file.
 * @throws OperatorError E_CONFIG when there is none, it cannot be read, or it is too large
 */
export async function readConfigText(path: string, subject: string): Promise<string> {
  try {
    const { size } = await stat(path);
    if (size <= CONFIG_FILE_BYTES) return await readFile(path, "utf8");
    throw new OperatorError(
      "E_CONFIG",
      `cannot read ${path}`,
      `it has ${size} bytes; at most ${CONFIG_FILE_BYTES} are read`,
      "name the right file",
    );
  } catch (error) {
    if (error instanceof OperatorError) throw error;
    const missing = (error as NodeJS.ErrnoException).code === "ENOENT";
    const why = missing ? `there is no ${path}` : messageOf(error);
    throw new OperatorError(
      "E_CONFIG",
      `cannot read ${subject}`,
      why,
      missing ? "write it, or name another file" : `check the owner and mode of ${path}`,
    );
  }
}

/**
 * Reads a YAML file by its schema.
 * @throws OperatorError E_CONFIG, see {@link parseYaml}
 */
export async function readYaml<S extends v.GenericSchema>(path: string, schema: S, subject: string): Promise<v.InferOutput<S>> {
  return parseYaml(await readConfigText(path, subject), path, schema, subject);
}
