import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { connect } from "node:net";
import OpenAI from "openai";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { startRank, until, type TestRank } from "../shim/rank-for-tests.ts";
import { KEY, routeOf, startGateway, targetOf, type TestGateway } from "./gateway-for-tests.ts";

let gateway: TestGateway;
let generation = 0;
const ranks: TestRank[] = [];

beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway.cleanUp());
afterEach(async () => {
  await Promise.all(ranks.splice(0).map((it) => it.cleanUp()));
});

async function rank(args: RankLaunch["args"] = {}, replica = "demo-aaaaa"): Promise<TestRank> {
  const it = await startRank({ args, replica }, {}, {}, gateway.authority);
  ranks.push(it);
  await it.reach("ready");
  return it;
}

async function serve(targets: readonly ReturnType<typeof targetOf>[], starting = false): Promise<void> {
  generation += 1;
  expect(await gateway.put(generation, [routeOf(targets, starting)])).toBe(true);
}

const chat = (more: object = {}) => ({ model: "demo", messages: [{ role: "user" as const, content: "hi" }], ...more });
const codeOf = async (answer: Response) => ((await answer.json()) as { error: { code: string } }).error.code;
const client = () => new OpenAI({ baseURL: `${gateway.url}/v1`, apiKey: KEY, maxRetries: 0 });
const idle = () => until("nothing in flight", async () => (await gateway.status()).in_flight === 0);

/** A streamed answer over a socket of its own: `fetch` in this process would run 256 at once at most. */
function rawStream(url: string, body: string): Promise<string> {
  const { port } = new URL(url);
  const headers = `host: x\r\nconnection: close\r\nauthorization: Bearer ${KEY}\r\ncontent-length: ${body.length}`;
  const head = `POST /v1/chat/completions HTTP/1.1\r\n${headers}\r\n\r\n`;
  return new Promise((resolve, reject) => {
    let said = "";
    const socket = connect(Number(port), "127.0.0.1", () => socket.write(head + body));
    socket.on("data", (data: Buffer) => (said += data.toString()));
    socket.on("error", reject);
    socket.on("close", () => resolve(said));
  });
}

describe("without a replica", () => {
  test("refuses in OpenAI's form", async () => {
    await serve([]);
    const cases: [number, string, () => Promise<Response>][] = [
      [401, "invalid_api_key", () => gateway.post("/v1/chat/completions", chat(), { headers: {} })],
      [401, "invalid_api_key", () => gateway.post("/v1/chat/completions", chat(), { headers: { authorization: "Bearer wrong" } })],
      [404, "model_not_found", () => gateway.post("/v1/chat/completions", chat({ model: "other" }))],
      [400, "invalid_json", () => gateway.post("/v1/chat/completions", "{")],
      [400, "model_required", () => gateway.post("/v1/completions", { prompt: "x" })],
      [404, "not_found", () => gateway.post("/v1/elsewhere", chat())],
      [405, "method_not_allowed", () => gateway.post("/v1/models", chat())],
      [503, "no_replica_ready", () => gateway.post("/v1/chat/completions", chat())],
      [413, "request_too_large", () => gateway.post("/v1/chat/completions", chat({ pad: "x".repeat(33 * 1024 * 1024) }))],
    ];
    for (const [status, code, ask] of cases) {
      const answer = await ask();
      expect([answer.status, code]).toEqual([status, code]);
      if (status === 413 && !answer.headers.has("x-request-id")) continue;
      expect(answer.headers.get("x-request-id")).toStartWith("req-");
      if (status === 503) expect(Number(answer.headers.get("retry-after"))).toBeGreaterThan(0);
      expect(await codeOf(answer)).toBe(code);
    }
    expect(gateway.log()).not.toContain(KEY);
    expect(gateway.log()).not.toContain("Bearer");
  });

  test("waits for a replica that is starting, and serves it when it comes", async () => {
    await serve([], true);
    const asked = gateway.post("/v1/chat/completions", chat({ max_tokens: 2 }));
    const it = await rank();
    await serve([targetOf(it)]);
    expect((await asked).status).toBe(200);
  });
});

