import * as v from "valibot";
import { Bytes, Count } from "./ids.ts";
import { ARCHITECTURE_NAME_CHARACTERS_COUNT } from "./limits.ts";

/** What a model's weights say of the memory an engine needs for them, read from their header without loading them. */
export const ModelShape = v.object({
  format: v.picklist(["gguf", "safetensors"]),
  /** As the weights call it: `llama`, `Qwen3ForCausalLM`. */
  architecture: v.pipe(v.string(), v.maxLength(ARCHITECTURE_NAME_CHARACTERS_COUNT)),
  /** All weights together, as they are stored. */
  weights_bytes: Bytes,
  /** Keys and values kept for each token of the context: numbers, summed over the layers that keep all tokens. */
  kv_values: Count,
  /** The same for layers that keep the last `window` tokens only. */
  window_values: Count,
  /** Tokens; 0 when no layer has a window. */
  window: Count,
  /** The longest context it was made for, in tokens; null when it does not say. */
  context: v.nullable(Count),
  vocabulary: Count,
  /** Numbers per token between layers. */
  width: Count,
});
export type ModelShape = v.InferOutput<typeof ModelShape>;
