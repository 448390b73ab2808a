import { afterEach, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { isAlive, processesOf, signalProcess, spawnDetached } from "../../../src/os/process.ts";
import { ownProgram } from "../../../src/os/program.ts";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import { inherited, scrubbed, underCustody } from "../../../src/shim/engine-process.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import { startRank, until } from "./rank-for-tests.ts";
import type { TestRank } from "./rank-for-tests.ts";

const endings: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of endings.splice(0).reverse()) await end();
});

async function rank(...args: Parameters<typeof startRank>): Promise<TestRank> {
  const it = await startRank(...args);
  endings.push(() => it.cleanUp());
  return it;
}

/** A starter script that does more than the simulated engine it ends in. */
async function starter(before: string): Promise<string> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-starter-"));
  endings.push(() => rm(folder, { recursive: true, force: true }));
  const path = join(folder, "engine");
  await writeFile(path, `#!/bin/sh\n${before}\nexec ${ownProgram().join(" ")} "$@"\n`);
  await chmod(path, 0o755);
  return path;
}

const environmentOf = (pid: number) =>
  Object.fromEntries(
    readFileSync(`/proc/${pid}/environ`, "utf8")
      .split("\0")
      .map((entry) => [entry.slice(0, entry.indexOf("=")), entry.slice(entry.indexOf("=") + 1)]),
  ) as Record<string, string>;
const ended = (it: TestRank) => until("the shim to end", () => !isAlive(it.pid));

describe("the end of a rank", () => {
  test("SIGTERM to the shim is a stop; SIGHUP is nothing", async () => {
    const it = await rank();
    const { engine_pid } = await it.reach("ready");
    signalProcess(it.pid, "SIGHUP", "leader");
    expect((await it.ask("/v1/models")).status).toBe(200);
    signalProcess(it.pid, "SIGTERM", "leader");
    await ended(it);
    expect(isAlive(engine_pid as number)).toBe(false);
    expect(await it.exit()).toMatchObject({ kind: "stopped", code: 0 });
  });

  test("a shim whose owner is gone ends its rank", async () => {
    const owner = await spawnDetached(["sleep", "60"], process.env, 2);
    const it = await rank({}, { owner_pid: owner });
    await it.reach("ready");
    signalProcess(owner, "SIGKILL", "leader");
    await ended(it);
    expect(await it.exit()).toMatchObject({ kind: "stopped", reason: "its owner is gone" });
    expect(await processesOf(it.launch.attempt, null)).toEqual([]);
  });

  test("what an engine left in other sessions ends with it, stopped or killed", async () => {
    const engine_path = await starter("setsid sleep 300 &\nsetsid sh -c 'trap \"\" TERM HUP; sleep 300; sleep 300' &");
    for (const end of ["stop", "kill"]) {
      const it = await rank({}, { engine_path });
      const { engine_pid } = await it.reach("ready");
      expect((await processesOf(it.launch.attempt, null)).length).toBeGreaterThanOrEqual(4);
      if (end === "stop") await it.stop();
      else signalProcess(engine_pid as number, "SIGKILL", "leader");
      await ended(it);
      expect(await processesOf(it.launch.attempt, null)).toEqual([]);
    }
  });

  test("an engine that is loading is stopped as well", async () => {
    const it = await rank({ args: { "load-ms": 60_000 } });
    await until("the engine", async () => ((await it.status().catch(() => null))?.engine_pid ?? null) !== null);
    await it.stop();
    await it.stop().catch(() => {});
    await ended(it);
    expect(await it.exit()).toMatchObject({ kind: "stopped", reason: "the test asks", last_lines: [] });
  });
});

describe("what an engine is given", () => {
  test("its environment holds the attempt's tag, and nothing that would change it", async () => {
    const it = await rank(
      {},
      {},
      { LLMGW_SECRET: "x", NODE_OPTIONS: "--no-warnings", VLLM_PORT: "1", NOTIFY_SOCKET: "/run/x", KEPT: "yes" },
    );
    const { engine_pid } = await it.reach("ready");
    const seen = environmentOf(engine_pid as number);
    expect(seen).toMatchObject({ LLMGW_ATTEMPT: it.launch.attempt, KEPT: "yes" });
    expect(Object.keys(seen).filter((name) => /^(LLMGW_SECRET|NODE_OPTIONS|VLLM_PORT|NOTIFY_SOCKET)$/.test(name))).toEqual([]);
  });

  test.each<[string, readonly string[], Record<string, string>]>([
    ["a whole name", ["A"], { AB: "2", B: "3" }],
    ["a beginning", ["A*"], { B: "3" }],
    ["nothing", [], { A: "1", AB: "2", B: "3" }],
  ])("scrubbed by %s", (_what, names, left) => {
    expect(scrubbed({ A: "1", AB: "2", B: "3" }, names)).toEqual(left);
  });

  const user = { name: "engine", uid: 7, gid: 8, home: "" };
  test("another user has a home of its own, not ours", () => {
    const ours = { HOME: "/root", USER: "root", XDG_RUNTIME_DIR: "/run/user/0", PATH: "/bin" };
    expect(inherited(ours, [], null, "/work")).toEqual(ours);
    expect(inherited(ours, [], user, "/work")).toEqual({ HOME: "/work", USER: "engine", LOGNAME: "engine", PATH: "/bin" });
  });

  test("without setpriv it runs as it is, and as nobody else", () => {
    expect(underCustody(["e", "x"], null, null)).toEqual(["e", "x"]);
    expect(underCustody(["e"], null, "/bin/setpriv")).toEqual(["/bin/setpriv", "--pdeathsig=KILL", "--", "e"]);
    expect(underCustody(["e"], user, "/bin/setpriv")).toContain("--reuid=7");
    expect(() => underCustody(["e"], user, null)).toThrow("setpriv");
  });

  test("what an agent of another protocol wrote is not run", async () => {
    const it = await rank({}, { protocol: 1_000 });
    await ended(it);
    expect(await it.exit()).toMatchObject({ kind: "start", reason: expect.stringContaining("protocol 1000") });
  });

  test("a user that does not exist ends the attempt", async () => {
    const it = await rank({}, { engine_user: "no-such-user-here" });
    await ended(it);
    expect(await it.exit()).toMatchObject({ kind: "start", reason: expect.stringContaining("no-such-user-here") });
  });
});

