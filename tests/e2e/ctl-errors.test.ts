// What ctl says when it cannot do its work: three lines, and an exit code a script can tell apart.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod } from "node:fs/promises";
import { join } from "node:path";
import { Fleet, freePortOf, runBinary, type Ran } from "./fleet.ts";

const SET_UP_MS = 60_000;
let fleet: Fleet;
beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 1 });
}, SET_UP_MS);
afterAll(() => fleet?.stop());

function threeLines({ code, out, err }: Ran): { code: number; error: string } {
  expect(out).toBe("");
  const lines = err.trimEnd().split("\n");
  expect(lines).toHaveLength(3);
  expect(lines[1]).toStartWith("  ");
  expect(lines[2]).toStartWith("  try: ");
  return { code, error: /\((E_[A-Z_]+)\)$/.exec(lines[0] ?? "")?.[1] ?? "" };
}

const identity = (folder: string, name = "admin") => [
  "--ca",
  join(folder, "ca.crt"),
  "--cert",
  join(folder, `${name}.crt`),
  "--key",
  join(folder, `${name}.key`),
];

async function contextOf(name: string, server: string, words: readonly string[]): Promise<string> {
  const config = join(fleet.folder, `${name}.yaml`);
  await fleet.must("ctl", "context", "add", name, "--config", config, "--server", server, ...words);
  return config;
}

test("a context that is not there", async () => {
  const ran = await runBinary(["ctl", "nodes", "--context", "tset"], { LLMGW_CONFIG: fleet.ctlConfig });
  expect(threeLines(ran)).toEqual({ code: 2, error: "E_CONFIG" });
  expect(ran.err).toContain("try: --context test");
});

test("no file of contexts at all", async () => {
  const ran = await runBinary(["ctl", "nodes"], { XDG_CONFIG_HOME: join(fleet.folder, "nowhere") });
  expect(threeLines(ran)).toEqual({ code: 2, error: "E_CONFIG" });
  expect(ran.err).toContain("llmgw ctl context add");
});

test("no server", async () => {
  const config = await contextOf("gone", `https://127.0.0.1:${await freePortOf("127.0.0.1")}`, identity(join(fleet.folder, "ctl")));
  const ran = await runBinary(["ctl", "nodes"], { LLMGW_CONFIG: config });
  expect(threeLines(ran)).toEqual({ code: 3, error: "E_UNREACHABLE" });
});

test("an authority that is not the server's", async () => {
  const other = join(fleet.folder, "other");
  await fleet.must("ca", "init", "--dir", join(other, "ca"));
  await fleet.must("ca", "issue-admin", "tester", "--dir", join(other, "ca"), "--out", other);
  const config = await contextOf("other", fleet.control, identity(other));
  const ran = await runBinary(["ctl", "nodes"], { LLMGW_CONFIG: config });
  expect(threeLines(ran)).toEqual({ code: 3, error: "E_TLS" });
});

test("a certificate of another role", async () => {
  const config = await contextOf("node", fleet.control, identity(join(fleet.folder, "n1", "tls"), "node"));
  const ran = await runBinary(["ctl", "nodes"], { LLMGW_CONFIG: config });
  expect(threeLines(ran)).toEqual({ code: 3, error: "E_NOT_ALLOWED" });
});

test("a viewer may look and not touch", async () => {
  const folder = join(fleet.folder, "viewer");
  await fleet.issue("issue-admin", "onlooker", "--viewer", "--out", folder);
  const config = await contextOf("viewer", fleet.control, identity(folder, "viewer"));
  expect((await runBinary(["ctl", "nodes", "-o", "name"], { LLMGW_CONFIG: config })).out).toBe("n1\n");
  const ran = await runBinary(["ctl", "key", "create", "mine"], { LLMGW_CONFIG: config });
  expect(threeLines(ran)).toEqual({ code: 3, error: "E_NOT_ALLOWED" });
});

test("a file of contexts that others can read", async () => {
  const config = await contextOf("open", fleet.control, identity(join(fleet.folder, "ctl")));
  await chmod(config, 0o644);
  const ran = await runBinary(["ctl", "nodes"], { LLMGW_CONFIG: config });
  expect(threeLines(ran)).toEqual({ code: 2, error: "E_CONFIG" });
  expect(ran.err).toContain(`try: chmod 600 ${config}`);
});

test.each([
  [["ctl", "logs", "nothing-abcde"], 1, "E_NOT_FOUND"],
  [["ctl", "key", "revoke", "nothing"], 1, "E_NOT_FOUND"],
  [["ctl", "revoke", "nothing"], 1, "E_NOT_FOUND"],
  [["ctl", "wait", "model/nothing"], 1, "E_NOT_FOUND"],
  [["ctl", "wait", "node/nothing", "--timeout", "300ms"], 4, "E_TIMEOUT"],
  [["ctl", "wait", "nothing"], 2, "E_USAGE"],
  [["ctl", "key", "create", "/"], 2, "E_USAGE"],
])("%p ends with %d, %s", async (words, code, error) => {
  const ran = await runBinary(words as string[], { LLMGW_CONFIG: fleet.ctlConfig });
  // A wait says first what it waits for.
  const err = ran.err
    .split("\n")
    .filter((line) => !line.startsWith("node/"))
    .join("\n");
  expect(threeLines({ ...ran, err })).toEqual({ code: code as number, error: error as string });
});

test("a key is shown once, alone on stdout, and is in no list", async () => {
  const { out, err } = await fleet.must("ctl", "key", "create", "alice");
  const key = out.trim();
  expect(out).toBe(`${key}\n`);
  expect(key).toMatch(/^\S{20,}$/);
  expect(err).toContain("shown this once");
  expect(err).not.toContain(key);
  expect((await fleet.must("ctl", "keys", "-o", "yaml")).out).not.toContain(key);
  expect(await fleet.log("server")).not.toContain(key);
});

test("a dry run changes nothing", async () => {
  const before = await fleet.ctl("keys");
  await fleet.must("ctl", "key", "create", "bob", "--dry-run");
  await fleet.must("ctl", "revoke", "n1", "--dry-run");
  await fleet.must("ctl", "reload", "--dry-run");
  expect(await fleet.ctl("keys")).toEqual(before);
  expect((await fleet.nodeViews()).map(({ state }) => state)).toEqual(["ready"]);
});

test("show never prints the private key", async () => {
  const config = join(fleet.folder, "inline.yaml");
  const words = [...identity(join(fleet.folder, "ctl")), "--inline"];
  await fleet.must("ctl", "context", "add", "inline", "--config", config, "--server", fleet.control, ...words);
  expect((await runBinary(["ctl", "nodes", "-o", "name"], { LLMGW_CONFIG: config })).out).toBe("n1\n");
  for (const form of ["table", "wide", "json", "yaml"]) {
    const shown = await fleet.must("ctl", "context", "show", "--config", config, "-o", form);
    const listed = await fleet.must("ctl", "context", "ls", "--config", config, "-o", form);
    expect(shown.out + listed.out).not.toContain("PRIVATE KEY");
  }
});
