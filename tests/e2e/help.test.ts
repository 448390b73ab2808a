// The help of every command of the compiled binary, against tests/e2e/golden/help/. UPDATE_GOLDENS=1 writes them anew.
import { expect, test } from "bun:test";
import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";

const GOLDENS = join(import.meta.dir, "golden", "help");
const ALL_COMMANDS_MS = 60_000;

async function helpOf(words: readonly string[]): Promise<string> {
  const child = Bun.spawn([binary, ...words, "--help"], { stdout: "pipe", stderr: "pipe" });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  if (code !== 0 || err !== "") throw new Error(`llmgw ${words.join(" ")} --help ended with ${code}: ${err}`);
  return out;
}

/** The names under "Commands". */
function commandsOf(help: string): string[] {
  const section = help.split("\nCommands\n")[1]?.split("\n\n")[0] ?? "";
  return [...section.matchAll(/^ {2}(\S+)/gm)].map((match) => match[1] ?? "");
}

async function walk(words: readonly string[], found: Map<string, string>): Promise<void> {
  const help = await helpOf(words);
  found.set(`${["llmgw", ...words].join("-")}.txt`, help);
  for (const name of commandsOf(help)) await walk([...words, name], found);
}

test(
  "help is as it was agreed",
  async () => {
    const found = new Map<string, string>();
    await walk([], found);
    expect(found.size).toBeGreaterThan(2);
    if (process.env["UPDATE_GOLDENS"] === "1") {
      await rm(GOLDENS, { recursive: true, force: true });
      await mkdir(GOLDENS, { recursive: true });
      for (const [name, help] of found) await writeFile(join(GOLDENS, name), help);
    }
    const names = await readdir(GOLDENS);
    expect(names.toSorted((a, b) => a.localeCompare(b))).toEqual([...found.keys()].toSorted((a, b) => a.localeCompare(b)));
    for (const [name, help] of found) expect(`${name}\n${help}`).toBe(`${name}\n${await readFile(join(GOLDENS, name), "utf8")}`);
    for (const [name, help] of found) {
      const wide = help.split("\n").filter((line) => line.length > 140);
      expect({ name, wide }).toEqual({ name, wide: [] });
      expect({ name, examples: help.includes("\nExamples\n") || help.includes("\nCommands\n") }).toEqual({ name, examples: true });
    }
  },
  ALL_COMMANDS_MS,
);
