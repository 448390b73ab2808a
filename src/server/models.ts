import type { ModelSpec, SizedModel } from "../protocol/catalog.ts";
import type { ModelName } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import type { ModelShape } from "../protocol/model-shape.ts";
import { sourceOf } from "../weights/source.ts";
import type { ModelScale } from "./store.ts";

/** What a node calls the weights of an entry in its inventory; null for an entry without weights. */
function nameOnNode(spec: ModelSpec): string | null {
  let name = NAMES.get(spec);
  if (name === undefined) NAMES.set(spec, (name = makeName(spec)));
  return name;
}

/** Names of entries that were asked for before, each with a digest to make: entries are never changed. */
const NAMES = new WeakMap<ModelSpec, string | null>();

function makeName({ source, sha256 }: ModelSpec): string | null {
  if (source === undefined) return null;
  const found = sourceOf({ source, ...(sha256 !== undefined && { sha256 }) });
  return found.kind === "path" ? found.path : found.key;
}

/** Paths of the catalog that every node is asked to look for. */
export function pathsOf(catalog: readonly ModelSpec[]): string[] {
  return [...new Set(catalog.flatMap(({ source }) => (source?.startsWith("/") ? [source] : [])))];
}

/** Sources that nodes keep, by what they call them. */
export function sourcesKept(catalog: readonly ModelSpec[], { weights = [] }: Inventory): string[] {
  const kept = new Set(weights.filter(({ fault }) => fault === "").map(({ name }) => name));
  return catalog.flatMap((spec) => (spec.source !== undefined && kept.has(nameOnNode(spec) ?? "") ? [spec.source] : []));
}

/**
 * The catalog's models with the numbers of replicas that operators want instead, and with what is known of their weights.
 * @param heads shapes by source, as read where they come from; where there is none, what a node says of them counts
 */
export function wantedModels(
  catalog: readonly ModelSpec[],
  scales: ReadonlyMap<ModelName, ModelScale>,
  heads: ReadonlyMap<string, ModelShape>,
  inventories: readonly Inventory[],
): SizedModel[] {
  const seen = new Map<string, ModelShape>();
  for (const { weights = [] } of inventories)
    for (const { name, shape } of weights) if (shape !== null && !seen.has(name)) seen.set(name, shape);
  return catalog.map((spec) => {
    const shape = heads.get(spec.source ?? "") ?? seen.get(nameOnNode(spec) ?? "");
    return { ...spec, replicas: scales.get(spec.name)?.replicas ?? spec.replicas, ...(shape && { shape }) };
  });
}
