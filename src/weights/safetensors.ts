import * as v from "valibot";
import { Bytes } from "../protocol/ids.ts";
import { MODEL_LAYERS_COUNT } from "../protocol/limits.ts";
import { ModelShape } from "../protocol/model-shape.ts";

const Whole = v.pipe(v.number(), v.integer(), v.minValue(0));
const Layers = v.looseObject({
  num_hidden_layers: v.pipe(Whole, v.maxValue(MODEL_LAYERS_COUNT)),
  hidden_size: Whole,
  num_attention_heads: Whole,
  num_key_value_heads: v.optional(v.nullable(Whole)),
  head_dim: v.optional(v.nullable(Whole)),
  vocab_size: v.optional(v.nullable(Whole)),
  max_position_embeddings: v.optional(v.nullable(Whole)),
  sliding_window: v.optional(v.nullable(Whole)),
  use_sliding_window: v.optional(v.nullable(v.boolean())),
  /** Per layer: `full_attention`, `sliding_attention`, `chunked_attention`, or one without keys such as `linear_attention`. */
  layer_types: v.optional(v.nullable(v.array(v.string()))),
  full_attention_interval: v.optional(v.nullable(Whole)),
  kv_lora_rank: v.optional(v.nullable(Whole)),
  qk_rope_head_dim: v.optional(v.nullable(Whole)),
});
const Config = v.looseObject({ architectures: v.optional(v.array(v.string())), text_config: v.optional(v.looseObject({})) });
const Index = v.looseObject({ metadata: v.looseObject({ total_size: v.optional(Bytes) }) });

/** Size of all weights as `model.safetensors.index.json` names it, in bytes; null when it does not. */
export function indexedBytes(index: unknown): number | null {
  const read = v.safeParse(Index, index);
  return read.success ? (read.output.metadata.total_size ?? null) : null;
}

/**
 * Reads a model's `config.json`. A model that sees or hears keeps what counts here in `text_config`.
 * @returns the shape, or why there is none
 */
export function readConfig(config: unknown, weights_bytes: number): { readonly shape: ModelShape } | { readonly fault: string } {
  const outer = v.safeParse(Config, config);
  if (!outer.success) return { fault: "its config.json is not a model's" };
  const read = v.safeParse(Layers, outer.output.text_config ?? outer.output);
  if (!read.success) return { fault: `its config.json does not say how large its layers are: ${read.issues[0].message}` };
  const { output: layers } = read;
  const shape = v.safeParse(ModelShape, {
    format: "safetensors",
    architecture: outer.output.architectures?.[0] ?? "unknown",
    weights_bytes,
    ...keptValues(layers),
    context: layers.max_position_embeddings ?? null,
    vocabulary: layers.vocab_size ?? 0,
    width: layers.hidden_size,
  });
  if (shape.success) return { shape: shape.output };
  return { fault: `its config.json says what cannot be: ${v.getDotPath(shape.issues[0])}: ${shape.issues[0].message}` };
}

function keptValues(layers: v.InferOutput<typeof Layers>): Pick<ModelShape, "kv_values" | "window_values" | "window"> {
  const { num_hidden_layers: count, hidden_size, num_attention_heads: heads, layer_types: types, full_attention_interval: period } = layers;
  const head_size = layers.head_dim ?? Math.floor(hidden_size / Math.max(1, heads));
  const compressed = layers.kv_lora_rank ?? null;
  const per_layer =
    compressed === null ? 2 * (layers.num_key_value_heads ?? heads) * head_size : compressed + (layers.qk_rope_head_dim ?? 0);
  const window = layers.use_sliding_window === false ? 0 : (layers.sliding_window ?? 0);
  let [kv_values, window_values] = [0, 0];
  for (let layer = 0; layer < count; layer++) {
    const type = types?.[layer] ?? (period && (layer + 1) % period !== 0 ? "linear_attention" : "full_attention");
    if (type === "full_attention" || (type !== "linear_attention" && window === 0)) kv_values += per_layer;
    else if (type === "sliding_attention" || type === "chunked_attention") window_values += per_layer;
  }
  return { kv_values, window_values, window: window_values > 0 ? window : 0 };
}
