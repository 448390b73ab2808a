import type { SizedModel } from "../protocol/catalog.ts";
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
export function specKey(spec: SizedModel): string {
  let key = KEYS.get(spec);
  if (key === undefined) KEYS.set(spec, (key = makeKey(spec)));
  return key;
}

/** Keys of entries that were asked for before: entries are never changed. */
const KEYS = new WeakMap<SizedModel, string>();

function makeKey(spec: SizedModel): string {
  const { engine, source, sha256, size, nodes, gpus, context, parallel, embeddings } = spec;
  return JSON.stringify([ordered({ engine, source, sha256, size, nodes, gpus, context, parallel, embeddings }), ordered(spec.args)]);
}

/** The catalog entry a running attempt was started from, as far as its launch tells. */
export function specOfLaunch(launch: RankLaunch): SizedModel {
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

/** What a catalog says that cannot be served, one sentence each. */
export function catalogFaults(models: readonly SizedModel[]): string[] {
  const faults: string[] = [];
  for (const spec of models) {
    if (spec.engine !== "sim" && spec.source === undefined) faults.push(`model ${spec.name} has no source`);
    if (spec.engine === "llamacpp" && spec.nodes > 1) {
      faults.push(`model ${spec.name}: llamacpp runs on one node (its ranks would talk in clear and run what they are sent)`);
    }
  }
  return faults;
}