describe("with the simulated engine behind real doors", () => {
  test("OpenAI's client gets lists, chats, streams and embeddings with their usage", async () => {
    await serve([targetOf(await rank({ "tokens-per-second": 500 }))]);
    const counted = async () => {
      const page = await (await fetch(`${gateway.url}/metrics`, { headers: { authorization: `Bearer ${KEY}` } })).text();
      return Number(/llmgw_gateway_tokens_total\{model="demo",kind="completion"\} (\d+)/.exec(page)?.[1] ?? 0);
    };
    const before = await counted();
    const openai = client();
    expect((await openai.models.list()).data.map((model) => model.id)).toEqual(["demo"]);
    const whole = await openai.chat.completions.create(chat({ max_tokens: 5 }));
    expect(whole.usage?.completion_tokens).toBe(5);
    const stream = await openai.chat.completions.create({
      ...chat({ max_tokens: 5 }),
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let tokens = 0;
    for await (const part of stream) {
      text += part.choices[0]?.delta.content ?? "";
      tokens = part.usage?.completion_tokens ?? tokens;
    }
    expect(text).toBe(whole.choices[0]?.message.content ?? "");
    expect(tokens).toBe(5);
    const vectors = await openai.embeddings.create({ model: "demo", input: ["a", "b"], encoding_format: "float" });
    expect(vectors.data).toHaveLength(2);
    expect((await counted()) - before).toBe(10);
    expect((await fetch(`${gateway.url}/metrics`)).status).toBe(401);
    await idle();
  });

  test("a client that leaves is gone from the engine within a second, streaming or not", async () => {
    const it = await rank({ "tokens-per-second": 1, tokens: 1000 });
    await serve([targetOf(it)]);
    for (const [count, stream] of [
      [1, true],
      [2, false],
    ] as const) {
      const gone = new AbortController();
      const asked = gateway.post("/v1/chat/completions", chat({ stream }), { signal: gone.signal });
      if (stream) await (await asked).body?.getReader().read();
      else await until("the request", async () => (await (await it.ask("/metrics")).text()).includes("sim:requests_running 1"));
      gone.abort();
      await asked.catch(() => {});
      await until(
        "the cancellation",
        async () => (await (await it.ask("/metrics")).text()).includes(`sim:cancelled_total ${count}`),
        1_000,
      );
    }
    await idle();
  });

  test("an engine that dies in a stream ends it with an error event, in a whole answer with 502", async () => {
    await serve([targetOf(await rank({ "crash-after-tokens": 5 }))]);
    const answer = await gateway.post("/v1/chat/completions", chat({ stream: true }));
    const events = (await answer.text()).trim().split("\n\n");
    expect(events.length).toBeGreaterThan(2);
    const last = JSON.parse(events.at(-1)?.replace("data: ", "") ?? "") as { error: { code: string; request_id: string } };
    expect(last.error.code).toBe("upstream_failed");
    expect(last.error.request_id).toBe(answer.headers.get("x-request-id") ?? "");
    await serve([targetOf(await rank({ "crash-after-tokens": 5 }))]);
    const whole = await gateway.post("/v1/chat/completions", chat());
    expect(whole.status).toBe(502);
    expect(await codeOf(whole)).toBe("upstream_failed");
    await idle();
  });

  test("what cannot have reached an engine is tried on another replica", async () => {
    const dead = await rank({}, "demo-ddddd");
    const well = await rank({}, "demo-wwwww");
    process.kill(dead.pid, "SIGKILL");
    await serve([targetOf(dead), targetOf(well)]);
    const answers = await Promise.all(Array.from({ length: 6 }, () => gateway.post("/v1/chat/completions", chat({ max_tokens: 1 }))));
    expect(answers.map((answer) => answer.status)).toEqual([200, 200, 200, 200, 200, 200]);
    const { loads } = await gateway.status();
    expect(loads.find((load) => load.replica === "demo-ddddd")?.unreachable).not.toBeNull();
  });

  test("more than 256 streams run at once", async () => {
    await serve([targetOf(await rank({ "tokens-per-second": 2, tokens: 8, parallel: 1000 }))]);
    const asked = Array.from({ length: 300 }, () => rawStream(gateway.url, JSON.stringify(chat({ stream: true }))));
    await until("all in flight", async () => (await gateway.status()).in_flight === 300, 20_000);
    const texts = await Promise.all(asked);
    expect(texts.every((text) => text.includes("data: [DONE]\n\n"))).toBe(true);
    await idle();
  }, 30_000);

  test("a stalled client costs bounded memory", async () => {
    await serve([targetOf(await rank({ "tokens-per-second": 1_000_000, tokens: 1_000_000 }))]);
    const pid = (await gateway.status()).pid;
    const rss = async () => Number(/VmRSS:\s+(\d+)/.exec(await Bun.file(`/proc/${pid}/status`).text())?.[1]) * 1024;
    const before = await rss();
    const gone = new AbortController();
    const answer = await gateway.post("/v1/chat/completions", chat({ stream: true }), { signal: gone.signal });
    await answer.body?.getReader().read();
    await Bun.sleep(2_000);
    expect((await rss()) - before).toBeLessThan(48 * 1024 * 1024);
    gone.abort();
    await idle();
  });
});

describe("its snapshot", () => {
  test("an older one is refused; a key that is not in the newest is refused", async () => {
    await serve([]);
    expect(await gateway.put(generation - 1, [])).toBe(false);
    generation += 1;
    expect(await gateway.put(generation, [routeOf([])], { keys: [] })).toBe(true);
    expect((await gateway.post("/v1/chat/completions", chat())).status).toBe(401);
    await serve([]);
    expect((await gateway.post("/v1/chat/completions", chat())).status).toBe(503);
  });

  test("a restarted gateway serves from the last one without a server", async () => {
    const it = await rank();
    await serve([targetOf(it)]);
    await gateway.end();
    gateway = await gateway.again();
    expect((await gateway.post("/v1/chat/completions", chat({ max_tokens: 1 }))).status).toBe(200);
  });

  test("a second gateway on the same folders does not start", async () => {
    const failure = await gateway.again().then(
      async (second) => {
        await until("its end", () => second.child.exitCode !== null);
        return second.log();
      },
      (error: unknown) => String(error),
    );
    expect(failure).toContain("E_EXISTS");
  });
});
