import * as v from "valibot";
import { Bytes, EngineKind, ModelName } from "./ids.ts";
import { MODEL_ARGS_BYTES, MODEL_REPLICAS_COUNT, SOURCE_CHARACTERS_COUNT } from "./limits.ts";
import { ModelShape } from "./model-shape.ts";

/** A flag's value in `args`: passed to the engine as `--name value`; `true` as a bare `--name`, `false` left out. */
const ArgValue = v.union([
  v.pipe(v.string(), v.regex(/^[^\0]*$/, "no argument of a program can hold a NUL character")),
  v.number(),
  v.boolean(),
]);
export const Args = v.pipe(
  v.record(v.pipe(v.string(), v.regex(/^[a-z][a-z0-9-]*$/, "write the flag's long name without the leading dashes")), ArgValue),
  v.check(
    (args) => Buffer.byteLength(JSON.stringify(args)) <= MODEL_ARGS_BYTES,
    `args are at most ${MODEL_ARGS_BYTES} bytes; put what is longer in a file on the node, and name it`,
  ),
);
export type Args = v.InferOutput<typeof Args>;

const Sha256 = v.pipe(v.string(), v.regex(/^[0-9a-f]{64}$/, "a sha256 is 64 lower-case hex digits"));
const Positive = v.pipe(v.number(), v.integer(), v.minValue(1));

/** One entry of `catalog.yaml`. */
export const ModelSpec = v.strictObject({
  name: ModelName,
  engine: EngineKind,
  /** An absolute path that is already on the node, or an http(s) URL. `sim` needs none. */
  source: v.optional(
    v.pipe(
      v.string(),
      v.maxLength(SOURCE_CHARACTERS_COUNT),
      v.regex(/^(\/|https?:\/\/)/, "a source is an absolute path or an http(s) URL"),
    ),
  ),
  sha256: v.optional(Sha256),
  size: v.optional(Bytes),
  replicas: v.optional(v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(MODEL_REPLICAS_COUNT)), 1),
  /** Ranks per replica. */
  nodes: v.optional(v.pipe(Positive, v.maxValue(64)), 1),
  /** GPUs per node. */
  gpus: v.optional(v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(16)), 0),
  /** System memory one rank needs, in bytes; estimated from the weights' header when absent. */
  memory: v.optional(Bytes),
  /** Tokens of context per request. */
  context: v.optional(Positive),
  /** Requests the engine runs at once. */
  parallel: v.optional(Positive),
  /** Serves `/v1/embeddings`. */
  embeddings: v.optional(v.boolean(), false),
  args: v.optional(Args, {}),
});
export type ModelSpec = v.InferOutput<typeof ModelSpec>;

/** An entry of the catalog with what is known of its weights. */
export const SizedModel = v.strictObject({ ...ModelSpec.entries, shape: v.optional(ModelShape) });
export type SizedModel = v.InferOutput<typeof SizedModel>;

/** `catalog.yaml`: each model once. */
export const Catalog = v.strictObject({
  models: v.pipe(
    v.array(ModelSpec),
    v.rawCheck(({ dataset, addIssue }) => {
      if (!dataset.typed) return;
      const { value } = dataset;
      for (const [key, model] of value.entries()) {
        const first = value.findIndex(({ name }) => name === model.name);
        if (first === key) continue;
        const place = { type: "array", origin: "value", input: value, key, value: model } as const;
        addIssue({
          message: `the name "${model.name}" is taken by model ${first + 1} of this list`,
          path: [place, { type: "object", origin: "value", input: { ...model }, key: "name", value: model.name }],
        });
      }
    }),
  ),
});
export type Catalog = v.InferOutput<typeof Catalog>;
