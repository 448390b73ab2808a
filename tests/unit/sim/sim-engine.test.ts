import { afterEach, expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ownProgram } from "../../../src/os/program.ts";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import { until } from "../shim/rank-for-tests.ts";

const endings: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of endings.splice(0).reverse()) await end();
});

interface Sim {
  readonly child: Bun.Subprocess<"ignore", "ignore", "pipe">;
  ask(path: string, body?: object, signal?: AbortSignal): Promise<Response>;
  metric(name: string): Promise<number>;
}

/** A simulated engine in a process of its own, as a shim starts it. */
async function start(...flags: string[]): Promise<Sim> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-sim-"));
  endings.push(() => rm(folder, { recursive: true, force: true }));
  const socket = join(folder, "s");
  const child = Bun.spawn([...ownProgram(), "sim-engine", "--socket", socket, "--model", "demo", ...flags], {
    stdin: "ignore",
    stdout: "ignore",
    stderr: "pipe",
  });
  endings.push(async () => {
    child.kill("SIGKILL");
    await child.exited;
  });
  const ask = (path: string, body?: object, signal?: AbortSignal) =>
    fetchUnix(socket, path, { ...(body && { method: "POST", body: JSON.stringify(body) }), ...(signal && { signal }) });
  const metric = async (name: string) =>
    Number(new RegExp(`^sim:${name} (\\d+)$`, "m").exec(await (await ask("/metrics")).text())?.[1] ?? Number.NaN);
  return { child, ask, metric };
}

const healthy = (sim: Sim) =>
  until("health", () =>
    sim.ask("/health").then(
      (answer) => answer.ok,
      () => false,
    ),
  );
const question = { messages: [{ role: "user", content: "what is it?" }] };

interface Chunk {
  readonly choices: readonly { readonly delta: { readonly content?: string }; readonly finish_reason: string | null }[];
  readonly usage?: { readonly prompt_tokens: number; readonly completion_tokens: number; readonly total_tokens: number };
}

const chunksOf = (stream: string): Chunk[] =>
  stream
    .split("\n\n")
    .filter((event) => event.startsWith("data: {"))
    .map((event) => JSON.parse(event.slice(6)) as Chunk);

test("the same question has the same answer, whole or streamed, with the same usage", async () => {
  const sim = await start("--tokens-per-second", "1000");
  await healthy(sim);
  const limited = { ...question, max_tokens: 10 };
  type Whole = { choices: { message: { content: string }; finish_reason: string }[]; usage: object };
  const whole = (await (await sim.ask("/v1/chat/completions", limited)).json()) as Whole;
  const again = (await (await sim.ask("/v1/chat/completions", limited)).json()) as Whole;
  expect(again.choices).toEqual(whole.choices);
  expect(whole.choices[0]?.finish_reason).toBe("length");
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await (await sim.ask("/v1/chat/completions", { ...limited, ...options })).text();
  expect(stream).toEndWith("data: [DONE]\n\n");
  const chunks = chunksOf(stream);
  expect(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("")).toBe(whole.choices[0]?.message.content ?? "");
  expect(chunks.at(-1)?.usage).toEqual({ prompt_tokens: 4, completion_tokens: 10, total_tokens: 14 });
  expect(whole.usage).toEqual(chunks.at(-1)?.usage ?? {});
  const plain = await (await sim.ask("/v1/chat/completions", { ...limited, stream: true })).text();
  expect(chunksOf(plain).some((chunk) => chunk.usage !== undefined)).toBe(false);
});

test("completions, embeddings and models have their forms", async () => {
  const sim = await start("--tokens-per-second", "1000");
  await healthy(sim);
  const completion = await (await sim.ask("/v1/completions", { prompt: "once upon a time", max_tokens: 3 })).json();
  expect(completion).toMatchObject({ object: "text_completion", usage: { prompt_tokens: 4, completion_tokens: 3 } });
  const embedded = (await (await sim.ask("/v1/embeddings", { input: ["a", "b"] })).json()) as { data: { embedding: number[] }[] };
  expect(embedded.data.map(({ embedding }) => embedding.length)).toEqual([64, 64]);
  expect(Math.hypot(...(embedded.data[0]?.embedding ?? []))).toBeCloseTo(1, 5);
  expect(await (await sim.ask("/v1/models")).json()).toMatchObject({ data: [{ id: "demo" }] });
});

test.each<[string, string, object | undefined, number]>([
  ["a body that asks nothing", "/v1/chat/completions", {}, 400],
  ["an unknown path", "/v1/nothing", {}, 404],
  ["a path that wants a body", "/v1/chat/completions", undefined, 404],
])("%s is refused in OpenAI's form", async (_what, path, body, status) => {
  const sim = await start();
  await healthy(sim);
  const answer = await sim.ask(path, body);
  expect(answer.status).toBe(status);
  expect(await answer.json()).toMatchObject({ error: { code: status } });
});

