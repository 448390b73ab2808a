// The demo starts, answers, and leaves nothing behind, however it ends.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { spawn, type ChildProcess } from "node:child_process";
import { existsSync } from "node:fs";
import { mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { binary } from "../../release/fresh.ts";
import type { ReplicaView } from "../../src/protocol/admin-api.ts";
import { alive, runBinary, waitFor } from "./fleet.ts";

const TEST_MS = 60_000;
let folder = "";
const started: ChildProcess[] = [];
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "ld-"));
});
afterAll(async () => {
  for (const child of started) child.kill("SIGKILL");
  await rm(folder, { recursive: true, force: true });
});

interface Demo {
  readonly child: ChildProcess;
  readonly pid: number;
  readonly out: () => string;
  readonly err: () => string;
  readonly code: () => number | null;
}

function startDemo(...words: string[]): Demo {
  const child = spawn(binary, ["demo", ...words], {
    stdio: ["ignore", "pipe", "pipe"],
    env: { PATH: process.env["PATH"], HOME: folder, TMPDIR: folder },
  });
  started.push(child);
  let out = "";
  let err = "";
  child.stdout.on("data", (bytes: Buffer) => (out += bytes.toString()));
  child.stderr.on("data", (bytes: Buffer) => (err += bytes.toString()));
  return { child, pid: child.pid ?? 0, out: () => out, err: () => err, code: () => child.exitCode };
}

const ready = (demo: Demo) =>
  waitFor(
    "the demo to be ready",
    () => {
      if (demo.code() !== null) throw new Error(`it ended with ${demo.code()}`);
      return demo.out().includes("ask it yourself:");
    },
    30_000,
    async () => `${demo.out()}\n${demo.err()}`,
  );

const field = (demo: Demo, name: string) => new RegExp(`^${name} +(.*)$`, "m").exec(demo.out())?.[1] ?? "";

/** Every process whose environment or arguments name a folder of this test's demos. */
async function remaining(): Promise<string[]> {
  const found: string[] = [];
  for (const pid of (await readdir("/proc")).filter((name) => /^\d+$/.test(name))) {
    if (Number(pid) === process.pid) continue;
    const texts = await Promise.all(["environ", "cmdline"].map((name) => readFile(`/proc/${pid}/${name}`, "utf8").catch(() => "")));
    if (texts.join("\0").includes(folder) && (await alive(Number(pid)))) found.push(`${pid} ${texts[1]?.replaceAll("\0", " ")}`);
  }
  return found;
}

test(
  "is ready, answers, and Ctrl-C leaves no process and no folder",
  async () => {
    const demo = startDemo("--nodes", "2");
    await ready(demo);
    expect(field(demo, "answer")).not.toBe("");
    const config = /LLMGW_CONFIG=(\S+) \S*llmgw\S* ctl nodes/.exec(demo.out())?.[1] ?? "";
    const nodes = await runBinary(["ctl", "nodes", "-o", "name"], { LLMGW_CONFIG: config });
    expect(nodes).toEqual({ code: 0, out: "node-1\nnode-2\n", err: "" });
    const replicas = await runBinary(["ctl", "replicas", "-o", "json"], { LLMGW_CONFIG: config });
    const { items } = JSON.parse(replicas.out) as { items: ReplicaView[] };
    expect(new Set(items.map(({ ranks }) => ranks[0]?.node))).toEqual(new Set(["node-1", "node-2"]));
    const curl = demo.out().slice(demo.out().indexOf("curl "));
    const asked = Bun.spawnSync(["bash", "-c", curl], { stdout: "pipe", stderr: "ignore" });
    expect(asked.stdout.toString()).toContain('"choices"');
    expect(demo.err()).not.toContain("\u001b");
    // A terminal's Ctrl-C reaches a program twice when its starter passes it on as well.
    demo.child.kill("SIGINT");
    demo.child.kill("SIGINT");
    await waitFor("the demo to end", () => demo.code() !== null);
    expect(demo.code()).toBe(130);
    expect(await remaining()).toEqual([]);
    expect(existsSync(dirname(config))).toBe(false);
    expect(await readdir(folder)).toEqual([]);
  },
  TEST_MS,
);

test(
  "killed with -9 leaves no process",
  async () => {
    const demo = startDemo("--nodes", "1");
    await ready(demo);
    expect((await remaining()).length).toBeGreaterThan(3);
    demo.child.kill("SIGKILL");
    await waitFor(
      "everything to end",
      async () => (await remaining()).length === 0,
      8_000,
      async () => (await remaining()).join("\n"),
    );
  },
  TEST_MS,
);

test(
  "a kept folder is started from again, with its key",
  async () => {
    const kept = join(folder, "kept");
    const first = startDemo("--nodes", "1", "--keep", kept);
    await ready(first);
    first.child.kill("SIGTERM");
    await waitFor("the demo to end", () => first.code() !== null);
    expect(first.code()).toBe(0);
    expect(existsSync(join(kept, "logs", "server.log"))).toBe(true);
    const second = startDemo("--nodes", "1", "--keep", kept);
    await ready(second);
    expect(field(second, "key")).toBe(field(first, "key"));
    second.child.kill("SIGTERM");
    await waitFor("the demo to end", () => second.code() !== null);
    expect(await remaining()).toEqual([]);
  },
  TEST_MS,
);

test("a taken port, a missing model, a half engine and a foreign folder are told at once", async () => {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const address = server.address();
  const port = typeof address === "object" && address ? address.port : 0;
  const foreign = join(folder, "foreign");
  await Bun.write(join(foreign, "mine.txt"), "mine");
  const program = join(folder, "program");
  await writeFile(program, "#!/bin/sh\n", { mode: 0o755 });
  const cases: [string[], number, string][] = [
    [["--port", String(port)], 1, `cannot listen on 127.0.0.1:${port} (E_EXISTS)`],
    [["--llama-server", program, "--model", "/no/such.gguf"], 1, "--model /no/such.gguf cannot be used (E_FILE)"],
    [["--model", program], 2, "--model needs --llama-server too (E_USAGE)"],
    [["--nodes", "1.5"], 2, "--nodes needs a whole number (E_USAGE)"],
    [["--keep", foreign], 1, `${foreign} is not used (E_EXISTS)`],
  ];
  for (const [words, code, what] of cases) {
    const ran = await runBinary(["demo", ...words], { TMPDIR: folder });
    expect({ code: ran.code, out: ran.out, first: ran.err.split("\n")[0] }).toEqual({ code, out: "", first: `llmgw: ${what}` });
  }
  server.close();
});
