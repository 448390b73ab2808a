import { expect, test } from "bun:test";
import { memoryOf } from "../../../src/core/memory.ts";
import type { ModelShape } from "../../../src/protocol/model-shape.ts";
import { GiB, modelOf } from "./fleet-for-tests.ts";

/** Llama 3.1 8B in four bits: 128 KiB of cache for each token. */
const SHAPE: ModelShape = {
  format: "gguf",
  architecture: "llama",
  weights_bytes: 4.6 * GiB,
  kv_values: 65_536,
  window_values: 0,
  window: 0,
  context: 131_072,
  vocabulary: 128_256,
  width: 4_096,
};
const coder = (more: Parameters<typeof modelOf>[1] = {}) =>
  modelOf("m", { engine: "llamacpp", source: "/m", context: 8_192, shape: SHAPE, ...more });
const inGiB = (bytes: number) => Math.round((bytes / GiB) * 10) / 10;

test.each([
  ["weights, a context of 8k, work and the process", {}, 6.2],
  ["as many contexts as run at once", { parallel: 4 }, 9.2],
  ["the model's own context", { context: undefined }, 21.2],
  ["a cache in eight bits", { args: { "cache-type-k": "q8_0", "cache-type-v": "q8_0" } }, 5.7],
  ["a smaller batch", { args: { "ubatch-size": 64 } }, 5.9],
  ["what the catalog says", { memory: 3 * GiB }, 3],
  ["the size alone, without a header", { shape: undefined, size: 10 * GiB }, 11.3],
  ["nothing, without either", { shape: undefined }, 0],
])("llama.cpp in memory: %s", (_name, more, gib) => {
  const need = memoryOf(coder(more as Parameters<typeof modelOf>[1]));
  expect([inGiB(need.system), need.per_gpu]).toEqual([gib, 0]);
});

test("layers with a window keep no more than the window and a batch", () => {
  const windowed = { ...SHAPE, kv_values: 16_384, window_values: 49_152, window: 1_024 };
  const near = memoryOf(coder({ shape: windowed, context: 1_024 })).system;
  const far = memoryOf(coder({ shape: windowed, context: 65_536 })).system;
  expect(inGiB(far - near)).toBe(inGiB(16_384 * 2 * (65_536 - 1_024) + 49_152 * 2 * 512));
  expect(memoryOf(coder({ shape: windowed, context: 65_536, args: { "swa-full": true } })).system).toBe(
    memoryOf(coder({ context: 65_536 })).system,
  );
});

test("on GPUs: shared among them, or not counted when the catalog splits the layers", () => {
  expect(inGiB(memoryOf(coder({ gpus: 1 })).per_gpu)).toBe(6.4);
  expect(inGiB(memoryOf(coder({ gpus: 2 })).per_gpu)).toBe(3.5);
  expect(memoryOf(coder({ gpus: 1, args: { "n-gpu-layers": 12 } }))).toMatchObject({ system: 0, per_gpu: 0 });
});

test("vLLM: its share of each GPU of every rank must hold weights and one request", () => {
  const big = modelOf("m", {
    engine: "vllm",
    source: "/m",
    gpus: 8,
    nodes: 2,
    shape: { ...SHAPE, format: "safetensors", weights_bytes: 800 * GiB },
  });
  expect(inGiB(memoryOf(big).per_gpu)).toBe(60);
  expect(inGiB(memoryOf({ ...big, args: { "max-model-len": 1_000, "gpu-memory-utilization": 0.5 } }).per_gpu)).toBe(106);
});

test("where the numbers are from is said", () => {
  expect(memoryOf(coder()).basis).toBe("the header of the weights: weights 4.6 GiB, a context of 8192 tokens 1.0 GiB, work 315 MiB");
});
