/**
 * The admin API on the control listener (mutual TLS). Role viewer may GET, role admin everything. `ctl -o json`
 * prints these documents as they are. Times are milliseconds since 1970.
 *
 *   GET    /admin/v1/status                       StatusView
 *   GET    /admin/v1/nodes                        { items: NodeView[] }
 *   GET    /admin/v1/fabrics                      { items: FabricView[] }
 *   GET    /admin/v1/engines                      EngineList
 *   GET    /admin/v1/models                       { items: ModelView[] }
 *   GET    /admin/v1/replicas                     { items: ReplicaView[] }
 *   GET    /admin/v1/events?after=<id>&limit=<n>  { items: EventView[] }      newest last
 *   GET    /admin/v1/keys                         { items: KeyView[] }
 *   POST   /admin/v1/keys                         CreateKey -> CreatedKey     the key is shown this once
 *   DELETE /admin/v1/keys/<id>                    {}
 *   GET    /admin/v1/replicas/<id>/log?lines=N&rank=0&follow=1   text/plain
 *   POST   /admin/v1/nodes/<id>/intent            NodeWish -> {}              cordon, drain, and back
 *   DELETE /admin/v1/nodes/<id>?force=1           {}                          out of the fleet, certificates refused
 *   GET    /admin/v1/nodes/<id>/drain             { items: DrainStep[] }      what a drain would do
 *   POST   /admin/v1/nodes/<id>/engine-check      EngineCheckWish -> EngineCheck   may take minutes
 *   POST   /admin/v1/replicas/<id>/replace        ReplaceWish -> {}           another in its place, without an outage
 *   POST   /admin/v1/models/<name>/scale          ScaleWish -> {}             another number of replicas than the catalog's
 *   POST   /admin/v1/thaw                         {} -> {}                    vanished nodes are really gone
 *   GET    /admin/v1/plan                         { items: EventView[] }      what reading the catalog again would do
 *   POST   /admin/v1/reload                       ReloadAnswer                config and catalog
 *   POST   /admin/v1/revoke                       RevokeName -> {}
 */
import * as v from "valibot";
import { INSTALL_PHASES } from "./engine-release.ts";
import { ModelSpec } from "./catalog.ts";
import { ENGINE_KINDS, EngineKind, ModelName, NodeId, ReplicaId } from "./ids.ts";
import { Inventory } from "./inventory.ts";
import { PlanVersion } from "./plan.ts";

const items = <S extends v.GenericSchema>(item: S) => v.object({ items: v.array(item) });

export const NODE_STATES = ["ready", "suspect", "lost", "refused"] as const;

export const NodeView = v.object({
  id: NodeId,
  state: v.picklist(NODE_STATES),
  state_reason: v.string(),
  address: v.string(),
  agent_version: v.string(),
  last_seen_ms: v.number(),
  joined_ms: v.number(),
  /** Node's clock minus the server's, at the last message. */
  clock_offset_ms: v.number(),
  certificate_expires_ms: v.number(),
  /** Names of the fabrics it is on; empty = its own island. */
  fabrics: v.array(v.string()),
  island: v.string(),
  /** Why nothing new is placed here; "" when it is. */
  cordon: v.optional(v.string(), ""),
  drain: v.optional(v.nullable(v.object({ since_ms: v.number(), stop_first: v.boolean(), deadline_ms: v.nullable(v.number()) })), null),
  replicas: v.array(ReplicaId),
  inventory: Inventory,
});
export type NodeView = v.InferOutput<typeof NodeView>;
export const NodeList = items(NodeView);

/** Nodes that are on one physical fabric. */
export const FabricView = v.object({
  /** The fabric's name, with `#1`, `#2` while one name stands for several physical fabrics. */
  name: v.string(),
  /** Every name nodes declare it by. */
  declared: v.array(v.string()),
  nodes: v.array(NodeId),
  /** Port GUIDs of its subnet managers. */
  managers: v.array(v.string()),
  /** Whether a subnet manager proved that its nodes share it; else their word is believed. */
  proved: v.boolean(),
  warnings: v.array(v.object({ code: v.string(), subject: v.string(), text: v.string(), remedy: v.string() })),
});
export type FabricView = v.InferOutput<typeof FabricView>;
export const FabricList = items(FabricView);

export const ModelView = v.object({
  name: ModelName,
  engine: EngineKind,
  source: v.nullable(v.string()),
  wanted: v.number(),
  /** The catalog's number, and who wants another instead; empty = nobody. */
  catalog_replicas: v.number(),
  scaled_by: v.string(),
  ready: v.number(),
  nodes: v.number(),
  gpus: v.number(),
  /** Why it has fewer ready replicas than wanted; empty when it has them all. */
  reason: v.string(),
});
export type ModelView = v.InferOutput<typeof ModelView>;
export const ModelList = items(ModelView);

/** One engine of one node: what it uses, and how far it is with what the server names. */
export const EngineView = v.object({
  node: NodeId,
  engine: v.picklist(ENGINE_KINDS),
  /** Version that new replicas start; "" = this node offers none. */
  version: v.string(),
  origin: v.picklist(["path", "installed", "built in", "none"]),
  path: v.string(),
  features: v.array(v.string()),
  /** Version the server names; "" = none. */
  wanted: v.string(),
  /** How far the wanted one is; "" when none is wanted. */
  state: v.picklist(["", ...INSTALL_PHASES]),
  /** Why it is as it is. */
  reason: v.string(),
  next_try_ms: v.nullable(v.number()),
});
export type EngineView = v.InferOutput<typeof EngineView>;
export const EngineList = v.object({
  items: v.array(EngineView),
  /** What the server names, and why it does not know how that is installed; "" when it does. */
  wanted: v.array(v.object({ engine: v.picklist(ENGINE_KINDS), version: v.string(), reason: v.string() })),
});
export type EngineList = v.InferOutput<typeof EngineList>;