test("while it loads, everything but its metrics is 503", async () => {
  const sim = await start("--load-ms", "60000");
  const answer = await until("it to listen", () => sim.ask("/health").catch(() => null));
  expect(answer.status).toBe(503);
  expect((await sim.ask("/v1/chat/completions", question)).status).toBe(503);
  expect(await sim.metric("requests_total")).toBe(0);
});

test("tokens come at the set speed", async () => {
  const sim = await start("--tokens-per-second", "40");
  await healthy(sim);
  const began = performance.now();
  await (await sim.ask("/v1/chat/completions", { ...question, max_tokens: 20, stream: true })).text();
  const took = performance.now() - began;
  expect(took).toBeGreaterThan(450);
  expect(took).toBeLessThan(5_000);
});

test.each([true, false])("a client that goes is counted and frees its place (streamed: %p)", async (stream) => {
  const sim = await start("--tokens-per-second", "1", "--parallel", "1");
  await healthy(sim);
  const gone = new AbortController();
  const asked = sim.ask("/v1/chat/completions", { ...question, stream }, gone.signal).then((answer) => answer.text());
  const outcome = asked.then(
    () => "whole",
    () => "gone",
  );
  await until("the request to run", async () => (await sim.metric("requests_running")) === 1);
  gone.abort();
  expect(await outcome).toBe("gone");
  await until("it to be counted", async () => (await sim.metric("cancelled_total")) === 1, 2_000);
  expect(await sim.metric("requests_running")).toBe(0);
});

test("more requests than places wait in order, and one that leaves while it waits never runs", async () => {
  const sim = await start("--tokens-per-second", "20", "--parallel", "1");
  await healthy(sim);
  const first = sim.ask("/v1/chat/completions", { ...question, max_tokens: 60 });
  await until("the first to run", async () => (await sim.metric("requests_running")) === 1);
  const gone = new AbortController();
  const second = sim.ask("/v1/chat/completions", { ...question, max_tokens: 20 }, gone.signal).catch(() => null);
  await until("the second to wait", async () => (await sim.metric("requests_waiting")) === 1);
  gone.abort();
  await second;
  await until("nobody to wait", async () => (await sim.metric("requests_waiting")) === 0, 2_000);
  expect(await sim.metric("cancelled_total")).toBe(1);
  expect((await first).status).toBe(200);
  expect(await sim.metric("requests_total")).toBe(1);
  expect(await sim.metric("requests_running")).toBe(0);
  expect((await sim.ask("/v1/chat/completions", { ...question, max_tokens: 1 })).status).toBe(200);
});

test("SIGTERM ends it with 0, also in the middle of an answer", async () => {
  const sim = await start("--tokens-per-second", "1");
  await healthy(sim);
  const asked = sim.ask("/v1/chat/completions", { ...question, stream: true }).then((answer) => answer.text());
  const outcome = asked.then(
    () => "whole",
    () => "cut",
  );
  await until("the request to run", async () => (await sim.metric("requests_running")) === 1);
  sim.child.kill("SIGTERM");
  expect(await sim.child.exited).toBe(0);
  expect(await outcome).toBe("cut");
});

test.each([
  [["--crash-at-load"], "told to crash at load"],
  [["--crash-after-tokens", "3", "--tokens-per-second", "1000"], "told to crash after 3 tokens"],
])("%p ends it with 1 and says so", async (flags, said) => {
  const sim = await start(...flags);
  await until("its end", async () => {
    // It may be loading still, answering, or gone: only that it ends counts here.
    const answer = await sim.ask("/v1/chat/completions", question).catch(() => null);
    await answer?.text().catch(() => "");
    return sim.child.exitCode !== null;
  });
  expect(await sim.child.exited).toBe(1);
  expect(await new Response(sim.child.stderr).text()).toContain(said);
});

test("it takes memory, answers to another name, and refuses a flag, as it is told", async () => {
  const sim = await start("--hold-memory-mib", "200", "--answer-as", "other");
  await healthy(sim);
  const status = await Bun.file(`/proc/${sim.child.pid}/status`).text();
  expect(Number(/^VmRSS:\s+(\d+) kB/m.exec(status)?.[1])).toBeGreaterThan(200 * 1_024);
  expect(await (await sim.ask("/v1/models")).text()).toContain(`"id":"other"`);
  const asked = await sim.ask("/v1/chat/completions", { ...question, model: "demo" });
  expect([asked.status, await asked.text()]).toEqual([404, expect.stringContaining("demo does not exist")]);
  expect((await sim.ask("/v1/chat/completions", { ...question, model: "other" })).status).toBe(200);
  const refuses = await start("--refuse-flag", "tokens");
  expect(await refuses.child.exited).toBe(1);
  expect(await new Response(refuses.child.stderr).text()).toContain("invalid argument: --tokens");
});
