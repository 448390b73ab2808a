import * as v from "valibot";
import { CheckResult } from "./doctor.ts";
import { EngineInstall } from "./engine-release.ts";
import { Bytes, Count, EngineKind } from "./ids.ts";
import { ModelShape } from "./model-shape.ts";

/** A reading that may be missing: the value, or why there is none. */
function reading<S extends v.GenericSchema>(value: S) {
  return v.union([v.object({ value }), v.object({ absent: v.string() })]);
}

export const Gpu = v.object({
  index: Count,
  uuid: v.string(),
  name: v.string(),
  memory_total: reading(Bytes),
  /** In use now, by anyone. */
  memory_used: reading(Bytes),
  driver: reading(v.string()),
  compute_capability: reading(v.string()),
  pci_bus_id: reading(v.string()),
});
export type Gpu = v.InferOutput<typeof Gpu>;

/** An engine found on the node. Only `offered` ones are used by the planner. */
export const EngineOffer = v.object({
  kind: EngineKind,
  version: v.string(),
  /** Absolute path of the program, or "built in". */
  path: v.string(),
  origin: v.picklist(["path", "installed", "built in"]),
  offered: v.boolean(),
  /** Why it is not offered; empty when it is. */
  reason: v.string(),
  /** Why it is used and not what was asked for, or not as it could be; absent when there is nothing to say. */
  note: v.optional(v.string()),
  /** What the program calls itself, when that is more than its version. */
  build: v.optional(v.string()),
  /** What this build can: `cuda`, `rpc`. */
  features: v.optional(v.array(v.string())),
});
export type EngineOffer = v.InferOutput<typeof EngineOffer>;

/** One InfiniBand port of a node and what is known of its fabric. */
export const FabricPort = v.object({
  device: v.string(),
  port: Count,
  /** GUID of the port, `0x` and 16 hex digits; null when none can be read. */
  guid: v.nullable(v.string()),
  /** Name of the fabric it was declared on; "" when on none. */
  fabric: v.string(),
  /** Why it cannot carry a fabric; "" when it can. */
  excluded: v.string(),
  state: v.nullable(v.string()),
  rate_gbps: v.nullable(v.number()),
  /** NUMA node; null = unknown. */
  numa: v.nullable(v.number()),
  /** Port GUIDs of the subnet managers of the last answer; empty = none ever answered. */
  managers: v.array(v.string()),
  /** GUIDs of the fabric's switches, as far as they were asked. */
  switches: v.array(v.string()),
  answered_ms: v.nullable(v.number()),
  /** Whether the newest question was answered. */
  answering: v.boolean(),
});
export type FabricPort = v.InferOutput<typeof FabricPort>;

/** Weights a node was asked to look for, or keeps. */
export const WeightsSeen = v.object({
  /** The path that it was asked about, or its own name for what it has fetched. */
  name: v.string(),
  /** Why an engine cannot use them; "" when it can. */
  fault: v.string(),
  /** What their header says; null when that cannot be read. */
  shape: v.nullable(ModelShape),
});
export type WeightsSeen = v.InferOutput<typeof WeightsSeen>;

const Warning = v.object({ code: v.string(), text: v.string() });

/** What a node is and has, as its agent last saw it. */
export const Inventory = v.object({
  host: v.object({
    hostname: v.string(),
    arch: v.picklist(["x64", "arm64"]),
    os: v.string(),
    kernel: v.string(),
    cpu_model: v.string(),
    /** Of avx, avx2, avx512f, fma, sse4_2, f16c, bmi2 (x64) or asimd, sve, i8mm (arm64). */
    cpu_features: v.array(v.string()),
    cores: Count,
  }),
  memory: v.object({ total: Bytes, available: Bytes }),
  /** The file system of the state directory. */
  disk: v.object({ path: v.string(), total: Bytes, free: Bytes }),
  gpus: v.array(Gpu),
  /** InfiniBand ports; absent from agents that do not look for them. */
  ports: v.optional(v.array(FabricPort)),
  engines: v.array(EngineOffer),
  /** How far it is with the versions the server names; absent from agents that install none. */
  installs: v.optional(v.array(EngineInstall)),
  /** Absent from agents that do not look for weights. */
  weights: v.optional(v.array(WeightsSeen)),
  warnings: v.array(Warning),
  /** What doctor found last, without the checks that do not apply; absent until it has run. */
  doctor: v.optional(v.object({ at_ms: v.number(), checks: v.array(CheckResult) })),
});
export type Inventory = v.InferOutput<typeof Inventory>;
