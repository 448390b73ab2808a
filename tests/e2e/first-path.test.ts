// The whole path on a real engine: a model fetched from a URL, started on two nodes, asked by the official client.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import OpenAI from "openai";
import { llamaServer } from "../fixtures/llama-server.ts";
import { writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { Fleet, freePortOf, waitFor } from "./fleet.ts";

const SET_UP_MS = 240_000;
const TEST_MS = 60_000;
const program = await llamaServer();
// It needs a llama-server from Debian's archive.
const tested = test.skipIf(program === null);
let folder = "";
let fleet: Fleet;
let origin: { url: string; downloads: () => Record<string, number>; stop: () => void };
let direct: { url: string; stop: () => void };
let client: OpenAI;

const messages = [{ role: "user" as const, content: "hello world, one two three" }];
const fixed = { model: "tiny", messages, temperature: 0, seed: 1, max_tokens: 24 };

/** A web server for one file that counts who took it whole. */
function serveFile(path: string): typeof origin {
  const counts: Record<string, number> = {};
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => {
      const name = new URL(request.url).pathname;
      if (request.method === "GET" && !request.headers.has("range")) counts[name] = (counts[name] ?? 0) + 1;
      return new Response(Bun.file(path));
    },
  });
  return { url: `http://127.0.0.1:${server.port}`, downloads: () => counts, stop: () => void server.stop(true) };
}

/** The same engine and model, asked without llmgw. */
async function serveDirectly(program: string, model: string): Promise<typeof direct> {
  const port = await freePortOf("127.0.0.1");
  const words = [
    "--model",
    model,
    "--alias",
    "tiny",
    "--host",
    "127.0.0.1",
    "--port",
    String(port),
    "--ctx-size",
    "1024",
    "--parallel",
    "2",
  ];
  const child = Bun.spawn([program, ...words], { stdout: "ignore", stderr: "ignore", stdin: "ignore" });
  const url = `http://127.0.0.1:${port}`;
  await waitFor("llama-server alone", async () => (await fetch(`${url}/health`)).status === 200, 60_000);
  return { url, stop: () => child.kill("SIGKILL") };
}

beforeAll(async () => {
  if (program === null) return;
  folder = await mkdtemp(join(tmpdir(), "lf-"));
  const model = join(folder, "tiny.gguf");
  const sha256 = await writeTinyGguf(model);
  origin = serveFile(model);
  direct = await serveDirectly(program, model);
  const entry = { engine: "llamacpp", sha256, context: 512, parallel: 2, replicas: 2, source: `${origin.url}/tiny.gguf` } as const;
  fleet = await Fleet.start({
    nodes: 2,
    llama_server: program,
    models: [
      { ...entry, name: "tiny" },
      { ...entry, name: "tiny-embed", embeddings: true, source: `${origin.url}/embed.gguf` },
    ],
  });
  await fleet.ready("tiny", 120_000);
  await fleet.ready("tiny-embed", 120_000);
  client = new OpenAI({ baseURL: `${fleet.gateway}/v1`, apiKey: await fleet.key(), maxRetries: 0 });
}, SET_UP_MS);
afterAll(async () => {
  await fleet?.stop();
  direct?.stop();
  origin?.stop();
  if (folder) await rm(folder, { recursive: true, force: true });
});

tested("each node fetched the model once, whatever asks for it", async () => {
  const replicas = await fleet.replicas();
  expect(new Set(replicas.map(({ ranks }) => ranks[0]?.node))).toEqual(new Set(["n1", "n2"]));
  // Both names lead to one content, known by its digest: a node needs it once.
  const total = Object.values(origin.downloads()).reduce((sum, count) => sum + count, 0);
  expect(total).toBe(2);
});

tested(
  "a chat is answered, with usage, as the engine itself would",
  async () => {
    const answer = await client.chat.completions.create(fixed);
    const own = new OpenAI({ baseURL: `${direct.url}/v1`, apiKey: "none" });
    const expected = await own.chat.completions.create(fixed);
    expect(answer.choices[0]?.message.content).toBe(expected.choices[0]?.message.content as string);
    expect(answer.choices[0]?.message.content).not.toBe("");
    expect(answer.choices[0]?.finish_reason).toBe(expected.choices[0]?.finish_reason as "stop");
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage ?? { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 };
    expect(prompt_tokens).toBe(expected.usage?.prompt_tokens as number);
    expect(completion_tokens).toBe(expected.usage?.completion_tokens as number);
    expect(total_tokens).toBe(prompt_tokens + completion_tokens);
    expect(answer.model).toBe("tiny");
  },
  TEST_MS,
);

tested(
  "a streamed chat says the same, and its usage",
  async () => {
    const whole = await client.chat.completions.create(fixed);
    const stream = await client.chat.completions.create({ ...fixed, stream: true, stream_options: { include_usage: true } });
    let text = "";
    let usage: OpenAI.CompletionUsage | null | undefined = null;
    let chunks = 0;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
      chunks++;
    }
    expect(text).toBe(whole.choices[0]?.message.content as string);
    expect(chunks).toBeGreaterThan(5);
    expect(usage?.completion_tokens).toBe(whole.usage?.completion_tokens as number);
    expect(usage?.prompt_tokens).toBe(whole.usage?.prompt_tokens as number);
  },
  TEST_MS,
);

tested(
  "embeddings are vectors, one an input, alike for alike",
  async () => {
    const answer = await client.embeddings.create({
      model: "tiny-embed",
      input: ["hello world", "one two", "hello world"],
      encoding_format: "float",
    });
    expect(answer.data.map(({ index }) => index)).toEqual([0, 1, 2]);
    expect(answer.data.every(({ embedding }) => embedding.length === 64)).toBe(true);
    expect(answer.data[2]?.embedding).toEqual(answer.data[0]?.embedding as number[]);
    expect(answer.data[1]?.embedding).not.toEqual(answer.data[0]?.embedding as number[]);
    expect(answer.usage.prompt_tokens).toBeGreaterThan(0);
  },
  TEST_MS,
);

tested("the client's errors are OpenAI's own", async () => {
  const stranger = new OpenAI({ baseURL: `${fleet.gateway}/v1`, apiKey: "llmgw_nonsense", maxRetries: 0 });
  expect(await stranger.chat.completions.create(fixed).catch((error: unknown) => error)).toBeInstanceOf(OpenAI.AuthenticationError);
  const missing = (await client.chat.completions.create({ ...fixed, model: "nothing" }).catch((error: unknown) => error)) as InstanceType<
    typeof OpenAI.APIError
  >;
  expect(missing).toBeInstanceOf(OpenAI.NotFoundError);
  expect(missing.code).toBe("model_not_found");
  const names: string[] = [];
  for await (const model of client.models.list()) names.push(model.id);
  expect(names.toSorted((left, right) => left.localeCompare(right))).toEqual(["tiny", "tiny-embed"]);
});

tested("ctl shows the engine's own log, and no key is in any", async () => {
  const [replica] = await fleet.ready("tiny");
  const { out } = await fleet.must("ctl", "logs", replica?.id ?? "", "--lines", "500");
  expect(out).toMatch(/llama|model/i);
  const logs = await fleet.logs();
  expect(logs).not.toContain(client.apiKey);
  expect(await readFile(fleet.ctlConfig, "utf8")).not.toContain(client.apiKey);
});
