import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { isAlive } from "../../../src/os/process.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { endpointFor } from "../../../src/shim/engine-link.ts";
import { launchOf } from "../engines/launches.ts";
import { freePort, startRank, until, type TestRank } from "./rank-for-tests.ts";

let folder: string;
let program: string;
let vllm: string;
const ranks: TestRank[] = [];

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-loopback-"));
  program = join(folder, "python");
  vllm = join(folder, "vllm");
  for (const [path, name] of [
    [program, "sglang-stand-in.ts"],
    [vllm, "vllm-stand-in.ts"],
  ] as const) {
    const played = resolve(import.meta.dir, "..", "..", "fixtures", name);
    await writeFile(path, `#!/bin/sh\nexec '${process.execPath}' '${played}' "$@"\n`, { mode: 0o755 });
  }
});
afterAll(() => rm(folder, { recursive: true, force: true }));
afterEach(async () => {
  await Promise.all(ranks.splice(0).map((it) => it.cleanUp()));
});

async function rank(launch: Partial<RankLaunch> = {}, stuck_ms?: number): Promise<TestRank> {
  const it = await startRank(
    { engine: "sglang", ...launch },
    { engine_path: program, weights_path: "/models/demo", ...(stuck_ms !== undefined && { stuck_ms }) },
  );
  ranks.push(it);
  return it;
}

const commandLine = async (pid: number) => (await readFile(`/proc/${pid}/cmdline`, "utf8")).split("\0");

describe("an engine on loopback behind a key", () => {
  test("is reached through the door alone; its key is in no argument, no log, and one file for its user", async () => {
    const it = await rank();
    const { engine_pid } = await it.reach("ready");
    const answer = await it.ask("/v1/chat/completions", { method: "POST", body: "hello", headers: { authorization: "Bearer mine" } });
    expect(await answer.json()).toEqual({ path: "/v1/chat/completions", body: "hello" });
    const argv = await commandLine(engine_pid as number);
    const port = argv[argv.indexOf("--port") + 1];
    expect((await fetch(`http://127.0.0.1:${port}/v1/models`)).status).toBe(401);
    const key = /api-key: ([0-9a-f]{64})/.exec(await readFile(join(it.folder, "work", "key.yaml"), "utf8"))?.[1] ?? "none";
    expect(argv.join(" ")).not.toContain(key);
    const logs = await Promise.all(
      (await readdir(it.folder)).filter((name) => name.includes(".log")).map((name) => Bun.file(join(it.folder, name)).text()),
    );
    expect(logs.join("")).toContain("api_key='(key)'");
    expect(logs.join("")).toContain("mode 600");
    expect(logs.join("")).not.toContain(key);
    expect(await Bun.file(join(it.folder, "spec.json")).exists()).toBe(false);
  });

  test("two on one machine get ports of their own", async () => {
    const all = await Promise.all([rank(), rank()]);
    const lines = await Promise.all(all.map(async (it) => commandLine((await it.reach("ready")).engine_pid as number)));
    const ports = lines.flatMap((argv) =>
      ["--port", "--nccl-port", "--engine-info-bootstrap-port"].map((name) => argv[argv.indexOf(name) + 1]),
    );
    expect(new Set(ports).size).toBe(6);
  });

  test("a rank that serves nothing is ready when it runs, and its dummy server serves nobody through its door", async () => {
    const first = freePort();
    const gang = {
      master: { address: "127.0.0.1", port: first },
      ports: { first, count: 1 },
      island: "ib-a",
      adapters: [],
      imex_failed: false,
    };
    const it = await rank({ rank: 1, ranks: 2, gang });
    await it.reach("ready");
    await until("its engine to serve", async () => ((await it.status()).phase === "ready" ? it.ask("/health") : null));
    const refused = await it.ask("/v1/chat/completions", { method: "POST", body: "{}" });
    expect(refused.status).toBe(503);
    expect(await refused.text()).toContain("rank 1");
    await it.stop();
    await until("the shim to end", () => !isAlive(it.pid));
    expect((await it.exit()).kind).toBe("stopped");
  });

  test("one that owes an answer and gets on with nothing is ended", async () => {
    const it = await rank({ gpus: ["GPU-1"] }, 1_000);
    await it.reach("ready");
    const asked = it.ask("/hang", { method: "POST", body: "{}" }).then(
      (answer) => answer.text(),
      () => "cut",
    );
    await until("the shim to end", () => !isAlive(it.pid), 40_000);
    expect(await it.exit()).toMatchObject({ kind: "died", reason: expect.stringContaining("stuck: 1 request in flight") });
    expect(await asked).toBe("cut");
  }, 60_000);
});

