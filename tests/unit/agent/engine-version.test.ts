import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EngineQuestions } from "../../../src/agent/engine-questions.ts";

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-offers-"));
  // Another user has to pass through.
  await chmod(folder, 0o711);
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function asked(content: string | null, mode = 0o755, engine_user: string | null = null) {
  const path = join(folder, crypto.randomUUID());
  if (content !== null) {
    await writeFile(path, content);
    await chmod(path, mode);
  }
  return new EngineQuestions({ engine_user, folder: null }).version("llamacpp", path);
}
const script = (...lines: string[]) => ["#!/bin/sh", ...lines, ""].join("\n");
const SAYS_VERSION = "echo 'version: 7 (abc)' >&2; echo 'built with cc for x86_64' >&2";

test("an engine that runs prints its version", async () => {
  expect(await asked(script(SAYS_VERSION))).toEqual({ version: "7" });
});

test("what it leaves running does not keep the agent waiting", async () => {
  const before = performance.now();
  await asked(script("sleep 5 &", SAYS_VERSION));
  expect(performance.now() - before).toBeLessThan(4_000);
});

test.each<[string, string | null, number, string]>([
  ["that is not there", null, 0, "cannot be run: ENOENT"],
  ["that may not be run", script(SAYS_VERSION), 0o644, "cannot be run: EACCES"],
  ["that is no program", "no program", 0o755, ""],
  [
    "whose loader fails",
    script("echo 'error while loading shared libraries: libllama.so' >&2", "exit 127"),
    0o755,
    "ended with code 127: error while loading shared libraries",
  ],
  ["this CPU cannot run", script("kill -ILL $$"), 0o755, "illegal instruction"],
  ["that dies", script("kill -SEGV $$"), 0o755, "ended with SIGSEGV"],
  ["that is something else", script("echo hello"), 0o755, "does not print a version of llamacpp: hello"],
])("an engine %s is refused with the reason", async (_what, content, mode, reason) => {
  const seen = await asked(content, mode);
  expect(seen).toEqual({ reason: expect.stringContaining(reason) });
  expect("reason" in seen && seen.reason).not.toBe("");
});

test.skipIf(process.getuid?.() !== 0)("an engine is run as the user it will serve as (needs root)", async () => {
  expect(await asked(script(`echo "version: $(id -u) (abc)"`), 0o755, "nobody")).toEqual({ version: "65534" });
});
