// The compiled binary as an operator meets it: what it prints, where, its exit codes, and what it leaves unread.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, open, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-binary-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function run(words: string[], options: { env?: Record<string, string>; program?: string } = {}) {
  const child = Bun.spawn([options.program ?? binary, ...words], {
    cwd: folder,
    env: { PATH: process.env["PATH"] ?? "", ...options.env },
    stdout: "pipe",
    stderr: "pipe",
  });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { out, err, code };
}

test("version is JSON when asked", async () => {
  const { out, err, code } = await run(["version", "-o", "json"]);
  expect({ err, code }).toEqual({ err: "", code: 0 });
  const facts = JSON.parse(out) as Record<string, unknown>;
  expect(Object.keys(facts)).toEqual(["version", "commit", "bun", "protocol"]);
  expect(facts["version"]).toMatch(/^\d+\.\d+\.\d+/);
  expect(facts["commit"]).not.toBe("");
});

test.each([
  [["versoin"], 'llmgw: unknown command "versoin" (E_USAGE)\n  llmgw has no such command\n  try: llmgw version\n'],
  [["version", "--outptu", "json"], "llmgw: unknown flag --outptu (E_USAGE)\n  llmgw version has no such flag\n  try: --output\n"],
  [["version", "now"], 'llmgw: unexpected argument "now" (E_USAGE)\n  llmgw version takes no argument\n  try: llmgw version --help\n'],
])("%p ends with 2 and three lines", async (words, lines) => {
  expect(await run(words)).toEqual({ out: "", err: lines, code: 2 });
});

test("a configuration file's fault is named by its place", async () => {
  const file = join(folder, "server.yaml");
  await writeFile(file, "listen:\n  contrl: 0.0.0.0:1\n");
  const { err, code } = await run(["config", "check", file]);
  expect(err).toBe(`llmgw: ${file}:2:3: unknown key "contrl" (E_CONFIG)\n  this server file is not valid\n  try: write control\n`);
  expect(code).toBe(2);
});

test("help has no colour in a pipe and stands on stdout", async () => {
  const { out, err, code } = await run(["--help"], { env: { FORCE_COLOR: "1" } });
  expect({ err, code }).toEqual({ err: "", code: 0 });
  expect(out).not.toContain("\u001b");
});

test("a link is the subcommand it is named after", async () => {
  const link = join(folder, "llmgw-version");
  await symlink(binary, link);
  expect((await run([], { program: link })).out).toStartWith("llmgw ");
  expect((await run([], { program: "llmgw-version", env: { PATH: folder } })).out).toStartWith("llmgw ");
});

test("no file of the working directory is read", async () => {
  const trace = join(folder, "trace");
  await writeFile(join(folder, "evil.js"), `require("node:fs").writeFileSync(${JSON.stringify(trace)}, "ran");`);
  await writeFile(join(folder, "bunfig.toml"), 'preload = ["./evil.js"]\n');
  await writeFile(join(folder, ".env"), "BUN_OPTIONS=--preload=./evil.js\n");
  await writeFile(join(folder, "package.json"), "{ this is not JSON");
  await writeFile(join(folder, "tsconfig.json"), "{ nor this");
  const { out, err, code } = await run(["version"]);
  expect({ err, code }).toEqual({ err: "", code: 0 });
  expect(out).toStartWith("llmgw ");
  expect(await Bun.file(trace).exists()).toBe(false);
});

test.each(["js", "mjs", "ts"])("BUN_OPTIONS runs no .%s file", async (extension) => {
  const trace = join(folder, "trace");
  const evil = join(folder, `preload.${extension}`);
  const load = extension === "js" ? 'const { writeFileSync } = require("node:fs")' : 'import { writeFileSync } from "node:fs"';
  await writeFile(evil, `${load}; writeFileSync(${JSON.stringify(trace)}, "ran");`);
  await run(["version"], { env: { BUN_OPTIONS: `--preload=${evil}` } });
  expect(await Bun.file(trace).exists()).toBe(false);
});

test("a reader that goes away is no error", async () => {
  const child = Bun.spawn(["bash", "-c", `"${binary}" --help | true; echo "\${PIPESTATUS[0]}"`], { stdout: "pipe", stderr: "pipe" });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  expect(err).toBe("");
  expect(["0", "141"]).toContain(out.trim());
});

test("Ctrl-C ends a command that waits with 130", async () => {
  const pipe = join(folder, "pipe.yaml");
  expect(Bun.spawnSync(["mkfifo", pipe]).exitCode).toBe(0);
  const child = Bun.spawn([binary, "config", "check", pipe], { stdout: "pipe", stderr: "pipe" });
  // Opening for writing succeeds only once the command has the other end open: it is then waiting for text.
  const writer = await open(pipe, "w");
  child.kill("SIGINT");
  expect(await child.exited).toBe(130);
  await writer.close();
});
