import { afterEach, beforeEach, expect, test } from "bun:test";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { userOf } from "../../../src/os/user.ts";

const path = process.env["PATH"] ?? "";
let folder = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-user-"));
});
afterEach(async () => {
  process.env["PATH"] = path;
  await rm(folder, { recursive: true });
});

test("users are found as the system finds them", async () => {
  const name = (await new Response(Bun.spawn(["id", "-un"], { stdin: "ignore", stdout: "pipe" }).stdout).text()).trim();
  expect(await userOf(name)).toMatchObject({ name, uid: process.getuid?.() ?? -1 });
  expect(await userOf("no-such-user-here")).toBeNull();
});

test.each([
  ["a directory that fails", "exit 1", "ended with 1"],
  ["a directory that says nothing", "exec sleep 60", "no answer within 0.3 s"],
  ["an answer that is none", "echo hello", "ended with 0"],
])("%s does not mean that there is no such user", async (_what, script, why) => {
  await writeFile(join(folder, "getent"), `#!/bin/sh\n${script}\n`);
  await chmod(join(folder, "getent"), 0o755);
  process.env["PATH"] = `${folder}:${path}`;
  const error = await userOf("llmgw-engine", 300).catch((thrown: unknown) => thrown);
  expect(error).toMatchObject({ code: "E_NODE", why: expect.stringContaining(why) });
});

test("nor does a system without a way to ask", async () => {
  process.env["PATH"] = folder;
  expect(await userOf("llmgw-engine").then(() => "", String)).toContain("cannot look up the user llmgw-engine");
});
