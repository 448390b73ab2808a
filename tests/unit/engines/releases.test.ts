import { expect, test } from "bun:test";
import { chooseBuild, cudaFault, llamacppBuilds, readListing, uvBuilds, unsuited } from "../../../src/engines/releases.ts";
import type { Gpu } from "../../../src/protocol/inventory.ts";
import { inventoryOf } from "../core/fleet-for-tests.ts";

/** Names as llama.cpp's release b11173 has them; sizes and digests are made up. */
const NAMES = [
  "llama-b11173-bin-ubuntu-x64.tar.gz",
  "llama-b11173-bin-ubuntu-arm64.tar.gz",
  "llama-b11173-bin-ubuntu-s390x.tar.gz",
  "llama-b11173-bin-ubuntu-vulkan-x64.tar.gz",
  "llama-b11173-bin-ubuntu-cuda-12.8-x64.tar.gz",
  "llama-b11173-bin-ubuntu-cuda-13.4-x64.tar.gz",
  "llama-b11173-bin-ubuntu-cuda-13.4-arm64.tar.gz",
  "llama-b11173-bin-ubuntu-rocm-10.0-x64.tar.gz",
  "cudart-llama-b11173-bin-ubuntu-cuda-12.8-x64.tar.gz",
  "cudart-llama-b11173-bin-ubuntu-cuda-13.4-x64.tar.gz",
  "llama-b11173-bin-macos-arm64.tar.gz",
  "llama-b11173-bin-win-cpu-x64.zip",
];
const assetOf = (name: string, digest: string | null = `sha256:${"ab".repeat(32)}`) => ({
  name,
  size: 10,
  browser_download_url: `https://example/${name}`,
  ...(digest !== null && { digest }),
});
const LISTING = readListing({ tag_name: "b11173", assets: NAMES.map((name) => assetOf(name)), more: "is passed over" }, "b11173");
const BUILDS = llamacppBuilds(LISTING);

const gpu = (driver: string | null, capability: string | null): Gpu => {
  const [base] = inventoryOf({ id: "n", gpus: 1 }).gpus;
  if (!base) throw new Error("no GPU");
  return {
    ...base,
    driver: driver === null ? { absent: "" } : { value: driver },
    compute_capability: capability === null ? { absent: "" } : { value: capability },
  };
};
const machine = (arch: "x64" | "arm64", gpus: Gpu[]) => ({ host: { ...inventoryOf({ id: "n" }).host, arch }, gpus });

test("the builds for Linux, each with the runtime that belongs to it", () => {
  expect(BUILDS.map(({ arch, cuda, files }) => `${arch} ${cuda} ${files.length}`)).toEqual([
    "x64 null 1",
    "arm64 null 1",
    "x64 12.8 2",
    "x64 13.4 2",
    "arm64 13.4 1",
  ]);
});

test.each([
  ["no GPU: for the processor", machine("x64", []), null, ""],
  ["another processor", machine("arm64", []), null, ""],
  ["a new driver: the newest toolkit", machine("x64", [gpu("580.95.05", "9.0")]), "13.4", ""],
  ["an older driver: an older toolkit", machine("x64", [gpu("550.54", "9.0")]), "12.8", ""],
  ["an old GPU under a new driver", machine("x64", [gpu("580.95", "7.0")]), "12.8", ""],
  ["GPUs that tell nothing", machine("x64", [gpu(null, null)]), "13.4", ""],
  ["the oldest GPU decides", machine("x64", [gpu("580.95", "9.0"), gpu("580.95", "7.0")]), "12.8", ""],
  ["a driver older than any", machine("x64", [gpu("470.10", "8.0")]), null, "the build without GPUs: CUDA 13.4 needs driver 580 or later"],
] as const)("%s", (_name, has, cuda, reason) => {
  const chosen = chooseBuild(BUILDS, has);
  expect("build" in chosen && chosen.build.cuda).toBe(cuda);
  expect("build" in chosen && chosen.reason).toContain(reason);
  expect("build" in chosen && chosen.build.arch).toBe(has.host.arch);
});

test("no build for a processor is said", () => {
  const chosen = chooseBuild(
    BUILDS.filter(({ arch }) => arch === "x64"),
    machine("arm64", []),
  );
  expect(chosen).toEqual({ fault: "this version has no build for arm64" });
});

test("Python engines need a driver and a GPU that their wheels know", () => {
  expect(unsuited("vllm", machine("x64", []))).toBe("this node has no NVIDIA GPU");
  expect(unsuited("sglang", machine("x64", [gpu("570.1", "9.0")]))).toBe("CUDA 13.0 needs driver 580 or later, and there is 570.1");
  expect(unsuited("vllm", machine("x64", [gpu("580.1", "9.0")]))).toBe("");
  expect(unsuited("llamacpp", machine("x64", []))).toBe("");
  expect(cudaFault([gpu("999", "9.0")], "14.0")).toContain("CUDA 14.0 is newer than this llmgw");
});

test.each([
  ["no release", { tag_name: "b1" }, /lists no release/],
  ["no digest", { tag_name: "b1", assets: [assetOf("llama-b1-bin-ubuntu-x64.tar.gz", null)] }, /gives no sha256/],
  ["another digest", { tag_name: "b1", assets: [assetOf("llama-b1-bin-ubuntu-x64.tar.gz", "md5:abc")] }, /gives no sha256/],
  ["nothing for Linux", { tag_name: "b1", assets: [assetOf("llama-b1-bin-win-x64.zip")] }, /has no build for Linux/],
  ["an address that is none", { tag_name: "b1", assets: [{ ...assetOf("a"), browser_download_url: "javascript:1" }] }, /lists no release/],
])("a listing with %s is refused", (_name, document, words) => {
  expect(() => llamacppBuilds(readListing(document, "b1"))).toThrow(words);
});

test("a listing of another release than the one asked for is refused", () => {
  expect(() => readListing({ tag_name: "b2", assets: [] }, "b1")).toThrow(/b2, and not of b1/);
});

test("uv for both processors", () => {
  const names = ["uv-x86_64-unknown-linux-gnu.tar.gz", "uv-aarch64-unknown-linux-gnu.tar.gz"];
  const builds = uvBuilds(readListing({ tag_name: "0.1", assets: names.map((name) => assetOf(name)) }, "0.1"));
  expect(builds.map(({ arch, files }) => `${arch} ${files[0]?.name}`)).toEqual([`x64 ${names[0]}`, `arm64 ${names[1]}`]);
});
