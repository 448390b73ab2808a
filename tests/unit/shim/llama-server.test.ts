import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import { isAlive } from "../../../src/os/process.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { llamaServer } from "../../fixtures/llama-server.ts";
import { tinyGguf, writeHollowGguf, writeTinyGguf } from "../../fixtures/tiny-gguf.ts";
import { startRank, until, type TestRank } from "./rank-for-tests.ts";

const program = await llamaServer();
let folder: string;
const model = () => join(folder, "tiny.gguf");
const ranks: TestRank[] = [];

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-llama-"));
  await writeTinyGguf(model());
});
afterAll(() => rm(folder, { recursive: true, force: true }));
afterEach(async () => {
  await Promise.all(ranks.splice(0).map((it) => it.cleanUp()));
});

async function rank(
  launch: Partial<RankLaunch> = {},
  weights_path = model(),
  env: Record<string, string> = {},
  spec: { stuck_ms?: number } = {},
): Promise<TestRank> {
  const it = await startRank(
    { engine: "llamacpp", context: 2_048, parallel: 2, embeddings: true, ...launch },
    { engine_path: program ?? "", weights_path, ...spec },
    env,
  );
  ranks.push(it);
  return it;
}

/** A rank whose model takes no disk and makes a few tokens a second. */
async function slow(spec: { stuck_ms?: number } = {}): Promise<TestRank> {
  const hollow = join(folder, "hollow.gguf");
  await writeHollowGguf(hollow, { layers: 8, width: 1_024, heads: 8, kv_heads: 8, feed_forward: 4_096 });
  return rank({ embeddings: false, args: { "no-warmup": true } }, hollow, {}, spec);
}

const ask = (more: object = {}) =>
  JSON.stringify({ messages: [{ role: "user", content: "hello world" }], max_tokens: 12, temperature: 0, ...more });
const textOf = async (answer: Response) =>
  ((await answer.json()) as { choices: { message: { content: string } }[] }).choices[0]?.message.content;

