/** The repository's own files, for the tests that read them. */
import { readFileSync } from "node:fs";
import { dirname, join, normalize } from "node:path";

export const root = join(import.meta.dir, "..");

/** A file by its path from the root: `src/os/log.ts`. */
export interface Source {
  readonly path: string;
  readonly text: string;
  readonly lines: readonly string[];
}

/** All files of some patterns, in the order of their paths. */
export function sources(...patterns: string[]): Source[] {
  const paths = patterns.flatMap((pattern) => [...new Bun.Glob(pattern).scanSync({ cwd: root, dot: true })]);
  return [...new Set(paths)]
    .filter((path) => !/(^|\/)(node_modules|dist|\.cache|\.git)\//.test(path))
    .toSorted((a, b) => a.localeCompare(b))
    .map((path) => {
      const text = readFileSync(join(root, path), "utf8");
      return { path, text, lines: text.split("\n") };
    });
}

/** What a file imports: static, type-only, re-exported and dynamic imports, as written. */
export function importsOf({ text }: Source): string[] {
  const statements = /^\s*(?:import|export)\b[^;"'`]*?\bfrom\s*["']([^"']+)["']|^\s*import\s*["']([^"']+)["']/gm;
  const dynamic = /\b(?:import|require)\(\s*["']([^"']+)["']/g;
  const found = [...text.matchAll(statements)].map((match) => match[1] ?? match[2] ?? "");
  return [...found, ...[...text.matchAll(dynamic)].map((match) => match[1] ?? "")];
}

/** The path from the root that a relative import names. */
export function targetOf(source: Source, specifier: string): string {
  return normalize(join(dirname(source.path), specifier));
}
