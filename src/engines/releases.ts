import * as v from "valibot";
import type { Build, Recipe, ReleaseFile } from "../protocol/engine-release.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { Gpu, Inventory } from "../protocol/inventory.ts";

/** Versions of this release of llmgw, for a server whose configuration names none. Source: the projects' release pages, 2026-11. */
export const DEFAULT_VERSIONS = { llamacpp: "b11173", vllm: "0.33.0", sglang: "" } as const;
/** The installer of Python packages that goes with this release of llmgw. */
export const UV_VERSION = "0.13.8";

/** A release as its project's host lists it (GitHub REST API, releases). */
const Listing = v.object({
  tag_name: v.string(),
  assets: v.array(
    v.object({
      name: v.string(),
      size: v.pipe(v.number(), v.integer(), v.minValue(0)),
      browser_download_url: v.pipe(v.string(), v.regex(/^https?:\/\//)),
      digest: v.optional(v.nullable(v.string())),
    }),
  ),
});
export type Listing = v.InferOutput<typeof Listing>;

/** Reads the listing of the release that has this tag. @throws Error when it is none, or another's */
export function readListing(document: unknown, tag: string): Listing {
  const read = v.safeParse(Listing, document);
  if (!read.success) throw new Error(`the answer lists no release: ${read.issues[0].message}`);
  if (read.output.tag_name !== tag) throw new Error(`it is of ${read.output.tag_name}, and not of ${tag}`);
  return read.output;
}

/** The name of the one file by which a release of llama.cpp names the build it stands for. */
export const TAG_FILE = "nightly-tag.txt";

/** The file of a release by its name, with its digest. @throws Error when it has none */
function fileOf(listing: Listing, name: string): ReleaseFile {
  const asset = listing.assets.find((each) => each.name === name);
  if (!asset) throw new Error(`release ${listing.tag_name} has no ${name}`);
  const [, sha256] = /^sha256:([0-9a-f]{64})$/.exec(asset.digest ?? "") ?? [];
  if (sha256 === undefined) throw new Error(`release ${listing.tag_name} gives no sha256 of ${name}`);
  return { name, url: asset.browser_download_url, size: asset.size, sha256 };
}

/**
 * The builds for Linux that a release of llama.cpp has: for the processor, and for each CUDA toolkit with its runtime beside it.
 * @throws Error when it has none
 */
export function llamacppBuilds(listing: Listing): Build[] {
  const builds = listing.assets.flatMap(({ name }): Build[] => {
    const [, tag, cuda, arch] = /^llama-(\w+)-bin-ubuntu-(?:cuda-([\d.]+)-)?(x64|arm64)\.tar\.gz$/.exec(name) ?? [];
    if (tag === undefined || arch === undefined) return [];
    const runtime = cuda === undefined ? [] : [`cudart-llama-${tag}-bin-ubuntu-cuda-${cuda}-${arch}.tar.gz`];
    const there = runtime.filter((each) => listing.assets.some((asset) => asset.name === each));
    return [{ arch: arch as Build["arch"], cuda: cuda ?? null, files: [name, ...there].map((each) => fileOf(listing, each)) }];
  });
  if (builds.length === 0) throw new Error(`release ${listing.tag_name} has no build for Linux`);
  return builds;
}

/** The builds of `uv`. */
export function uvBuilds(listing: Listing): Build[] {
  const triples = { x64: "x86_64-unknown-linux-gnu", arm64: "aarch64-unknown-linux-gnu" } as const;
  return (["x64", "arm64"] as const).map((arch) => ({ arch, cuda: null, files: [fileOf(listing, `uv-${triples[arch]}.tar.gz`)] }));
}

/** What is to be installed of a Python engine. */
export function packagesRecipe(kind: "vllm" | "sglang", version: string, index: string | null, uv: readonly Build[]): Recipe {
  return { how: "packages", requirements: [`${kind}==${version}`], index, uv: [...uv] };
}

/** Oldest driver that runs programs of a CUDA toolkit, by its major number. Source: NVIDIA's CUDA compatibility guide. */
const OLDEST_DRIVER: Readonly<Record<number, number>> = { 11: 450, 12: 525, 13: 580 };
/** Oldest compute capability that CUDA 13 and the wheels of vLLM and SGLang know. */
const OLDEST_CAPABILITY = 7.5;

const numberOf = (reading: Gpu["driver"]): number | null => ("value" in reading ? Number.parseFloat(reading.value) : null);
const majorOf = (cuda: string): number => Math.floor(Number.parseFloat(cuda));

/** Why a node's GPUs cannot run programs of a CUDA toolkit; "" when they can, or nothing speaks against it. */
export function cudaFault(gpus: readonly Gpu[], cuda: string): string {
  if (gpus.length === 0) return "this node has no NVIDIA GPU";
  const oldest = OLDEST_DRIVER[majorOf(cuda)];
  if (oldest === undefined) return `CUDA ${cuda} is newer than this llmgw, which does not know what driver it needs`;
  for (const { name, driver, compute_capability } of gpus) {
    const has = numberOf(driver);
    if (has !== null && Math.floor(has) < oldest) return `CUDA ${cuda} needs driver ${oldest} or later, and there is ${has}`;
    const capability = numberOf(compute_capability);
    if (majorOf(cuda) >= 13 && capability !== null && capability < OLDEST_CAPABILITY)
      return `CUDA ${cuda} needs compute capability ${OLDEST_CAPABILITY}, and ${name} has ${capability}`;
  }
  return "";
}

/** A build for a node, or why there is none. */
type ChosenBuild = { readonly build: Build; readonly reason: string } | { readonly fault: string };

/**
 * The best build for a node: with the newest CUDA toolkit that its driver runs, else for its processor.
 * @returns `reason` says why it is not for the GPUs the node has; "" when it is, or it has none
 */
export function chooseBuild(builds: readonly Build[], { host, gpus }: Pick<Inventory, "host" | "gpus">): ChosenBuild {
  const fitting = builds.filter(({ arch }) => arch === host.arch);
  const newest = fitting.filter(({ cuda }) => cuda !== null).sort((a, b) => compareVersions(b.cuda ?? "", a.cuda ?? ""));
  const faults = newest.map(({ cuda }) => cudaFault(gpus, cuda ?? ""));
  const best = newest[faults.indexOf("")];
  if (best) return { build: best, reason: "" };
  const plain = fitting.find(({ cuda }) => cuda === null);
  if (!plain) return { fault: `this version has no build for ${host.arch}` };
  if (gpus.length === 0) return { build: plain, reason: "" };
  return { build: plain, reason: `the build without GPUs: ${faults[0] ?? `there is none with CUDA for ${host.arch}`}` };
}

function compareVersions(a: string, b: string): number {
  const [x, y] = [a, b].map((version) => version.split(".").map(Number)) as [number[], number[]];
  return (x[0] ?? 0) - (y[0] ?? 0) || (x[1] ?? 0) - (y[1] ?? 0);
}

/** Toolkit of the wheels that the package index has of vLLM since 0.20 and of SGLang since 0.5.20. */
const WHEEL_CUDA = "13.0";

/** Why a node cannot run what llmgw would install of an engine; "" when it can. */
export function unsuited(kind: EngineKind, { gpus }: Pick<Inventory, "gpus">): string {
  return kind === "vllm" || kind === "sglang" ? cudaFault(gpus, WHEEL_CUDA) : "";
}
