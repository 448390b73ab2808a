import { stringify } from "yaml";
import type { FlagSpec, Io } from "./spec.ts";

/** The forms data is printed in. JSON and YAML are the admin API's own documents. */
const OUTPUT_FORMS = ["table", "wide", "json", "yaml", "name"] as const;
export type OutputForm = (typeof OUTPUT_FORMS)[number];

/** The `-o` flag of commands that print data. */
export const outputFlag = {
  type: "string",
  short: "o",
  value: "FORM",
  choices: OUTPUT_FORMS,
  default: "table",
  about: "form of the answer",
} as const satisfies FlagSpec;

/** One column of a table. */
export interface Column<T> {
  readonly title: string;
  readonly cell: (item: T) => string | number | null | undefined;
  /** Shown only by `-o wide`. */
  readonly wide?: boolean;
  /** Numbers stand at the right. */
  readonly right?: boolean;
}

/** How a list is printed. */
export interface Listing<T> {
  readonly columns: readonly Column<T>[];
  /** What `-o name` prints, one a line. */
  readonly name: (item: T) => string;
  /** The document for json and yaml: the whole answer of the API, not only its rows. */
  readonly document: unknown;
  /** What stands instead of an empty table, on stderr: "no nodes yet". */
  readonly empty: string;
}

const SECOND_MS = 1_000;
const MINUTE_MS = 60 * SECOND_MS;
const HOUR_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * HOUR_MS;

/** How long ago, in its largest unit: `12s`, `3m`, `5h`, `9d`. Times to come (a clock ahead) are `0s`. */
export function age(then_ms: number, now_ms: number): string {
  return span(Math.max(0, now_ms - then_ms));
}

/** A length of time in its largest unit: `3m`. */
export function span(length_ms: number): string {
  if (length_ms < 2 * MINUTE_MS) return `${Math.floor(length_ms / SECOND_MS)}s`;
  if (length_ms < 2 * HOUR_MS) return `${Math.floor(length_ms / MINUTE_MS)}m`;
  if (length_ms < 2 * DAY_MS) return `${Math.floor(length_ms / HOUR_MS)}h`;
  return `${Math.floor(length_ms / DAY_MS)}d`;
}

/** A count of bytes to three digits: `1.50 GiB`. */
export function size(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  const digits = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

/** Control characters from other machines must not reach the terminal. */
export function printable(text: string): string {
  return text.replaceAll(/\p{Cc}/gu, " ");
}

/** Lines of a table: columns two blanks apart, as wide as their widest cell, no blank at the end. Empty cells are `-`. */
export function table<T>(columns: readonly Column<T>[], items: readonly T[], wide = false): string[] {
  const shown = columns.filter((column) => wide || !column.wide);
  const cells = items.map((item) => shown.map((column) => printable(String(column.cell(item) ?? "")) || "-"));
  const rows = [shown.map((column) => column.title), ...cells];
  const widths = shown.map((_, index) => Math.max(...rows.map((row) => Bun.stringWidth(row[index] ?? ""))));
  const pad = (text: string, index: number) => {
    const blanks = " ".repeat((widths[index] ?? 0) - Bun.stringWidth(text));
    return shown[index]?.right ? blanks + text : text + blanks;
  };
  return rows.map((row) => row.map(pad).join("  ").trimEnd());
}

/** A document as JSON or YAML, whole and never shortened. */
export function documentText(form: "json" | "yaml", document: unknown): string {
  return form === "json" ? JSON.stringify(document, null, 2) : stringify(document, { lineWidth: 0 });
}

/** Prints a list in the asked form. */
export function printList<T>(io: Io, form: OutputForm, items: readonly T[], listing: Listing<T>): void {
  if (form === "json" || form === "yaml") io.out(documentText(form, listing.document));
  else if (form === "name") for (const item of items) io.out(listing.name(item));
  else if (items.length === 0) io.err(listing.empty);
  else io.out(table(listing.columns, items, form === "wide").join("\n"));
}

/** How one thing is printed: names and values below each other. */
interface Sheet {
  readonly rows: readonly (readonly [string, string | number | null | undefined])[];
  readonly name: string;
  readonly document: unknown;
}

/** Prints one thing in the asked form. */
export function printOne(io: Io, form: OutputForm, sheet: Sheet): void {
  if (form === "json" || form === "yaml") io.out(documentText(form, sheet.document));
  else if (form === "name") io.out(sheet.name);
  else {
    const width = Math.max(...sheet.rows.map(([title]) => Bun.stringWidth(title)));
    const line = ([title, value]: Sheet["rows"][number]) => `${title.padEnd(width)}  ${printable(String(value ?? "")) || "-"}`;
    io.out(sheet.rows.map(line).join("\n"));
  }
}
