import * as v from "valibot";

/** A node id: host name without domain, VM name and certificate common name. */
export const NodeId = v.pipe(
  v.string(),
  v.regex(/^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$/, "a node id is 1-63 of a-z 0-9 -, not starting or ending with -"),
);
export type NodeId = v.InferOutput<typeof NodeId>;

/** A model's name in the catalog and in requests. No `:` (SGLang refuses it) and no `/` (it names folders). */
export const ModelName = v.pipe(
  v.string(),
  v.regex(/^[A-Za-z0-9]([A-Za-z0-9._-]{0,78}[A-Za-z0-9])?$/, "a model name is 1-80 of letters, digits, . _ -"),
);
export type ModelName = v.InferOutput<typeof ModelName>;

/** `<model>-<five of a-z0-9>`: one running copy of a model. */
export const ReplicaId = v.pipe(v.string(), v.regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,78}-[a-z0-9]{5}$/, "not a replica id"));
export type ReplicaId = v.InferOutput<typeof ReplicaId>;

/** 16 lower-case hex digits: one start of one rank. It also names the rank's folder and sockets on the node. */
export const AttemptId = v.pipe(v.string(), v.regex(/^[0-9a-f]{16}$/, "not an attempt id"));
export type AttemptId = v.InferOutput<typeof AttemptId>;

/** Engines that are programs of their own: nodes install them, or are told where they are. */
export const INSTALLABLE_KINDS = ["llamacpp", "vllm", "sglang"] as const;
export type InstallableKind = (typeof INSTALLABLE_KINDS)[number];

/** Engines llmgw knows; `sim` is part of it. The list is here because it crosses the wire; what each does is in `engines/`. */
export const ENGINE_KINDS = [...INSTALLABLE_KINDS, "sim"] as const;
export const EngineKind = v.picklist(ENGINE_KINDS);
export type EngineKind = v.InferOutput<typeof EngineKind>;

/** Who a certificate speaks for: the `O=llmgw:<role>` of its subject. */
export const ROLES = ["node", "server", "gateway", "admin", "viewer"] as const;
export const Role = v.picklist(ROLES);
export type Role = v.InferOutput<typeof Role>;

/** TCP ports for shims and rendezvous: below Linux's ephemeral range (32768-60999). */
export const FIRST_LEASED_PORT = 20000;
export const LAST_LEASED_PORT = 29999;
export const LeasedPort = v.pipe(v.number(), v.integer(), v.minValue(FIRST_LEASED_PORT), v.maxValue(LAST_LEASED_PORT));

/** Milliseconds since 1970 (UTC). */
export const TimeMs = v.pipe(v.number(), v.integer(), v.minValue(0));

export const Count = v.pipe(v.number(), v.integer(), v.minValue(0));
/** Bytes; safe integers reach 9 PB, more than any one machine holds. */
export const Bytes = v.pipe(v.number(), v.integer(), v.minValue(0), v.maxValue(Number.MAX_SAFE_INTEGER));
