import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmod, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { runAgent } from "../../../src/agent/agent.ts";
import { isAlive, signalProcess } from "../../../src/os/process.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import type { NodeRequest, RankStatus } from "../../../src/protocol/agent-api.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import type { TestAuthority } from "../pki/authority-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";
import { isGone, shimsOf, testNode } from "./node-for-tests.ts";
import type { TestNode } from "./node-for-tests.ts";
import { testServer } from "./server-for-tests.ts";
import type { TestServer } from "./server-for-tests.ts";

const TEST_MS = 60_000;
let authority: TestAuthority;
let server: TestServer;
let node: TestNode;

beforeEach(async () => {
  authority = await testAuthority();
  server = await testServer(await authority.identity("server", "control"));
  node = await testNode(await authority.identity("node", "a"), [server.url]);
});
afterEach(async () => {
  await node.cleanUp();
  await server.close();
}, TEST_MS);

const isPhase = (phase: RankStatus["phase"]) => (status: RankStatus) => status.phase === phase;
const specOf = ({ attempt }: RankLaunch) => join(node.config.state, "ranks", attempt, "spec.json");

/** A rank that serves, as the server sees it. */
async function serving(launch = node.launch()): Promise<{ launch: RankLaunch; engine: number }> {
  server.plan([launch]);
  const { engine_pid } = await server.sees(launch.attempt, "a ready rank", isPhase("ready"));
  expect(isAlive(engine_pid ?? 0)).toBe(true);
  return { launch, engine: engine_pid as number };
}

const ended = (promise: Promise<unknown>): Promise<OperatorError> =>
  promise.then(
    () => Promise.reject(new Error("it went well")),
    (error: OperatorError) => error,
  );

test(
  "an engine that is slow to say whether it takes its arguments holds up no stop, and one that refuses them is not started",
  async () => {
    await node.cleanUp();
    const llamacpp_bin = join(tmpdir(), `llmgw-slow-${process.pid}.sh`);
    // It answers, but with one flag it thinks for ever, and another it refuses.
    const refuse = "echo 'error: invalid argument: --mlock' >&2; exit 1";
    const script = `case "$*" in *threads*) exec sleep 1000 ;; *mlock*) ${refuse} ;; esac`;
    await writeFile(llamacpp_bin, `#!/bin/sh\n${script}\necho 'version: 7 (a)'\n`, { mode: 0o755 });
    node = await testNode(await authority.identity("node", "a"), [server.url], { llamacpp_bin });
    node.start();
    const weights = { source: llamacpp_bin };
    const refused = node.launch({ engine: "llamacpp", weights, args: { mlock: true } });
    server.plan([refused]);
    const { exit } = await server.sees(refused.attempt, "a refusal", isPhase("exited"));
    expect(exit).toMatchObject({ kind: "start", reason: expect.stringContaining("--mlock (removed in 0.7.0: use --load-mode mlock)") });
    expect(exit?.last_lines.join()).toContain("--mlock");
    const slow = node.launch({ engine: "llamacpp", weights, args: { threads: 1 } });
    server.plan([slow]);
    await server.sees(slow.attempt, "the question", ({ detail }) => detail.includes("asking the engine"));
    server.plan([]);
    await server.sees(slow.attempt, "the end", ({ exit: end }) => end?.kind === "stopped");
    expect(await Bun.file(specOf(slow)).exists()).toBe(false);
    await rm(llamacpp_bin);
  },
  TEST_MS,
);

