import * as v from "valibot";
import { GGUF_ENTRIES_COUNT, MODEL_LAYERS_COUNT } from "../protocol/limits.ts";
import { ModelShape } from "../protocol/model-shape.ts";

/** A header as far as it was read: `more` asks for more of the file's beginning. */
type GgufHead = { readonly shape: ModelShape; readonly files: number } | { readonly more: true } | { readonly fault: string };

/** Kinds of metadata values (GGUF specification): bytes of a number, or how to read it. */
const NUMBERS: Readonly<Record<number, { readonly bytes: number; read(view: DataView, at: number): number }>> = {
  0: { bytes: 1, read: (view, at) => view.getUint8(at) },
  1: { bytes: 1, read: (view, at) => view.getInt8(at) },
  2: { bytes: 2, read: (view, at) => view.getUint16(at, true) },
  3: { bytes: 2, read: (view, at) => view.getInt16(at, true) },
  4: { bytes: 4, read: (view, at) => view.getUint32(at, true) },
  5: { bytes: 4, read: (view, at) => view.getInt32(at, true) },
  6: { bytes: 4, read: (view, at) => view.getFloat32(at, true) },
  7: { bytes: 1, read: (view, at) => view.getUint8(at) },
  10: { bytes: 8, read: (view, at) => Number(view.getBigUint64(at, true)) },
  11: { bytes: 8, read: (view, at) => Number(view.getBigInt64(at, true)) },
  12: { bytes: 8, read: (view, at) => view.getFloat64(at, true) },
};
const STRING = 8;
const ARRAY = 9;

class NeedsMore extends Error {}
class Malformed extends Error {}

/** A list is read only when it is asked for: those of a tokenizer are long, and those of a hostile file may be longer. */
interface List {
  readonly count: number;
  numbers(): readonly number[];
}
type Value = number | string | List;

