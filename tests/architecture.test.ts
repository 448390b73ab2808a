// Which folder may import which: DESIGN's ranks, held for every import, also those of types alone.
import { expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { importsOf, root, sources, targetOf, type Source } from "./sources.ts";

const RANKS: readonly (readonly string[])[] = [
  ["protocol"],
  ["core", "os"],
  ["pki", "hardware"],
  ["engines", "weights", "sim", "page"],
  ["doctor", "shim", "gateway", "provision", "onboard"],
  ["agent", "server"],
  ["cli"],
  ["main.ts"],
];
const rankOf = (folder: string) => RANKS.findIndex((folders) => folders.includes(folder));
const folderOf = (path: string) => path.split("/")[1] ?? "";

/** The one thing outside src/ that is part of the binary, as text. */
const EMBEDDED = "release/systemd/llmgw-agent.service";

const files = sources("src/**/*.{ts,tsx}");
const relative = (file: Source) =>
  importsOf(file)
    .filter((specifier) => specifier.startsWith("."))
    .map((specifier) => targetOf(file, specifier));

test("the import reader sees every form", () => {
  const text = [
    'import { a } from "./a.ts";',
    'import type { b } from "./b.ts";',
    'import {\n  c,\n  type d,\n} from "./c.ts";',
    'import "./d.ts";',
    'export { e } from "./e.ts";',
    'export type * from "./f.ts";',
    'const g = await import("./g.ts");',
    'import * as h from "./h.ts";',
    'import i from "./i.css" with { type: "text" };',
  ].join("\n");
  const found = importsOf({ path: "src/x/y.ts", text, lines: [] }).map((name) => name.slice(2, 3));
  expect(found.toSorted((a, b) => a.localeCompare(b)).join("")).toBe("abcdefghi");
});

test("every folder of src has a rank", () => {
  expect(files.map((file) => folderOf(file.path)).filter((folder) => rankOf(folder) < 0)).toEqual([]);
});

test("every folder of src stands in ARCHITECTURE.md, at its rank and with a file to begin at", () => {
  const page = readFileSync(join(root, "docs/ARCHITECTURE.md"), "utf8");
  const rows = [...page.matchAll(/^\| (\d) +\| `([a-z]+)\/` +\| `([a-z-]+\.ts)` /gm)];
  const told = rows.map(([, rank, folder, begin]) => `${rank} src/${folder}/${begin}`);
  const folders = new Set(files.map((file) => folderOf(file.path)).filter((folder) => folder !== "main.ts"));
  expect(rows).toHaveLength(folders.size);
  expect(new Set(rows.map(([, , folder]) => folder))).toEqual(new Set<string | undefined>(folders));
  expect(told.filter((line) => rankOf(line.split("/")[1] ?? "") !== Number(line[0]))).toEqual([]);
  expect(told.filter((line) => !existsSync(join(root, line.slice(2))))).toEqual([]);
});

test("a file imports its own folder and lower ranks only", () => {
  const wrong = files.flatMap((file) =>
    relative(file)
      .filter((target) => target !== EMBEDDED)
      .filter((target) => {
        const [from, to] = [folderOf(file.path), folderOf(target)];
        return !target.startsWith("src/") || (from !== to && rankOf(to) >= rankOf(from));
      })
      .map((target) => `${file.path} imports ${target}`),
  );
  expect(wrong).toEqual([]);
});

test("every import names a file that is there, with its extension", () => {
  const wrong = files.flatMap((file) =>
    relative(file)
      .filter((target) => !/\.\w+$/.test(target) || !existsSync(join(root, target)))
      .map((target) => `${file.path} imports ${target}`),
  );
  expect(wrong).toEqual([]);
});

test("no file imports itself in a circle", () => {
  const graph = new Map(files.map((file) => [file.path, relative(file)]));
  const done = new Set<string>();
  const circles: string[] = [];
  const visit = (path: string, trail: readonly string[]): void => {
    if (trail.includes(path)) circles.push([...trail.slice(trail.indexOf(path)), path].join(" -> "));
    if (done.has(path) || trail.includes(path)) return;
    for (const next of graph.get(path) ?? []) visit(next, [...trail, path]);
    done.add(path);
  };
  for (const path of graph.keys()) visit(path, []);
  expect(circles).toEqual([]);
});

/** Libraries that compute and do nothing else. */
const PURE = ["valibot", "tinyqueue"];

test("core and protocol touch no machine, clock or chance", () => {
  const words = [
    "Date.now",
    "new Date()",
    "Math.random",
    "performance.now",
    "crypto.",
    "process.",
    "Bun.",
    "fetch(",
    "setTimeout(",
    "setInterval(",
  ];
  const impure = new RegExp(`(?<![\\w.])(${words.map((word) => RegExp.escape(word)).join("|")})`);
  const wrong = files
    .filter((file) => ["core", "protocol"].includes(folderOf(file.path)))
    .flatMap((file) => {
      const outside = importsOf(file).filter((specifier) => !specifier.startsWith(".") && !PURE.includes(specifier));
      const code = file.lines.filter((line) => !/^\s*(\/\/|\/?\*)/.test(line) && impure.test(line));
      return [...outside, ...code].map((what) => `${file.path}: ${what.trim()}`);
    });
  expect(wrong).toEqual([]);
});