// Only root may start a program as somebody else.
describe.skipIf(process.getuid?.() !== 0)("an engine of another user (needs root)", () => {
  test("runs as that user, serves, reads nothing of the rank's, and dies with its shim", async () => {
    const it = await rank({}, { engine_user: "nobody" });
    const engine_pid = (await it.reach("ready")).engine_pid as number;
    const status = readFileSync(`/proc/${engine_pid}/status`, "utf8");
    expect(status).toMatch(/^Uid:\s+65534\s+65534\s+65534\s+65534$/m);
    expect(status).toMatch(/^NoNewPrivs:\s+1$/m);
    expect(status).toMatch(/^CapEff:\s+0+$/m);
    expect(environmentOf(engine_pid)["HOME"]).not.toBe(process.env["HOME"] ?? "");
    expect((await it.ask("/v1/models")).status).toBe(200);
    const read = (path: string) =>
      Bun.spawnSync(["setpriv", "--reuid=65534", "--clear-groups", "cat", path], { stderr: "ignore" }).exitCode;
    expect([read(join(it.folder, "..", "spec.json")), read(join(it.folder, "engine.log"))]).toEqual([1, 1]);
    signalProcess(it.pid, "SIGKILL", "leader");
    await until("the engine to be gone", () => !isAlive(engine_pid), 3_000);
  });
});

describe("the time to load", () => {
  test("an engine that prints nothing for long is waited for while it takes something in", async () => {
    // 100 MB every 0.4 s for 4 s, and not a word.
    const reading = [
      'const b = Buffer.alloc(1e8), f = require("fs"), d = f.openSync("/dev/zero");',
      "for (let i = 0; i < 10; i++) { f.readSync(d, b); await Bun.sleep(400); } await Bun.sleep(60000);",
    ].join(" ");
    const engine_path = await starter(`'${process.execPath}' -e '${reading}' &\nsleep 4`);
    const it = await rank({ start_deadline_ms: 2_500 }, { engine_path });
    await it.reach("ready", 12_000);
    expect((await it.status()).progress?.done).toBeGreaterThan(1);
  }, 20_000);

  test("one that does nothing is not", async () => {
    const it = await rank({ start_deadline_ms: 1_500 }, { engine_path: await starter("sleep 60") });
    await ended(it);
    expect(await it.exit()).toMatchObject({ kind: "start", reason: expect.stringContaining("not ready") });
  });
});

describe("the control socket", () => {
  test("a status is held until it changes", async () => {
    const it = await rank();
    const ready = await it.reach("ready");
    const held = it.status(ready.revision);
    expect(await Promise.race([held.then(() => "answered"), Bun.sleep(200).then(() => "held")])).toBe("held");
    await it.stop();
    expect((await held).phase).toBe("stopping");
  });

  test("trust that is taken back ends the connections it had", async () => {
    const authority = await testAuthority();
    const it = await rank({ args: { "tokens-per-second": 5, tokens: 10_000 } }, {}, {}, authority);
    await it.reach("ready");
    const stream = await it.ask("/v1/completions", { method: "POST", body: JSON.stringify({ prompt: "x", stream: true }) });
    const end = stream.text().then(
      () => "whole",
      () => "cut",
    );
    const revocations = [{ name: `tester-${it.launch.attempt}`, until_ms: Date.now() + 1_000 }];
    const told = await fetchUnix(it.control_socket, "/trust", { method: "POST", body: JSON.stringify({ revocations }) });
    expect(told.status).toBe(200);
    expect(await end).toBe("cut");
    expect(await it.ask("/v1/models").then(String, () => "refused")).toBe("refused");
    expect((await it.status()).phase).toBe("ready");
  });

  test("what it cannot read is refused, and the rank goes on", async () => {
    const it = await rank();
    await it.reach("ready");
    for (const body of ["", "{}", '{"reason": 1}']) {
      expect((await fetchUnix(it.control_socket, "/stop", { method: "POST", body })).ok).toBe(false);
    }
    expect((await fetchUnix(it.control_socket, "/nothing")).status).toBe(404);
    expect((await it.status()).phase).toBe("ready");
    expect(await (await fetchUnix(it.control_socket, "/log?lines=1")).text()).toBe("model demo is loaded\n");
  });
});
