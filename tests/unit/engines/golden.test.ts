import { describe, expect, test } from "bun:test";
import { mkdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { ENGINES, engineOf } from "../../../src/engines/registry.ts";
import type { EngineKind } from "../../../src/protocol/ids.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { inGang, inputOf } from "./launches.ts";

type Case = readonly [title: string, launch: Partial<RankLaunch>];

const GPU: Partial<RankLaunch> = { gpus: ["GPU-1"] };
const EIGHT: Partial<RankLaunch> = { gpus: Array.from({ length: 8 }, (_, index) => `GPU-${index}`) };
const ALONE: readonly Case[] = [
  ["one rank, no GPU", {}],
  ["one rank, one GPU, context and slots", { ...GPU, context: 4_096, parallel: 4 }],
  ["one rank, embeddings", { ...GPU, context: 8_192, embeddings: true }],
];
const GANG: readonly Case[] = [
  ["rank 0 of two, eight GPUs each", { ...EIGHT, ...inGang(0), context: 32_768 }],
  ["rank 1 of two, eight GPUs each", { ...EIGHT, ...inGang(1), context: 32_768 }],
];

const CASES: Readonly<Record<EngineKind, readonly Case[]>> = {
  llamacpp: [
    ...ALONE,
    ["context without slots", { context: 4_096 }],
    ["layers as given", { gpus: ["GPU-1", "GPU-2"], args: { "gpu-layers": 20 } }],
    ["embeddings otherwise", { embeddings: true, args: { pooling: "last", "ubatch-size": 512, "batch-size": 512 } }],
    ["args as given", { args: { "flash-attn": "on", threads: 8, "no-warmup": true, "context-shift": false } }],
  ],
  vllm: [
    ...ALONE,
    [
      "args as given",
      { ...GPU, args: { "max-model-len": 32_768, "enforce-eager": true, "gpu-memory-utilization": 0.8, "enable-lora": false } },
    ],
    ["one tensor group over all nodes", { ...EIGHT, ...inGang(0), args: { "tensor-parallel-size": 16 } }],
    ["experts over data parallel ranks", { ...EIGHT, args: { "data-parallel-size": 8, "enable-expert-parallel": true } }],
    ...GANG,
  ],
  sglang: [
    ...ALONE,
    ["args as given", { ...GPU, args: { "context-length": 32_768, "mem-fraction-static": 0.8, "trust-remote-code": true } }],
    ["a pipeline over the nodes", { ...EIGHT, ...inGang(0), args: { "pp-size": 2 } }],
    ["attention by data", { ...EIGHT, args: { "dp-size": 8, "enable-dp-attention": true } }],
    ...GANG,
  ],
  sim: [
    ["one rank, its switches as args", { args: { "load-ms": 5, hang: true } }],
    ["rank 0 of two", inGang(0)],
    ["rank 1 of two", inGang(1)],
  ],
};

/**
 * A command as a page: the environment it adds (behind the first case only what differs from that), the files it wants, then
 * one argument a line with its value.
 */
function page(kind: EngineKind): string {
  const usual = engineOf(kind).command(inputOf(kind, CASES[kind][0]?.[1])).env;
  const parts = CASES[kind].map(([title, launch], at) => {
    const { argv, env, files } = engineOf(kind).command(inputOf(kind, launch));
    const lines = argv.map((part, index) => (index === 0 || part.startsWith("-") ? `\n  ${part}` : ` ${part}`)).join("");
    const added = Object.entries(env)
      .filter(([name, value]) => at === 0 || usual[name] !== value)
      .map(([name, value]) => `\n  ${name}=${value}`);
    const read = files.map(({ path, text }) => `\n  0600 ${path}: ${text.trim()}`);
    return `# ${title}\n${added.join("")}${read.join("")}${lines}`;
  });
  return `${parts.join("\n\n")}\n`;
}

describe("the commands of each engine", () => {
  test.each(ENGINES.map(({ kind }) => kind))("%s is started as its golden file says", async (kind) => {
    const path = join(import.meta.dir, "golden", `${kind}.txt`);
    if (process.env["UPDATE_GOLDENS"] === "1") {
      await mkdir(dirname(path), { recursive: true });
      await writeFile(path, page(kind));
    }
    expect(page(kind)).toBe(await Bun.file(path).text());
  });
});
