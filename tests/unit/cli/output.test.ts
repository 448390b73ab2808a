import { expect, test } from "bun:test";
import { age, printList, size, span, table, type Listing, type OutputForm } from "../../../src/cli/output.ts";
import type { Io } from "../../../src/cli/spec.ts";

interface Item {
  id: string;
  free: number;
  note?: string;
}
const items: Item[] = [
  { id: "日本", free: 7, note: "a\u001b[31mb\nc" },
  { id: "node-b", free: 1024 },
];
const listing: Listing<Item> = {
  columns: [
    { title: "ID", cell: (item) => item.id },
    { title: "FREE", cell: (item) => item.free, right: true },
    { title: "NOTE", cell: (item) => item.note, wide: true },
  ],
  name: (item) => item.id,
  document: { nodes: items },
  empty: "no nodes yet",
};

function print(form: OutputForm, list: Item[]): { out: string; err: string } {
  let out = "";
  let err = "";
  const io: Io = {
    out: (text) => (out += `${text}\n`),
    err: (text) => (err += `${text}\n`),
    isTerminal: false,
    isErrTerminal: false,
    color: false,
    env: {},
    cwd: "/",
  };
  printList(io, form, list, listing);
  return { out, err };
}

test("columns line up by the width a terminal shows", () => {
  expect(table(listing.columns, items)).toEqual(["ID      FREE", "日本       7", "node-b  1024"]);
});

test("control characters never reach the terminal", () => {
  expect(print("wide", items).out).toBe("ID      FREE  NOTE\n日本       7  a [31mb c\nnode-b  1024  -\n");
});

test("json is the whole document, name one a line, an empty table says so on stderr", () => {
  expect(JSON.parse(print("json", items).out)).toEqual({ nodes: items });
  expect(print("yaml", [items[1] as Item]).out).toContain("- id: 日本");
  expect(print("name", items).out).toBe("日本\nnode-b\n");
  expect(print("table", [])).toEqual({ out: "", err: "no nodes yet\n" });
  expect(print("name", [])).toEqual({ out: "", err: "" });
});

test.each([
  [0, "0s"],
  [119_999, "119s"],
  [180_000, "3m"],
  [7_200_000, "2h"],
  [9 * 86_400_000, "9d"],
])("%d ms is %s", (ms, text) => {
  expect(span(ms)).toBe(text);
});

test("a time to come is 0s", () => {
  expect(age(2_000, 1_000)).toBe("0s");
});

test.each([
  [0, "0 B"],
  [1023, "1023 B"],
  [1024, "1.00 KiB"],
  [1_610_612_736, "1.50 GiB"],
  [150 * 1024 ** 3, "150 GiB"],
  [1024 ** 4 - 1, "1.00 TiB"],
])("%d bytes are %s", (bytes, text) => {
  expect(size(bytes)).toBe(text);
});
