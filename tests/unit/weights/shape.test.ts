import { afterAll, beforeAll, expect, test } from "bun:test";
import fc from "fast-check";
import { mkdir, mkdtemp, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { ModelShape } from "../../../src/protocol/model-shape.ts";
import { readGguf } from "../../../src/weights/gguf.ts";
import { readConfig } from "../../../src/weights/safetensors.ts";
import { lookAt, shapeAtUrl } from "../../../src/weights/shape.ts";
import { ggufHead, type GgufValue } from "../../fixtures/gguf-head.ts";
import { tinyGguf } from "../../fixtures/tiny-gguf.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-shape-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const TINY = tinyGguf({ layers: 3, width: 64, heads: 4, kv_heads: 2, context: 512 });
const LLAMA = {
  "general.architecture": "llama",
  "llama.block_count": 32,
  "llama.embedding_length": 4_096,
  "llama.attention.head_count": 32,
  "llama.attention.head_count_kv": 8,
  "llama.context_length": 131_072,
  "llama.vocab_size": 128_256,
};

/** Keys and values of one token, over all layers. */
const GGUF_CASES: [string, Record<string, GgufValue>, object][] = [
  ["grouped heads", LLAMA, { kv_values: 32 * 8 * 256, window: 0, context: 131_072, vocabulary: 128_256, width: 4_096 }],
  ["no word of grouped heads", { ...LLAMA, "llama.attention.head_count_kv": 32 }, { kv_values: 32 * 32 * 256 }],
  [
    "heads of their own length",
    { ...LLAMA, "llama.attention.key_length": 192, "llama.attention.value_length": 128 },
    { kv_values: 32 * 8 * 320 },
  ],
  [
    "a list of heads, none in layers that keep a state",
    { ...LLAMA, "llama.block_count": 4, "llama.attention.head_count_kv": [0, 8, 0, 8] },
    { kv_values: 2 * 8 * 256 },
  ],
  [
    "a window in five layers of six, as this architecture has it",
    {
      "general.architecture": "gemma3",
      "gemma3.block_count": 12,
      "gemma3.embedding_length": 1_024,
      "gemma3.attention.head_count": 4,
      "gemma3.attention.head_count_kv": 1,
      "gemma3.attention.sliding_window": 512,
      "tokenizer.ggml.tokens": ["a", "b", "c"],
    },
    { kv_values: 2 * 512, window_values: 10 * 512, window: 512, vocabulary: 3 },
  ],
  [
    "a window where the file says so",
    {
      ...LLAMA,
      "llama.block_count": 4,
      "llama.attention.sliding_window": 128,
      "llama.attention.sliding_window_pattern": [true, true, false, true],
    },
    { kv_values: 8 * 256, window_values: 3 * 8 * 256, window: 128 },
  ],
  [
    "a window that this architecture does not use",
    { ...LLAMA, "llama.attention.sliding_window": 4_096 },
    { kv_values: 32 * 8 * 256, window_values: 0, window: 0 },
  ],
  [
    "keys and values in a compressed form",
    { ...LLAMA, "llama.attention.kv_lora_rank": 512, "llama.rope.dimension_count": 64 },
    { kv_values: 32 * 576 },
  ],
  ["attention in each fourth layer", { ...LLAMA, "llama.full_attention_interval": 4 }, { kv_values: 8 * 8 * 256 }],
];

test.each(GGUF_CASES)("GGUF: %s", (_name, metadata, shape) => {
  const bytes = ggufHead(metadata);
  expect(readGguf(bytes, 1_000_000)).toMatchObject({ files: 1, shape: { format: "gguf", weights_bytes: 1_000_000, ...shape } });
});

test("a real file's header is read, and needs no more than is there of it", () => {
  const head = readGguf(TINY, TINY.length);
  expect(head).toMatchObject({
    shape: { architecture: "llama", kv_values: 3 * 2 * 32, context: 512, width: 64, weights_bytes: TINY.length },
  });
  for (const length of [0, 3, 4, 20, 100, 1_000]) expect(readGguf(TINY.subarray(0, length), TINY.length)).toEqual({ more: true });
});

test.each([
  ["no GGUF", Buffer.from("PK\u0003\u0004 something else"), /does not begin with GGUF/],
  ["another version", ggufHead(LLAMA, 9), /GGUF of version 9/],
  ["no architecture", ggufHead({ "general.name": "x" }), /does not name its architecture/],
  ["no layers", ggufHead({ "general.architecture": "llama" }), /how many layers/],
  ["cut short", ggufHead(LLAMA).subarray(0, 60), /ends in the middle/],
])("%s is a fault that is told", (_name, bytes, words) => {
  const head = readGguf(bytes, bytes.length);
  expect("fault" in head ? head.fault : "").toMatch(words);
});

test("whatever the bytes are, reading them ends with a shape, a fault or a wish for more", () => {
  const whole = ggufHead(LLAMA);
  fc.assert(
    fc.property(fc.nat(whole.length - 1), fc.uint8Array({ minLength: 1, maxLength: 12 }), (at, noise) => {
      const bytes = Buffer.from(whole);
      bytes.set(noise.subarray(0, bytes.length - at), at);
      const head = readGguf(bytes, 10_000_000);
      return "shape" in head || "fault" in head || "more" in head;
    }),
    { numRuns: 2_000 },
  );
});

/** What a file may claim of itself, and no model is. */
const ABSURD: GgufValue[] = [-1, 0.5, 1e19, 1e300, Number.NaN, Number.POSITIVE_INFINITY, [-1], [1e300, Number.NaN], "x".repeat(1_000)];

test("whatever a header claims, what comes of it can be kept and sent", () => {
  const keys = [...Object.keys(LLAMA), "llama.attention.key_length", "llama.attention.sliding_window", "llama.attention.kv_lora_rank"];
  fc.assert(
    fc.property(
      fc.dictionary(fc.constantFrom(...keys), fc.constantFrom(...ABSURD), { minKeys: 1 }),
      fc.constantFrom(5, 1e300),
      (lies, size) => {
        const head = readGguf(ggufHead({ ...LLAMA, ...lies }), size);
        return !("shape" in head) || v.is(ModelShape, JSON.parse(JSON.stringify(head.shape)));
      },
    ),
    { numRuns: 2_000 },
  );
});

test("a header of endless small entries is not read to its end", () => {
  const bytes = Buffer.concat([ggufHead({}), Buffer.alloc(13 * 100_000)]);
  bytes.writeBigUInt64LE(100_000n, 16);
  expect(readGguf(bytes, bytes.length)).toEqual({ fault: "it has 100000 entries, and 10000 are read at most" });
});

const LAYERS = { num_hidden_layers: 4, hidden_size: 1_024, num_attention_heads: 8, num_key_value_heads: 2, vocab_size: 1_000 };
test.each([
  ["grouped heads", LAYERS, { kv_values: 4 * 2 * 2 * 128, window: 0 }],
  ["heads of their own size", { ...LAYERS, head_dim: 64 }, { kv_values: 4 * 2 * 2 * 64 }],
  [
    "kinds of layers",
    { ...LAYERS, sliding_window: 256, layer_types: ["sliding_attention", "full_attention", "linear_attention", "full_attention"] },
    { kv_values: 2 * 512, window_values: 512, window: 256 },
  ],
  ["a window that is switched off", { ...LAYERS, sliding_window: 256, use_sliding_window: false }, { kv_values: 4 * 512, window: 0 }],
  ["a compressed form", { ...LAYERS, kv_lora_rank: 512, qk_rope_head_dim: 64 }, { kv_values: 4 * 576 }],
  ["a model that sees", { text_config: LAYERS, architectures: ["SeesForConditionalGeneration"] }, { kv_values: 4 * 512 }],
])("safetensors: %s", (_name, config, shape) => {
  expect(readConfig(config, 77)).toMatchObject({ shape: { format: "safetensors", weights_bytes: 77, ...shape } });
});

test("whatever a config.json claims, what comes of it can be kept and sent", () => {
  const claims = fc.constantFrom(-1, 0.5, 2 ** 53, 1e300, "many", null, ["full_attention"], "x".repeat(1_000));
  const key = fc.constantFrom(
    ...Object.keys(LAYERS),
    "head_dim",
    "sliding_window",
    "kv_lora_rank",
    "max_position_embeddings",
    "layer_types",
  );
  fc.assert(
    fc.property(fc.dictionary(key, claims, { minKeys: 1 }), claims, fc.constantFrom(0, 1e300, -5), (lies, architecture, bytes) => {
      const read = readConfig({ ...LAYERS, ...lies, architectures: [architecture] }, bytes);
      return !("shape" in read) || v.is(ModelShape, JSON.parse(JSON.stringify(read.shape)));
    }),
    { numRuns: 2_000 },
  );
});

test("a folder: from its index, or the sizes of its files; a config without layers is no shape", async () => {
  const at = join(folder, "model");
  await mkdir(at);
  await writeFile(join(at, "config.json"), JSON.stringify({ architectures: ["LlamaForCausalLM"], ...LAYERS }));
  await writeFile(join(at, "model-1.safetensors"), Buffer.alloc(1_000));
  await writeFile(join(at, "model-2.safetensors"), Buffer.alloc(500));
  expect(await lookAt(at)).toMatchObject({ fault: "", shape: { architecture: "LlamaForCausalLM", weights_bytes: 1_500 } });
  await writeFile(join(at, "model.safetensors.index.json"), JSON.stringify({ metadata: { total_size: 1_400 }, weight_map: {} }));
  expect(await lookAt(at)).toMatchObject({ shape: { weights_bytes: 1_400 } });
  await writeFile(join(at, "config.json"), "{");
  expect(await lookAt(at)).toEqual({ shape: null, fault: "" });
});

test("a split model is as large as its parts, and one that lacks a part says which", async () => {
  const head = ggufHead({ ...LLAMA, "split.count": 3 });
  const part = (n: number) => join(folder, `m-0000${n}-of-00003.gguf`);
  await writeFile(part(1), head);
  await writeFile(part(2), Buffer.alloc(1_000));
  expect((await lookAt(part(1))).fault).toBe(`part 3 of 3 is missing: ${part(3)}`);
  await writeFile(part(3), Buffer.alloc(500));
  expect(await lookAt(part(1))).toMatchObject({ fault: "", shape: { weights_bytes: head.length + 1_500 } });
});

test("a file that says it is one of many parts, and is not named as one, is a fault at once", async () => {
  const path = join(folder, "alone.gguf");
  await writeFile(path, ggufHead({ ...LLAMA, "split.count": 2 ** 32 - 1 }));
  expect(await lookAt(path)).toEqual({ shape: null, fault: "it is one of 4294967295 parts, and its name does not say which" });
});

test("pipes, sockets and devices are never opened, wherever they lie", async () => {
  const pipe = join(folder, "pipe");
  expect(await Bun.spawn(["mkfifo", pipe]).exited).toBe(0);
  const socket = join(folder, "socket");
  const server = Bun.serve({ unix: socket, fetch: () => new Response("") });
  const models = [pipe, "/dev/zero"].map((inside, index) => ({ inside, at: join(folder, `odd-${index}`) }));
  try {
    for (const path of [pipe, socket, "/dev/zero", "/dev/tty"])
      expect(await lookAt(path)).toEqual({ shape: null, fault: "it is neither a file nor a folder" });
    for (const { inside, at } of models) {
      await mkdir(at);
      await symlink(inside, join(at, "config.json"));
      expect(await lookAt(at)).toEqual({ shape: null, fault: "" });
    }
  } finally {
    await server.stop(true);
  }
});

test("what is not there is a fault; what is no model is for the engine to judge", async () => {
  expect((await lookAt(join(folder, "nothing.gguf"))).fault).toContain("ENOENT");
  await writeFile(join(folder, "text.gguf"), "some text");
  expect(await lookAt(join(folder, "text.gguf"))).toEqual({ shape: null, fault: "" });
});

test("at a URL the header is enough: with ranges, without them, and after a redirect", async () => {
  const long = Buffer.concat([
    ggufHead({ ...LLAMA, "tokenizer.ggml.tokens": Array.from({ length: 200_000 }, (_, n) => `token ${n}`) }),
    Buffer.alloc(64),
  ]);
  let sent = 0;
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => {
      const { pathname } = new URL(request.url);
      if (pathname === "/moved") return Response.redirect("/ranges", 302);
      if (pathname === "/endless") return new Response(long, { headers: { "content-range": `bytes 0-1/${"9".repeat(40)}` } });
      if (pathname === "/round") return Response.redirect("/round", 302);
      if (pathname === "/none") return new Response("no", { status: 404 });
      const end = Number(/bytes=0-(\d+)/.exec(request.headers.get("range") ?? "")?.[1] ?? long.length);
      if (pathname === "/whole") return new Response(long);
      const part = long.subarray(0, end + 1);
      sent += part.length;
      return new Response(part, { status: 206, headers: { "content-range": `bytes 0-${part.length - 1}/${long.length * 100}` } });
    },
  });
  try {
    const at = (path: string) => shapeAtUrl(`http://127.0.0.1:${server.port}${path}`, new AbortController().signal);
    expect(await at("/ranges")).toMatchObject({ kv_values: 32 * 8 * 256, weights_bytes: long.length * 100 });
    expect(sent).toBeLessThan(3 * long.length);
    expect(await at("/moved")).toMatchObject({ weights_bytes: long.length * 100 });
    expect(await at("/whole")).toMatchObject({ weights_bytes: long.length });
    expect(await at("/endless")).toBeNull();
    expect(await at("/round").then(() => "", String)).toMatch(/redirect/i);
    expect(await at("/none").then(() => "", String)).toContain("404");
  } finally {
    await server.stop(true);
  }
});
