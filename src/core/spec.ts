import type { ModelSpec } from "../protocol/catalog.ts";
import { ENGINE_MEMORY_OVERHEAD_BYTES } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";

/** Objects with their keys in order, so that equal values give equal text. */
function ordered(value: Readonly<Record<string, unknown>>): [string, unknown][] {
  return Object.entries(value)
    .filter(([, entry]) => entry !== undefined && entry !== null)
    .sort(([a], [b]) => (a < b ? -1 : 1));
}

/**
 * The part of a catalog entry that an engine is started with, as text: two entries with the same key may share
 * a running engine. How many replicas there are and what memory is set aside does not belong to it.
 */
export function specKey(spec: ModelSpec): string {
  let key = KEYS.get(spec);
  if (key === undefined) KEYS.set(spec, (key = makeKey(spec)));
  return key;
}

/** Keys of entries that were asked for before: entries are never changed. */
const KEYS = new WeakMap<ModelSpec, string>();

function makeKey(spec: ModelSpec): string {
  const { engine, source, sha256, size, nodes, gpus, context, parallel, embeddings } = spec;
  return JSON.stringify([ordered({ engine, source, sha256, size, nodes, gpus, context, parallel, embeddings }), ordered(spec.args)]);
}

/** The catalog entry a running attempt was started from, as far as its launch tells. */
export function specOfLaunch(launch: RankLaunch): ModelSpec {
  return {
    name: launch.model,
    engine: launch.engine,
    ...(launch.weights && { source: launch.weights.source }),
    ...(launch.weights?.sha256 !== undefined && { sha256: launch.weights.sha256 }),
    ...(launch.weights?.size !== undefined && { size: launch.weights.size }),
    replicas: 1,
    nodes: launch.ranks,
    gpus: launch.gpus.length,
    ...(launch.context !== null && { context: launch.context }),
    ...(launch.parallel !== null && { parallel: launch.parallel }),
    embeddings: launch.embeddings,
    args: launch.args,
  };
}

/**
 * System memory one rank needs, in bytes: as the catalog says, else estimated from the size of weights that are
 * not held on GPUs, else 0 (unknown).
 */
export function memoryNeed(spec: ModelSpec): number {
  if (spec.memory !== undefined) return spec.memory;
  if (spec.gpus > 0 || spec.size === undefined) return 0;
  return Math.ceil(spec.size * 1.1) + ENGINE_MEMORY_OVERHEAD_BYTES;
}

/** What a catalog says that cannot be served, one sentence each. */
export function catalogFaults(models: readonly ModelSpec[]): string[] {
  const faults: string[] = [];
  for (const spec of models) {
    if (spec.engine !== "sim" && spec.source === undefined) faults.push(`model ${spec.name} has no source`);
    if (spec.engine === "llamacpp" && spec.nodes > 1) {
      faults.push(`model ${spec.name}: llamacpp runs on one node (its ranks would talk in clear and run what they are sent)`);
    }
  }
  return faults;
}
