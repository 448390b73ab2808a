import type { SizedModel } from "../protocol/catalog.ts";
import { ENGINE_MEMORY_OVERHEAD_BYTES, GPU_CONTEXT_BYTES, GPU_ENGINE_BYTES, UNKNOWN_CONTEXT_TOKENS } from "../protocol/limits.ts";

/** What one rank of a model needs. */
interface MemoryNeed {
  /** System memory, in bytes; 0 = not known. */
  readonly system: number;
  /** Memory of each of its GPUs, in bytes; 0 = none, or not known. */
  readonly per_gpu: number;
  /** Where the numbers are from, for people. */
  readonly basis: string;
}

/** Bytes per number of the cache of keys and values (llama.cpp's blocks of 32 with their scale; vLLM's and SGLang's eight bits). */
const CACHE_BYTES: Readonly<Record<string, number>> = {
  f32: 4,
  f16: 2,
  bf16: 2,
  q8_0: 34 / 32,
  q5_1: 24 / 32,
  q5_0: 22 / 32,
  q4_1: 20 / 32,
  q4_0: 18 / 32,
  iq4_nl: 18 / 32,
  fp8: 1,
  fp8_e4m3: 1,
  fp8_e5m2: 1,
};
/** Tokens llama.cpp works on at once when not told otherwise (`--ubatch-size`); a window's cache is larger by as much. */
const BATCH_TOKENS = 512;
/** Share of a GPU that vLLM and SGLang take when not told otherwise. */
const GPU_SHARE = 0.9;

const numberOf = (value: unknown): number | null => {
  const number = typeof value === "string" && value !== "" ? Number(value) : value;
  return typeof number === "number" && Number.isFinite(number) ? number : null;
};

/**
 * System and GPU memory of one rank: as the catalog says, else estimated from the header of the weights, else from their
 * size alone. An estimate is meant to be a little too high rather than too low.
 */
export function memoryOf(spec: SizedModel): MemoryNeed {
  let need = NEEDS.get(spec);
  if (need) return need;
  const estimate = estimated(spec);
  need = spec.memory === undefined ? estimate : { ...estimate, system: spec.memory, basis: "the catalog" };
  NEEDS.set(spec, need);
  return need;
}

/** Needs of entries that were asked for before: entries are never changed. */
const NEEDS = new WeakMap<SizedModel, MemoryNeed>();

function estimated(spec: SizedModel): MemoryNeed {
  const { engine, gpus, size, shape } = spec;
  if (engine === "sim") return { system: 0, per_gpu: 0, basis: "nothing is known" };
  if (shape) return engine === "llamacpp" ? llamacpp(spec, shape) : pooled(spec, shape);
  if (gpus > 0 || size === undefined) return { system: 0, per_gpu: 0, basis: "nothing is known" };
  return { system: Math.ceil(size * 1.1) + ENGINE_MEMORY_OVERHEAD_BYTES, per_gpu: 0, basis: "the size of the weights" };
}

type Shape = NonNullable<SizedModel["shape"]>;

/** Bytes of keys and values of that many tokens. */
function cacheBytes({ kv_values, window_values, window }: Shape, tokens: number, keeps: number, bytes_each: number): number {
  return (kv_values * tokens + window_values * Math.min(tokens, window + keeps)) * bytes_each;
}

/** llama.cpp holds weights, the cache of the whole context, and space to work on one batch. */
function llamacpp(spec: SizedModel, shape: Shape): MemoryNeed {
  const { args, gpus, context, parallel = 1 } = spec;
  const tokens = context === undefined ? (shape.context ?? UNKNOWN_CONTEXT_TOKENS) : context * parallel;
  const [keys, values] = ["cache-type-k", "cache-type-v"].map((flag) => CACHE_BYTES[String(args[flag] ?? "f16")] ?? 2) as [number, number];
  const window = args["swa-full"] === true ? tokens : BATCH_TOKENS + shape.window * (parallel - 1);
  const cache = cacheBytes(shape, tokens, window, (keys + values) / 2);
  const batch = numberOf(args["ubatch-size"]) ?? BATCH_TOKENS;
  const work = batch * (shape.vocabulary + 8 * shape.width) * 4;
  const all = Math.ceil(shape.weights_bytes + cache + work);
  const basis = `the header of the weights: ${parts(shape.weights_bytes, cache, tokens, work)}`;
  if (gpus === 0) return { system: all + ENGINE_MEMORY_OVERHEAD_BYTES, per_gpu: 0, basis };
  const layers = String(args["n-gpu-layers"] ?? args["gpu-layers"] ?? "all");
  if (layers !== "all") return { system: 0, per_gpu: 0, basis: "nothing is known: the catalog splits the layers between GPUs and memory" };
  return { system: ENGINE_MEMORY_OVERHEAD_BYTES, per_gpu: Math.ceil(all / gpus) + GPU_CONTEXT_BYTES, basis };
}

/** vLLM and SGLang take a share of each GPU; what is in it must hold the weights and one request of full length. */
function pooled(spec: SizedModel, shape: Shape): MemoryNeed {
  const { args, gpus, nodes } = spec;
  if (gpus === 0) return { system: Math.ceil(shape.weights_bytes * 1.1) + GPU_ENGINE_BYTES, per_gpu: 0, basis: "the size of the weights" };
  const tokens = numberOf(args["max-model-len"] ?? args["context-length"]) ?? spec.context ?? shape.context ?? UNKNOWN_CONTEXT_TOKENS;
  const cache = cacheBytes(shape, tokens, BATCH_TOKENS, CACHE_BYTES[String(args["kv-cache-dtype"] ?? "f16")] ?? 2);
  const share = numberOf(args["gpu-memory-utilization"] ?? args["mem-fraction-static"]) ?? GPU_SHARE;
  const each = (shape.weights_bytes + cache) / (gpus * nodes) + GPU_ENGINE_BYTES;
  return {
    system: ENGINE_MEMORY_OVERHEAD_BYTES,
    per_gpu: Math.ceil(each / Math.max(0.01, share)),
    basis: `the header of the weights: ${parts(shape.weights_bytes, cache, tokens, GPU_ENGINE_BYTES)}`,
  };
}

/** Bytes for people: `1.5 GiB`, `300 MiB`. */
export function inGiB(bytes: number): string {
  const mib = bytes / 2 ** 20;
  return mib >= 1_024 ? `${(mib / 1_024).toFixed(1)} GiB` : `${Math.round(mib)} MiB`;
}

function parts(weights: number, cache: number, tokens: number, work: number): string {
  return `weights ${inGiB(weights)}, a context of ${tokens} tokens ${inGiB(cache)}, work ${inGiB(work)}`;
}