describe("vLLM's ranks", () => {
  /** A rank whose environment holds what must not reach an engine. */
  async function start(launch: Partial<RankLaunch>, more: { stuck_ms?: number } = {}): Promise<TestRank> {
    const env = { VLLM_PORT: "1", HF_TOKEN: "secret", CUDA_VISIBLE_DEVICES: "7" };
    const it = await startRank({ engine: "vllm", ...launch }, { engine_path: vllm, weights_path: "/models/demo", ...more }, env);
    ranks.push(it);
    return it;
  }
  const gangAt = (port: number) => ({
    master: { address: "127.0.0.1", port },
    ports: { first: port, count: 1 },
    island: "ib-a",
    adapters: ["mlx5_0:1"],
    imex_failed: false,
  });

  test("rank 0 serves on its socket, one without a server is ready when it runs; each has its GPUs and no token", async () => {
    const first = await start({ gpus: ["GPU-1"], ranks: 2, gang: gangAt(freePort()) });
    const second = await start({ gpus: ["GPU-2"], rank: 1, ranks: 2, gang: gangAt(freePort()) });
    await Promise.all([first.reach("ready"), second.reach("ready")]);
    expect((await first.ask("/v1/models")).status).toBe(200);
    expect((await second.ask("/v1/models")).status).toBe(503);
    for (const [it, gpu] of [
      [first, "GPU-1"],
      [second, "GPU-2"],
    ] as const) {
      const log = await until("its log", async () => {
        const text = await Bun.file(join(it.folder, "engine.log")).text();
        return text.includes("worker") ? text : null;
      });
      expect(log).toContain(`CUDA_VISIBLE_DEVICES=${gpu}\nVLLM_HOST_IP=127.0.0.1\nNCCL_SOCKET_IFNAME==lo\nHF_HUB_OFFLINE=1\n`);
      expect(log).toContain(
        `HOME=${join(it.folder, "cache")}\nTMPDIR=${join(it.folder, "work", "tmp")}\nVLLM_PORT=(unset)\nHF_TOKEN=(unset)`,
      );
    }
  });

  test("metrics under other names prove nothing: it is said once, and the engine goes on", async () => {
    const it = await start({ gpus: ["GPU-1"], args: { "renamed-metrics": true } }, { stuck_ms: 400 });
    await it.reach("ready");
    const gone = new AbortController();
    const asked = it.ask("/hang", { method: "POST", body: "{}", signal: gone.signal }).catch(() => null);
    const shimLog = () => Bun.file(join(it.folder, "shim.log")).text();
    await until("its shim to say so", async () => (await shimLog()).includes("cannot tell from its metrics"));
    await Bun.sleep(2_000);
    expect((await it.status()).phase).toBe("ready");
    expect((await shimLog()).match(/cannot tell from its metrics/g)).toHaveLength(1);
    gone.abort();
    await asked;
  });

  test("nothing of it is left when it stops: its workers end with it", async () => {
    const it = await start({ rank: 1, ranks: 2, gang: gangAt(freePort()) });
    await it.reach("ready");
    const worker = await until(
      "its worker",
      async () => /worker (\d+)/.exec(await Bun.file(join(it.folder, "engine.log")).text())?.[1] ?? null,
    );
    expect(isAlive(Number(worker))).toBe(true);
    await it.stop();
    await until("the shim to end", () => !isAlive(it.pid));
    expect(isAlive(Number(worker))).toBe(false);
  });
});

test("ports of loopback spread by the door's port, and are never those of the gang", async () => {
  const engine = { listens: "loopback", spare_ports: 2 } as const;
  const portsOf = async (port: number, first = 0) => {
    const gang = {
      master: { address: "10.0.0.5", port: 20_000 },
      ports: { first, count: 16 },
      island: "",
      adapters: [],
      imex_failed: false,
    };
    const launch = launchOf("sglang", { door: { address: "10.0.0.5", port }, gang });
    const endpoint = await endpointFor(engine, launch, "");
    return endpoint.kind === "loopback" ? [endpoint.port, ...endpoint.spare_ports] : [];
  };
  const [one, other] = [await portsOf(20_100), await portsOf(20_101)];
  expect(one.filter((port) => other.includes(port))).toEqual([]);
  const apart = await portsOf(20_100, 20_300);
  expect(apart.every((port) => port >= 20_316)).toBe(true);
});