// Needs Debian's llama-server, which the fixtures fetch where apt-get and the archive can be had.
describe.skipIf(program === null)("a rank with a real llama-server (needs Debian's archive)", () => {
  test("answers through its door as it does when asked directly, whole and streamed", async () => {
    const it = await rank();
    await it.reach("ready", 30_000);
    const direct = await textOf(await fetchUnix(it.engine_socket, "/v1/chat/completions", { method: "POST", body: ask() }));
    expect(direct?.length).toBeGreaterThan(10);
    expect(await textOf(await it.ask("/v1/chat/completions", { method: "POST", body: ask() }))).toBe(direct);
    const stream = await (await it.ask("/v1/chat/completions", { method: "POST", body: ask({ stream: true }) })).text();
    const parts = [...stream.matchAll(/"content":"([^"]*)"/g)].map((match) => match[1]);
    expect(parts.join("")).toBe(direct ?? "");
    expect(stream).toEndWith("data: [DONE]\n\n");
    const vectors = (await (await it.ask("/v1/embeddings", { method: "POST", body: JSON.stringify({ input: "hello" }) })).json()) as {
      data: { embedding: number[] }[];
    };
    expect(vectors.data[0]?.embedding).toHaveLength(64);
  });

  test("embeds an input as long as its context", async () => {
    const it = await rank();
    await it.reach("ready", 30_000);
    const input = "the cat sat on the mat and ".repeat(250);
    const answer = await it.ask("/v1/embeddings", { method: "POST", body: JSON.stringify({ input }) });
    expect(answer.status).toBe(200);
    expect(((await answer.json()) as { usage: { prompt_tokens: number } }).usage.prompt_tokens).toBeGreaterThan(1_500);
  });

  test.each([true, false])(
    "a client that leaves frees its place in llama-server (streamed: %p)",
    async (stream) => {
      const it = await slow();
      await it.reach("ready", 60_000);
      const gone = new AbortController();
      const asked = it.ask("/v1/chat/completions", { method: "POST", body: ask({ max_tokens: 2_000, stream }), signal: gone.signal });
      const outcome = asked
        .then((answer) => answer.text())
        .then(
          () => "whole",
          () => "gone",
        );
      const metrics = async () => (await it.ask("/metrics")).text();
      await until("the request to run", async () => (await metrics()).includes("requests_processing 1"));
      gone.abort();
      expect(await outcome).toBe("gone");
      await until("its place to be free", async () => {
        // llama-server looks for its client after a second in which no other request had an answer, so do not ask too often.
        await Bun.sleep(stream ? 100 : 1_400);
        return (await metrics()).includes("requests_processing 0");
      });
    },
    60_000,
  );

  test("stops within seconds with a request in flight that would hold llama-server for ever", async () => {
    const it = await slow();
    const { engine_pid } = await it.reach("ready", 60_000);
    const asked = it.ask("/v1/chat/completions", { method: "POST", body: ask({ max_tokens: 2_000 }) }).catch(() => null);
    await until("the request in the engine", async () => (await (await it.ask("/metrics")).text()).includes("requests_processing 1"));
    const started = performance.now();
    await it.stop();
    await until("the shim to end", () => !isAlive(it.pid), 20_000);
    expect(performance.now() - started).toBeLessThan(12_000);
    expect(isAlive(engine_pid as number)).toBe(false);
    expect((await asked)?.ok ?? false).toBe(false);
  }, 120_000);

  test.each<[string, Partial<RankLaunch>, (path: string) => Promise<unknown>, RegExp]>([
    ["a truncated model", {}, (path) => writeFile(path, tinyGguf().subarray(0, 200_000)), /model|tensor|load/i],
    ["a flag it does not know", { args: { "no-such-flag": true } }, (path) => writeTinyGguf(path), /invalid argument: --no-such-flag/],
    ["no model at all", {}, () => Promise.resolve(), /load|open|No such file/i],
  ])("%s ends the attempt with the engine's own last lines", async (_what, launch, write, said) => {
    const path = join(folder, "other.gguf");
    await rm(path, { force: true });
    await write(path);
    const it = await rank(launch, path);
    await until("the shim to end", () => !isAlive(it.pid), 30_000);
    const exit = await it.exit();
    expect(exit.kind).toBe("start");
    expect(exit.last_lines.join("\n")).toMatch(said);
  });

  test("a llama-server that stands still with a request is ended, one that is slow is not", async () => {
    const it = await slow({ stuck_ms: 2_000 });
    const { engine_pid } = await it.reach("ready", 60_000);
    const whole = await it.ask("/v1/chat/completions", { method: "POST", body: ask({ max_tokens: 10 }) });
    expect(whole.status).toBe(200);
    const asked = it.ask("/v1/chat/completions", { method: "POST", body: ask({ max_tokens: 2_000 }) }).catch(() => null);
    await until("the request in the engine", async () => (await (await it.ask("/metrics")).text()).includes("requests_processing 1"));
    process.kill(engine_pid as number, "SIGSTOP");
    await until("the shim to end", () => !isAlive(it.pid), 60_000);
    expect(await it.exit()).toMatchObject({ kind: "died", reason: expect.stringContaining("the engine is stuck") });
    expect(isAlive(engine_pid as number)).toBe(false);
    await asked;
  }, 150_000);

  test("what the agent's environment says to llama-server does not reach it", async () => {
    const it = await rank({}, model(), {
      LLAMA_ARG_PORT: "1",
      LLAMA_ARG_HOST: "127.0.0.1",
      LLAMA_API_KEY: "secret",
      LLAMA_ARG_N_PARALLEL: "7",
    });
    await it.reach("ready", 30_000);
    const props = (await (await it.ask("/props")).json()) as { total_slots: number };
    expect(props.total_slots).toBe(2);
  });

  test("a server that comes up as a router, without its model, is refused", async () => {
    // `--models-max` alone does not make it a router; a starter that drops --model does.
    const starter = join(folder, "router.sh");
    await writeFile(starter, `#!/bin/sh\nif [ "$1" = --model ]; then shift 4; fi\nexec '${program}' "$@"\n`, { mode: 0o755 });
    const it = await startRank({ engine: "llamacpp" }, { engine_path: starter, weights_path: model() });
    ranks.push(it);
    await until("the shim to end", () => !isAlive(it.pid), 30_000);
    expect((await it.exit()).reason).toContain("router");
  });
});