const REPLICA_STATES = ["pending", "fetching", "starting", "ready", "draining", "stopping", "failed", "gone"] as const;
export const ReplicaState = v.picklist(REPLICA_STATES);
export type ReplicaState = v.InferOutput<typeof ReplicaState>;

/** Why one node cannot take a replica: the filter, what it needs and what is there. */
export const Refusal = v.object({ node: NodeId, filter: v.string(), needed: v.string(), available: v.string() });
export type Refusal = v.InferOutput<typeof Refusal>;

export const ReplicaView = v.object({
  id: ReplicaId,
  model: ModelName,
  engine: v.picklist(ENGINE_KINDS),
  state: ReplicaState,
  since_ms: v.number(),
  reason: v.string(),
  failures: v.number(),
  next_try_ms: v.nullable(v.number()),
  /** When its state is given up unless it gets on; null for a state that may last. */
  deadline_ms: v.nullable(v.number()),
  ranks: v.array(
    v.object({
      rank: v.number(),
      node: NodeId,
      attempt: v.string(),
      address: v.string(),
      engine_pid: v.nullable(v.number()),
      /** System memory its engine holds, in bytes; null while it is not measured. */
      memory_used: v.nullable(v.number()),
      /** Memory in use on its GPUs together, in bytes; null without GPUs, or when they do not tell. */
      gpu_memory_used: v.nullable(v.number()),
    }),
  ),
  /** What each rank was counted to need, in bytes (0 = not known), and what the numbers are from. */
  memory: v.object({ system: v.number(), per_gpu: v.number(), basis: v.string() }),
  refusals: v.array(Refusal),
  in_flight: v.number(),
  /** The last lines of the engine that failed first. */
  last_lines: v.array(v.string()),
});
export type ReplicaView = v.InferOutput<typeof ReplicaView>;
export const ReplicaList = items(ReplicaView);

export const EventView = v.object({
  id: v.number(),
  at_ms: v.number(),
  level: v.picklist(["info", "warn", "error"]),
  /** Kebab-case, stable: `replica-ready`, `engine-died`, `node-joined`. */
  kind: v.string(),
  /** What it is about: `node/a`, `replica/x`, `model/y`, `key/z`, `server`. */
  subject: v.string(),
  text: v.string(),
});
export type EventView = v.InferOutput<typeof EventView>;
export const EventList = items(EventView);

export const KeyView = v.object({
  id: v.string(),
  name: v.string(),
  created_ms: v.number(),
  revoked_ms: v.nullable(v.number()),
});
export type KeyView = v.InferOutput<typeof KeyView>;
export const KeyList = items(KeyView);

export const CreateKey = v.strictObject({
  name: v.pipe(v.string(), v.regex(/^[A-Za-z0-9][A-Za-z0-9._@ -]{0,62}$/, "a key's name is 1-63 of letters, digits, . _ @ - and blanks")),
});
export const CreatedKey = v.object({ ...KeyView.entries, key: v.string() });
export type CreatedKey = v.InferOutput<typeof CreatedKey>;

/** What an operator wants of a node. `uncordon` takes both back. */
export const NodeWish = v.strictObject({
  wish: v.picklist(["cordon", "uncordon", "drain"]),
  /** Stop replicas before their replacements are ready. */
  stop_first: v.optional(v.boolean(), false),
  /** Stop them after this long, replaced or not; null = wait for ever. */
  within_ms: v.optional(v.nullable(v.pipe(v.number(), v.minValue(1))), null),
});
export type NodeWish = v.InferInput<typeof NodeWish>;

/** What becomes of one replica when its node drains. */
export const DrainStep = v.object({
  replica: ReplicaId,
  model: ModelName,
  state: ReplicaState,
  /** Nodes its replacement would go to; empty when there is no room, or it is not its turn yet. */
  to: v.array(NodeId),
  text: v.string(),
});
export type DrainStep = v.InferOutput<typeof DrainStep>;
export const DrainSteps = items(DrainStep);

export const EngineCheckWish = v.strictObject({ engine: EngineKind });

export const ReplaceWish = v.strictObject({ how: v.picklist(["restart", "move"]) });

/** Null = the catalog's number counts again. */
export const ScaleWish = v.strictObject({ replicas: v.nullable(ModelSpec.entries.replicas.wrapped) });
export type ScaleWish = v.InferInput<typeof ScaleWish>;

export const RevokeName = v.strictObject({ name: v.string() });
export const ReloadAnswer = v.object({ changed: v.array(v.string()) });

export const StatusView = v.object({
  server_version: v.string(),
  protocol: v.number(),
  started_ms: v.number(),
  now_ms: v.number(),
  plan: PlanVersion,
  nodes: v.object({ ready: v.number(), suspect: v.number(), lost: v.number() }),
  replicas: v.object({ wanted: v.number(), ready: v.number(), failed: v.number(), pending: v.number() }),
  gateway: v.object({ state: v.picklist(["serving", "unreachable"]), detail: v.string(), address: v.string(), in_flight: v.number() }),
  /** What an operator should look at, worst first. */
  warnings: v.array(v.object({ code: v.string(), subject: v.string(), text: v.string(), remedy: v.string() })),
});
export type StatusView = v.InferOutput<typeof StatusView>;
