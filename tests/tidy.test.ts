// The repository's manners, held by a machine so that nobody has to.
import { expect, test } from "bun:test";
import { sources, type Source } from "./sources.ts";

const FILE_LINES = 500;
const LINE_COLUMNS = 140;
const FUNCTION_LINES = 70;
/** Functions that are longer for now: they may shrink, not grow, and no new one joins. */
const LONGER: Readonly<Record<string, number>> = {};

const code = sources("src/**/*.{ts,tsx,css,html}", "tests/**/*.ts", "release/**/*.{ts,mjs}", "docs/**/*.ts", "build.ts");
const product = sources("src/**/*.ts");
const pages = sources("*.md", "docs/**/*.md");
const self = (file: Source) => file.path === "tests/tidy.test.ts";

const width = (line: string) => Bun.stringWidth(line);
function places(files: readonly Source[], wrong: (line: string) => boolean): string[] {
  return files.flatMap((file) => file.lines.flatMap((line, index) => (wrong(line) ? [`${file.path}:${index + 1}: ${line.trim()}`] : [])));
}

test("files are short", () => {
  expect(code.filter((file) => file.lines.length > FILE_LINES).map((file) => `${file.path}: ${file.lines.length}`)).toEqual([]);
});

test("lines are short", () => {
  expect(places(code, (line) => width(line) > LINE_COLUMNS)).toEqual([]);
});

/** Functions of a formatted file: each begins at a line that opens a body and ends at the brace of the same indent. */
function functionsOf(file: Source): { name: string; length: number }[] {
  const heads = [
    /^(\s*)(?:export )?(?:async )?function\*? ?(\w+)/,
    /^(\s*)(?:(?:public|private|static|override|async|get|set) )*(#?\w+)(?:<.*>)?\(.*\).*\{$/,
    /^(\s*)(?:export )?const (\w+) =.*=> \{$/,
    /^(\s*)(\w+): (?:async )?\(.*=> \{$/,
  ];
  const found: { name: string; length: number }[] = [];
  for (const [index, line] of file.lines.entries()) {
    const match = heads.map((head) => head.exec(line)).find((result) => result !== null);
    const name = match?.[2];
    if (!match || !name || ["if", "for", "while", "switch", "catch", "test", "describe"].includes(name)) continue;
    const indent = match[1] ?? "";
    const end = file.lines.findIndex(
      (other, at) => at > index && other.startsWith(`${indent}}`) && !other.startsWith(`${indent}}:`) && !other.startsWith(`${indent}})`),
    );
    if (end > 0) found.push({ name, length: end - index + 1 });
  }
  return found;
}

test("functions are short", () => {
  const long = product
    .flatMap((file) => functionsOf(file).map(({ name, length }) => ({ place: `${file.path} ${name}`, length })))
    .filter(({ place, length }) => length > (LONGER[place] ?? FUNCTION_LINES));
  expect(long).toEqual([]);
});

test("the function reader measures", () => {
  const lines = ["export async function a(", "  b: string,", "): Promise<void> {", "  if (b) {", "  }", "}", "const c = () => {", "};"];
  lines.push("class D {", "  e(): void {", "  }", "}");
  expect(functionsOf({ path: "x.ts", text: lines.join("\n"), lines })).toEqual([
    { name: "a", length: 6 },
    { name: "c", length: 2 },
    { name: "e", length: 2 },
  ]);
});

test("every folder of src says in one file what it is for", () => {
  const folders = new Map<string, number>();
  for (const file of product) {
    const [, folder = "", ...below] = file.path.split("/");
    if (below.length === 0) continue;
    const says = new RegExp(`^/\\*\\*\\s*(?:\\*\\s*)?${RegExp.escape(folder)}/\\s`).test(file.text);
    folders.set(folder, (folders.get(folder) ?? 0) + (says ? 1 : 0));
  }
  expect([...folders].filter(([, count]) => count !== 1)).toEqual([]);
});

test("no file or folder has a name that says nothing", () => {
  const banned = /(^|[/.-])(utils?|helpers?|common|misc|types|shared|lib|index)(\.|\/|$)/;
  expect(code.filter((file) => banned.test(file.path) && !file.path.endsWith(".html")).map((file) => file.path)).toEqual([]);
});

test("nothing is put off, and nothing points outside the project", () => {
  const words = [
    ["TO", "DO"],
    ["FIX", "ME"],
    ["X", "XX"],
    ["../", "shared"],
    ["/wo", "rk/"],
    ["registry.", "npmjs"],
    ["registry.", "yarnpkg"],
  ].map((parts) => parts.join(""));
  const all = [...code, ...pages, ...sources("*.json", "*.toml", ".npmrc", ".ci/*", "release/**/*")];
  expect(
    places(
      all.filter((file) => !self(file)),
      // A digest may spell anything.
      (line) => !line.includes('"integrity": "') && words.some((word) => line.includes(word)),
    ),
  ).toEqual([]);
});

test("no default exports, enums or barrel files", () => {
  expect(places(product, (line) => /^export default\b|^(export )?(const )?enum\b|^export \* from\b/.test(line))).toEqual([]);
});

test("a page has one title, in its first line", () => {
  const titles = (file: Source) => {
    let fenced = false;
    return file.lines.flatMap((line, index) => {
      if (line.startsWith("```")) fenced = !fenced;
      return !fenced && line.startsWith("# ") ? [index] : [];
    });
  };
  expect(pages.map((file) => [file.path, titles(file)]).filter(([, found]) => JSON.stringify(found) !== "[0]")).toEqual([]);
});

test("links between pages lead somewhere", async () => {
  const wrong: string[] = [];
  for (const page of pages) {
    for (const [, link = ""] of page.text.matchAll(/\]\(([^)#\s]+)(?:#[^)]*)?\)/g)) {
      if (/^[a-z]+:/.test(link)) continue;
      const target = new URL(link, `file://${import.meta.dir}/../${page.path}`);
      const there = await Bun.file(target).exists();
      if (!there && (await Array.fromAsync(new Bun.Glob("*").scan({ cwd: target.pathname })).catch(() => [])).length === 0)
        wrong.push(`${page.path}: ${link}`);
    }
  }
  expect(wrong).toEqual([]);
});

test("no test is switched off without a reason beside it", () => {
  const tests = sources("tests/**/*.ts").filter((file) => !self(file));
  expect(places(tests, (line) => /\b(test|it|describe)\.(only|todo|skip)\b/.test(line))).toEqual([]);
  // A conditional skip says its reason in the line above or in its name: "(needs ...)".
  const silent = tests.flatMap((file) =>
    file.lines.flatMap((line, index) => {
      const reason = `${file.lines[index - 1] ?? ""}${line}${file.lines[index + 1] ?? ""}`;
      return /\.skipIf\(/.test(line) && !/needs/.test(reason) ? [`${file.path}:${index + 1}`] : [];
    }),
  );
  expect(silent).toEqual([]);
});

test("every runtime dependency has its record", () => {
  const { dependencies } = JSON.parse(sources("package.json")[0]?.text ?? "") as { dependencies: Record<string, string> };
  const records = sources("docs/decisions/*.md").map((file) => file.text);
  expect(Object.keys(dependencies).filter((name) => !records.some((text) => text.includes(name)))).toEqual([]);
  expect(Object.values(dependencies).filter((version) => !/^\d+\.\d+\.\d+$/.test(version))).toEqual([]);
});

test("the lock file names no download addresses", () => {
  expect(sources("package-lock.json")[0]?.text).not.toContain('"resolved"');
});
