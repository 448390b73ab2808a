import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { discoverEngines } from "../../../src/agent/engine-offers.ts";
import { VERSION } from "../../../src/protocol/version.ts";

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-offers-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function offerOf(content: string | null, mode = 0o755) {
  const path = join(folder, crypto.randomUUID());
  if (content !== null) {
    await writeFile(path, content);
    await chmod(path, mode);
  }
  return (await discoverEngines({ llamacpp: path })).find(({ kind }) => kind === "llamacpp");
}
const script = (...lines: string[]) => ["#!/bin/sh", ...lines, ""].join("\n");
const SAYS_VERSION = "echo 'version: 7 (abc)' >&2; echo 'built with cc for x86_64' >&2";

test("the simulated engine is always there, others only when they are named", async () => {
  expect(await discoverEngines({})).toEqual([
    { kind: "sim", version: VERSION, path: "built in", origin: "built in", offered: true, reason: "" },
  ]);
});

test("an engine that prints its version is offered", async () => {
  expect(await offerOf(script(SAYS_VERSION))).toMatchObject({
    origin: "path",
    offered: true,
    reason: "",
    version: expect.stringContaining("7"),
  });
});

test("what it leaves running does not keep the agent waiting", async () => {
  const before = performance.now();
  await offerOf(script("sleep 5 &", SAYS_VERSION));
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
  const offer = await offerOf(content, mode);
  expect(offer).toMatchObject({ offered: false, version: "", reason: expect.stringContaining(reason) });
  expect(offer?.reason).not.toBe("");
});