class Reader {
  readonly #view: DataView;
  readonly #bytes: Uint8Array;
  #at = 0;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  /** Passes over bytes and returns where they begin. */
  take(bytes: number): number {
    if (!Number.isSafeInteger(bytes) || bytes < 0) throw new Malformed("a length in it is not possible");
    const at = this.#at;
    if (at + bytes > this.#bytes.length) throw new NeedsMore();
    this.#at += bytes;
    return at;
  }

  number(kind: number): number {
    const format = NUMBERS[kind];
    if (!format) throw new Malformed(`it has a value of the unknown kind ${kind}`);
    return format.read(this.#view, this.take(format.bytes));
  }

  count = (): number => this.number(10);

  text(): string {
    const bytes = this.count();
    const at = this.take(bytes);
    return new TextDecoder().decode(this.#bytes.subarray(at, at + bytes));
  }

  value(kind: number): Value {
    if (kind === STRING) return this.text();
    return kind === ARRAY ? this.array() : this.number(kind);
  }

  array(): List {
    const kind = this.number(4);
    const count = this.count();
    if (kind === STRING) {
      for (let i = 0; i < count; i++) this.take(this.count());
      return { count, numbers: () => [] };
    }
    const format = NUMBERS[kind];
    if (!format) throw new Malformed(`it has an array of the unknown kind ${kind}`);
    const { bytes } = format;
    const at = this.take(bytes * count);
    const read = Math.min(count, MODEL_LAYERS_COUNT);
    return { count, numbers: () => Array.from({ length: read }, (_, index) => format.read(this.#view, at + index * bytes)) };
  }
}

/**
 * Reads the metadata at the beginning of a GGUF file (versions 2 and 3).
 * @param bytes the file's beginning, as much as is at hand
 * @param file_bytes size of the whole file
 */
export function readGguf(bytes: Uint8Array, file_bytes: number): GgufHead {
  const values = new Map<string, Value>();
  try {
    const reader = new Reader(bytes);
    if (reader.number(4) !== 0x46_55_47_47) throw new Malformed("it does not begin with GGUF");
    const version = reader.number(4);
    if (version !== 2 && version !== 3) throw new Malformed(`it is GGUF of version ${version}, and 2 and 3 are known`);
    reader.count();
    const count = reader.count();
    if (count > GGUF_ENTRIES_COUNT) throw new Malformed(`it has ${count} entries, and ${GGUF_ENTRIES_COUNT} are read at most`);
    for (let i = 0; i < count; i++) {
      const key = reader.text();
      values.set(key, reader.value(reader.number(4)));
    }
    return shapeOf(values, file_bytes);
  } catch (error) {
    if (error instanceof NeedsMore) return bytes.length >= file_bytes ? { fault: "it ends in the middle of its header" } : { more: true };
    if (error instanceof Malformed) return { fault: error.message };
    throw error;
  }
}

function shapeOf(values: ReadonlyMap<string, Value>, file_bytes: number): GgufHead {
  const architecture = values.get("general.architecture");
  if (typeof architecture !== "string") throw new Malformed("it does not name its architecture");
  const of = (key: string): Value | undefined => values.get(`${architecture}.${key}`);
  const number = (key: string): number | null => {
    const value = of(key);
    return typeof value === "number" ? value : null;
  };
  const layers = number("block_count");
  const width = number("embedding_length");
  if (layers === null || width === null || layers > MODEL_LAYERS_COUNT)
    throw new Malformed("it does not say how many layers it has, or how wide they are");
  const tokens = values.get("tokenizer.ggml.tokens");
  const listed = typeof tokens === "object" ? tokens.count : 0;
  const shape = v.safeParse(ModelShape, {
    format: "gguf",
    architecture,
    weights_bytes: file_bytes,
    ...keptValues(architecture, layers, width, of, number),
    context: number("context_length"),
    vocabulary: number("vocab_size") ?? listed,
    width,
  });
  // What goes on from here is kept and sent on: a number that cannot be must not come so far.
  if (!shape.success) throw new Malformed(`its header says what cannot be: ${v.getDotPath(shape.issues[0])}: ${shape.issues[0].message}`);
  const files = values.get("split.count");
  return { shape: shape.output, files: typeof files === "number" && Number.isInteger(files) && files > 1 ? files : 1 };
}

/**
 * Architectures whose windowed layers the file does not list: all but each n-th layer have the window.
 * Source: llama.cpp's own list, src/llama-model.cpp.
 */
const WINDOW_PERIOD: Readonly<Record<string, number>> = {
  gemma2: 2,
  gemma3: 6,
  gemma3n: 5,
  cohere2: 4,
  "gpt-oss": 2,
  exaone4: 4,
  olmo2: 4,
  llama4: 4,
};

function keptValues(
  architecture: string,
  layers: number,
  width: number,
  of: (key: string) => Value | undefined,
  number: (key: string) => number | null,
): Pick<ModelShape, "kv_values" | "window_values" | "window"> {
  const perLayer = (key: string, otherwise: number): number[] => {
    const value = of(key);
    const listed = typeof value === "object" ? value.numbers() : [];
    return Array.from({ length: layers }, (_, layer) => (typeof value === "number" ? value : (listed[layer] ?? otherwise)));
  };
  const heads = perLayer("attention.head_count", 0);
  const most = Math.max(1, ...heads);
  const kv_heads = perLayer("attention.head_count_kv", most);
  const key_length = number("attention.key_length") ?? Math.floor(width / most);
  const value_length = number("attention.value_length") ?? Math.floor(width / most);
  const compressed = number("attention.kv_lora_rank");
  const period = number("full_attention_interval");
  const window = number("attention.sliding_window") ?? number("attention.chunk_size") ?? 0;
  const pattern = of("attention.sliding_window_pattern");
  const listed = typeof pattern === "object" ? pattern.numbers() : null;
  const every = typeof pattern === "number" ? pattern : WINDOW_PERIOD[architecture];
  const hasWindow = (layer: number): boolean => {
    if (window === 0) return false;
    if (listed) return listed[layer] === 1;
    return every !== undefined && layer % every < every - 1;
  };
  let [kv_values, window_values] = [0, 0];
  for (let layer = 0; layer < layers; layer++) {
    // Layers between those with attention keep a state of fixed size.
    if (period !== null && period > 0 && (layer + 1) % period !== 0) continue;
    const values =
      compressed === null ? (kv_heads[layer] ?? 0) * (key_length + value_length) : compressed + (number("rope.dimension_count") ?? 0);
    if (hasWindow(layer)) window_values += values;
    else kv_values += values;
  }
  return { kv_values, window_values, window: window_values > 0 ? window : 0 };
}