describe("an agent", () => {
  test(
    "joins, starts what the plan has, tells its log, stops what the plan drops, and keeps the folder for its log",
    async () => {
      node.start();
      const launch = node.launch({ args: { "load-ms": 100 } });
      await serving(launch);
      expect(server.joins[0]).toMatchObject({ node: "a", ranks: [], seen: { epoch: 0, generation: 0 }, address: "127.0.0.1" });
      expect(server.joins[0]?.inventory.engines).toMatchObject([{ kind: "sim", offered: true }]);
      expect(server.reports.map(({ seq }) => seq)).toEqual(server.reports.map((_report, index) => index + 1));
      const ask = { kind: "log", deadline_ms: Date.now() + 5_000, lines: 2 } as const;
      const said = await server.request({ ...ask, id: "one", attempt: launch.attempt });
      expect(said).toMatchObject({ lines: [expect.any(String), expect.any(String)] });
      expect(await server.request({ ...ask, id: "two", attempt: "0".repeat(16) })).toHaveProperty("error");
      const check = { kind: "engine-check", deadline_ms: Date.now() + 5_000 } as const;
      expect(await server.request({ ...check, id: "four", engine: "vllm" })).toEqual({ error: "it has no vllm" });
      expect(await server.request({ ...check, id: "five", engine: "sim" })).toHaveProperty("error");
      const newer = { kind: "dance", id: "six", deadline_ms: 0 } as unknown as NodeRequest;
      expect(await server.request(newer)).toEqual({ error: expect.stringContaining('does not know "dance"') });

      server.plan([]);
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit).toMatchObject({ kind: "stopped", reason: "the plan no longer has it" });
      server.plan([]);
      await until("it to be forgotten", () => server.reports.at(-1)?.ranks.length === 0);
      expect(await server.request({ ...ask, id: "three", attempt: launch.attempt })).toHaveProperty("lines");
      expect(await readdir(join(node.config.run, "r"))).toEqual([]);
    },
    TEST_MS,
  );

  test.each<[string, (folder: string) => Promise<void>]>([
    ["lost", () => rm(node.config.state, { recursive: true })],
    ["damaged", (folder) => writeFile(join(folder, "launch.json"), "{")],
  ])(
    "whose state was %s finds what runs all the same, by its shims",
    async (_how, spoil) => {
      const first = node.spawn();
      const { launch, engine } = await serving();
      first.kill("SIGKILL");
      await first.exited;
      await spoil(dirname(specOf(launch)));
      node.spawn();
      await until("another join", () => server.joins.length === 2);
      expect(server.joins[1]?.ranks).toMatchObject([{ attempt: launch.attempt, phase: "ready", engine_pid: engine, launch }]);
      server.plan([]);
      await server.sees(launch.attempt, "the end", isPhase("exited"));
      await isGone(engine);
    },
    TEST_MS,
  );

  test(
    "a rank whose sockets somebody removed is ended after a while, with all of it",
    async () => {
      node.start({ patience: { news_ms: 500, answer_ms: 500, frozen_ms: 1_000 } });
      const { launch, engine } = await serving();
      await rm(join(node.config.run, "r"), { recursive: true });
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit).toMatchObject({ kind: "died", reason: "its shim does not answer" });
      await isGone(engine);
    },
    TEST_MS,
  );

  test(
    "a shim that is frozen is not ready, is ready again when it gets on, and is killed with its rank when it does not",
    async () => {
      node.start({ patience: { news_ms: 500, answer_ms: 500, frozen_ms: 3_000 } });
      const { launch, engine } = await serving();
      const [shim = 0] = await shimsOf(specOf(launch));
      signalProcess(shim, "SIGSTOP", "leader");
      await server.sees(launch.attempt, "a rank that is not ready", ({ detail }) => detail === "its shim does not answer");
      signalProcess(shim, "SIGCONT", "leader");
      const { engine_pid } = await server.sees(launch.attempt, "a rank that is ready again", isPhase("ready"));
      expect(engine_pid).toBe(engine);
      signalProcess(shim, "SIGSTOP", "leader");
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit).toMatchObject({ kind: "died", reason: "its shim does not answer" });
      await isGone(engine);
    },
    TEST_MS,
  );

  test(
    "killed with -9, the next one finds the same engine and never shows it as anything but ready",
    async () => {
      const first = node.spawn();
      const { launch, engine } = await serving();
      first.kill("SIGKILL");
      await first.exited;
      expect(isAlive(engine)).toBe(true);
      const before = server.reports.length;
      node.spawn();
      await until("another join", () => server.joins.length === 2);
      await server.fresh();
      const said = [...(server.joins[1]?.ranks ?? []), ...server.reports.slice(before).flatMap((report) => report.ranks)];
      expect(new Set(said.map(({ attempt, phase, engine_pid }) => `${attempt} ${phase} ${engine_pid}`))).toEqual(
        new Set([`${launch.attempt} ready ${engine}`]),
      );
      expect(server.joins[1]?.session_key.machine_id).toBe(server.joins[0]?.session_key.machine_id as string);
      expect(server.joins[1]?.session_key.agent_start_id).not.toBe(server.joins[0]?.session_key.agent_start_id as string);
      server.plan([]);
      await server.sees(launch.attempt, "the end", isPhase("exited"));
      await isGone(engine);
    },
    TEST_MS,
  );

  test(
    "starts nothing on a port or GPU that an attempt before still holds, says so, and starts it when that has ended",
    async () => {
      node.start();
      const { launch } = await serving(node.launch({ gpus: ["GPU-1"] }));
      const [shim = 0] = await shimsOf(specOf(launch));
      process.kill(shim, "SIGSTOP");
      const [next, unwanted] = [node.launch({ gpus: ["GPU-1"] }), node.launch({ door: launch.door })];
      server.plan([next, unwanted]);
      for (const { attempt } of [next, unwanted]) {
        const waits = await server.sees(attempt, "a rank that waits", ({ detail }) =>
          detail.endsWith(`is still held by ${launch.attempt}`),
        );
        expect(waits.phase).toBe("starting");
      }
      server.plan([next]);
      await server.sees(unwanted.attempt, "the end of what waits", isPhase("exited"));
      expect(await shimsOf(specOf(next))).toEqual([]);
      process.kill(shim, "SIGCONT");
      await server.sees(next.attempt, "the next one ready", isPhase("ready"));
      expect(await shimsOf(specOf(unwanted))).toEqual([]);
    },
    TEST_MS,
  );

  test(
    "ended with SIGTERM, and started again without any server: the engine runs on",
    async () => {
      const first = node.spawn();
      const { launch, engine } = await serving();
      first.kill("SIGTERM");
      expect(await first.exited).toBe(0);
      await server.close();
      node.start();
      await until("a try to reach the server", () => node.lines.some((line) => line.includes("no session with the server")));
      expect(node.lines.some((line) => line.includes("found running ranks again"))).toBe(true);
      expect(isAlive(engine)).toBe(true);
      const back = await testServer(await authority.identity("server", "control"), Number(new URL(server.url).port));
      await until("a join", () => back.joins.length > 0, 20_000);
      expect(back.joins[0]?.ranks).toMatchObject([{ attempt: launch.attempt, phase: "ready", engine_pid: engine }]);
      expect(back.joins[0]?.seen).toEqual({ epoch: 1, generation: 1 });
      await back.close();
    },
    TEST_MS,
  );

  test(
    "refuses an older plan, also after it was started again",
    async () => {
      const agent = node.start();
      const launch = node.launch();
      server.plan([launch], { epoch: 2, generation: 5 });
      const { engine_pid } = await server.sees(launch.attempt, "a ready rank", isPhase("ready"));
      server.plan([], { epoch: 1, generation: 99 });
      await until("a refusal", () => node.lines.some((line) => line.includes("refused a plan")));
      await agent.end();
      node.lines.length = 0;
      node.start();
      await until("a refusal", () => node.lines.some((line) => line.includes("refused a plan")));
      expect(server.joins.at(-1)?.seen).toEqual({ epoch: 2, generation: 5 });
      expect(server.joins.at(-1)?.ranks).toMatchObject([{ phase: "ready", engine_pid: engine_pid as number }]);
      expect(isAlive(engine_pid as number)).toBe(true);
      // Only an older one is refused.
      server.plan([], { epoch: 2, generation: 6 });
      await server.sees(launch.attempt, "the end", isPhase("exited"));
    },
    TEST_MS,
  );

  test(
    "a rank that is dropped while it starts is stopped, and none of it is left",
    async () => {
      node.start();
      const launch = node.launch({ args: { "load-ms": 30_000 } });
      server.plan([launch]);
      // As early as it can be: the shim has not opened its socket yet.
      await until("a shim", async () => (await shimsOf(specOf(launch))).length > 0);
      server.plan([]);
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit?.kind).toBe("stopped");
      await until("its processes to be gone", async () => (await shimsOf(specOf(launch))).length === 0);
    },
    TEST_MS,
  );

  test(
    "takes the certificate again on SIGHUP, and hands it and revocations to its shims",
    async () => {
      node.start();
      const { launch } = await serving();
      const gateway = makeDialer(await authority.identity("gateway", "gw"));
      const ask = () =>
        gateway.request(`https://127.0.0.1:${launch.door.port}/v1/models`, {
          headers: { "x-llmgw-attempt": launch.attempt },
          expect: { role: "node", name: "a" },
        });
      expect((await ask()).status).toBe(200);

      await node.writeIdentity(await authority.identity("node", "b"));
      process.emit("SIGHUP");
      await until("a refusal", () => node.lines.some((line) => line.includes("kept the old certificate") && line.includes("node b")));
      const renewed = await authority.identity("node", "a", {}, Date.now() + 1_000);
      await node.writeIdentity(renewed);
      process.emit("SIGHUP");
      await until("the new certificate", () => node.lines.some((line) => line.includes(`serial=${renewed.serial}`)));
      expect((await ask()).status).toBe(200);

      server.revoke([{ name: "gw", until_ms: Date.now() + 1_000 }]);
      await until("the gateway to be refused", () =>
        ask().then(
          () => null,
          () => true,
        ),
      );
      expect(JSON.parse(await readFile(join(node.config.state, "agent", "seen.json"), "utf8"))).toMatchObject({
        revocations: [{ name: "gw" }],
      });
    },
    TEST_MS,
  );

  test(
    "joins again when the server no longer knows its session, and starts nothing twice",
    async () => {
      node.start();
      const { launch, engine } = await serving();
      server.forget();
      await until("another join", () => server.joins.length === 2);
      expect(server.joins[1]?.ranks).toMatchObject([{ attempt: launch.attempt, phase: "ready", engine_pid: engine }]);
      const { ranks } = await server.fresh();
      expect(ranks).toMatchObject([{ attempt: launch.attempt, phase: "ready", engine_pid: engine }]);
    },
    TEST_MS,
  );

  test("is refused where one runs already, and with the certificate of another node", async () => {
    node.start();
    await until("a join", () => server.joins.length === 1);
    expect((await ended(runAgent(node.options))).code).toBe("E_EXISTS");
    const error = await ended(runAgent({ ...node.options, config: { ...node.config, node: "b" } }));
    expect(error).toMatchObject({ code: "E_IDENTITY", message: "this agent cannot be node b" });
    expect(error.why).toContain("node a");
  });

  test("names a run folder whose sockets would have too long a path", async () => {
    const config = { ...node.config, run: join(node.folder, "r".repeat(60)) };
    expect(await ended(runAgent({ ...node.options, config }))).toMatchObject({ code: "E_CONFIG" });
  });
});

