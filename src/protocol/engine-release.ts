import * as v from "valibot";
import { Bytes, EngineKind } from "./ids.ts";

const Url = v.pipe(v.string(), v.regex(/^https?:\/\/\S+$/, "an http(s) URL is needed"));
const Sha256 = v.pipe(v.string(), v.regex(/^[0-9a-f]{64}$/, "a sha256 is 64 lower-case hex digits"));
/** A version becomes the name of a folder. */
export const EngineVersion = v.pipe(v.string(), v.regex(/^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$/, "not a version"));

/** One archive to fetch, and how to know that it is right. */
export const ReleaseFile = v.object({ name: v.string(), url: Url, size: Bytes, sha256: Sha256 });
export type ReleaseFile = v.InferOutput<typeof ReleaseFile>;

/** One way in which a version was built: for which machines, and the archives that make it up, the program's first. */
export const Build = v.object({
  arch: v.picklist(["x64", "arm64"]),
  /** Toolkit it was built with, `13.4`; null for the processor alone. */
  cuda: v.nullable(v.pipe(v.string(), v.regex(/^\d+(\.\d+)?$/))),
  files: v.array(ReleaseFile),
});
export type Build = v.InferOutput<typeof Build>;

/** How a version comes onto a node. */
export const Recipe = v.variant("how", [
  v.object({ how: v.literal("archives"), builds: v.array(Build) }),
  v.object({
    how: v.literal("packages"),
    /** Python packages with their exact versions, `vllm==0.33.0`. */
    requirements: v.array(v.pipe(v.string(), v.regex(/^[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+$/))),
    /** Where they are from; null = where the installer looks by itself. */
    index: v.nullable(Url),
    /** The installer `uv`, per architecture; none = Python's own venv and pip. */
    uv: v.array(Build),
  }),
]);
export type Recipe = v.InferOutput<typeof Recipe>;

/** A version that nodes are to have of an engine. */
export const WantedEngine = v.object({
  kind: EngineKind,
  version: EngineVersion,
  /** Null while it is not known how it is installed. */
  recipe: v.nullable(Recipe),
  /** Why not; "" when it is. */
  reason: v.string(),
});
export type WantedEngine = v.InferOutput<typeof WantedEngine>;

export const INSTALL_PHASES = ["waiting", "fetching", "unpacking", "installing", "proving", "installed", "failed", "unsuited"] as const;

/** How far a node is with the wanted version of an engine. */
export const EngineInstall = v.object({
  kind: EngineKind,
  version: v.string(),
  /** `unsuited`: this machine cannot run it. */
  phase: v.picklist(INSTALL_PHASES),
  /** What it does, how far it is, or why it failed. */
  detail: v.string(),
  /** When a failed one is tried again; null = it is not. */
  next_try_ms: v.nullable(v.number()),
});
export type EngineInstall = v.InferOutput<typeof EngineInstall>;