describe("what an agent finds", () => {
  test(
    "an engine that was killed is told with its signal, and stays told until the plan drops it",
    async () => {
      node.start();
      const { launch, engine } = await serving();
      signalProcess(engine, "SIGKILL", "leader");
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit).toMatchObject({ kind: "died", signal: "SIGKILL" });
      const { ranks } = await server.fresh();
      expect(ranks).toMatchObject([{ attempt: launch.attempt, phase: "exited", engine_pid: null }]);
    },
    TEST_MS,
  );

  test(
    "a shim that was killed takes its engine with it, whether an agent looks on or not",
    async () => {
      const agent = node.start();
      const one = await serving();
      const two = node.launch();
      server.plan([one.launch, two]);
      const { engine_pid } = await server.sees(two.attempt, "a ready rank", isPhase("ready"));
      for (const pid of await shimsOf(specOf(one.launch))) signalProcess(pid, "SIGKILL", "leader");
      const first = await server.sees(one.launch.attempt, "the end", isPhase("exited"));
      expect(first.exit).toMatchObject({ kind: "died", reason: "its shim is gone" });
      await isGone(one.engine);

      await agent.end();
      for (const pid of await shimsOf(specOf(two))) signalProcess(pid, "SIGKILL", "leader");
      node.start();
      await until("another join", () => server.joins.length === 2);
      const told = server.joins[1]?.ranks.find(({ attempt }) => attempt === two.attempt);
      expect(told).toMatchObject({ phase: "exited", exit: { reason: "it was not running when the agent came back" } });
      await isGone(engine_pid as number);
    },
    TEST_MS,
  );

  test(
    "a shim whose socket is not there yet is waited for, not taken for dead",
    async () => {
      const agent = node.start();
      const launch = node.launch({ args: { "load-ms": 300 } });
      server.plan([launch]);
      await until("a shim", async () => (await shimsOf(specOf(launch))).length > 0);
      await agent.end();
      const [shim] = await shimsOf(specOf(launch));
      node.start();
      await server.sees(launch.attempt, "a ready rank", isPhase("ready"));
      expect(await shimsOf(specOf(launch))).toEqual([shim as number]);
    },
    TEST_MS,
  );

  test(
    "a shim that hangs keeps neither the agent from starting nor its engine from running",
    async () => {
      const agent = node.start();
      const { launch, engine } = await serving();
      const shims = await shimsOf(specOf(launch));
      await agent.end();
      for (const pid of shims) signalProcess(pid, "SIGSTOP", "leader");
      node.start();
      await until("another join", () => server.joins.length === 2);
      expect(server.joins[1]?.ranks).toMatchObject([{ attempt: launch.attempt, exit: null }]);
      for (const pid of shims) signalProcess(pid, "SIGCONT", "leader");
      const { engine_pid } = await server.sees(launch.attempt, "a ready rank", isPhase("ready"));
      expect(engine_pid).toBe(engine);
    },
    TEST_MS,
  );

  test(
    "a fetch that an agent's end cut off goes on with the next agent, as the same attempt",
    async () => {
      const file = new Uint8Array(64_000).fill(7);
      const asked: (string | null)[] = [];
      let held = true;
      const origin = Bun.serve({
        hostname: "127.0.0.1",
        port: 0,
        fetch: (request) => {
          const range = request.headers.get("range");
          asked.push(range);
          const from = Number(/bytes=(\d+)-/.exec(range ?? "")?.[1] ?? 0);
          const headers = { etag: '"one"', "content-length": String(file.length - from), "content-range": `bytes ${from}-63999/64000` };
          const half = new ReadableStream({
            start: (controller) => controller.enqueue(file.subarray(from, from + 32_000)),
            pull: () => new Promise(() => {}),
          });
          return new Response(held ? half : file.subarray(from), { status: from > 0 ? 206 : 200, headers });
        },
      });
      try {
        const agent = node.start();
        const launch = node.launch({ weights: { source: `http://127.0.0.1:${origin.port}/w.gguf` } });
        server.plan([launch]);
        await until("half of it", async () => {
          const files = await readdir(join(node.config.state, "weights"), { recursive: true }).catch(() => []);
          const part = files.find((file) => file.endsWith("w.gguf.part"));
          return part !== undefined && Bun.file(join(node.config.state, "weights", part)).size === 32_000;
        });
        await agent.end();
        held = false;
        node.start();
        await until("another join", () => server.joins.length === 2);
        expect(server.joins[1]?.ranks).toMatchObject([{ attempt: launch.attempt, phase: "fetching", exit: null }]);
        await server.sees(launch.attempt, "a ready rank", isPhase("ready"));
        expect(asked).toEqual([null, "bytes=32000-"]);
      } finally {
        await origin.stop(true);
      }
    },
    TEST_MS,
  );

  test(
    "weights that cannot be had end the attempt with the reason",
    async () => {
      node.start();
      const launch = node.launch({ weights: { source: join(node.folder, "none.gguf") } });
      server.plan([launch]);
      const { exit } = await server.sees(launch.attempt, "the end", isPhase("exited"));
      expect(exit).toMatchObject({ kind: "fetch", reason: expect.stringContaining("none.gguf are not usable") });
      const other = node.launch({ engine: "llamacpp" });
      server.plan([other]);
      const end = await server.sees(other.attempt, "the end", isPhase("exited"));
      expect(end.exit).toMatchObject({ kind: "start", reason: expect.stringContaining("does not offer it") });
    },
    TEST_MS,
  );
});

describe.skipIf(process.getuid?.() !== 0)("an agent that is root (needs root)", () => {
  test(
    "runs engines as their own user, and says when there is none",
    async () => {
      const first = node.start();
      await until("a join", () => server.joins.length === 1);
      expect(server.joins[0]?.inventory.warnings.map(({ code }) => code)).toContain("engine-user-missing");
      await first.end();
      // As /var/lib and /run are: others may pass through.
      await chmod(node.folder, 0o711);
      Object.assign(node.options, { config: { ...node.config, engine_user: "nobody" } });
      node.start();
      await until("another join", () => server.joins.length === 2);
      expect(server.joins[1]?.inventory.warnings.map(({ code }) => code)).not.toContain("engine-user-missing");
      const { engine } = await serving();
      const [, uid] = /^Uid:\s+(\d+)/m.exec(await readFile(`/proc/${engine}/status`, "utf8")) ?? [];
      expect(uid).not.toBe("0");
    },
    TEST_MS,
  );
});
