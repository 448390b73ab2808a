import { describe, expect, test } from "bun:test";
import type { LaunchInput } from "../../../src/engines/engine.ts";
import { ENGINES, engineOf } from "../../../src/engines/registry.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";

const launch = (more: Partial<RankLaunch> = {}): RankLaunch => ({
  attempt: "0123456789abcdef",
  replica: "coder-abcde",
  model: "coder",
  rank: 0,
  ranks: 1,
  engine: "llamacpp",
  door: { address: "10.0.0.5", port: 20_001 },
  gpus: [],
  weights: null,
  context: null,
  parallel: null,
  embeddings: false,
  args: {},
  start_deadline_ms: 600_000,
  ...more,
});
const input = (more: Partial<RankLaunch> = {}): LaunchInput => ({
  launch: launch(more),
  program: ["/opt/engine"],
  weights_path: "/models/coder.gguf",
  socket: "/run/llmgw/r/0123456789abcdef.sock",
  folder: "/var/lib/llmgw/ranks/0123456789abcdef",
});

const BASE = "/opt/engine --model /models/coder.gguf --alias coder --host /run/llmgw/r/0123456789abcdef.sock";
const COMMON = "--metrics --offline --no-ui --log-colors off";

describe("llama.cpp's command", () => {
  test.each<[string, Partial<RankLaunch>, string, string]>([
    ["alone", {}, `${BASE} ${COMMON}`, ""],
    [
      "context per request, not shared among its slots",
      { context: 4_096, parallel: 4 },
      `${BASE} --ctx-size 16384 --parallel 4 ${COMMON}`,
      "",
    ],
    ["context without slots", { context: 4_096 }, `${BASE} --ctx-size 4096 ${COMMON}`, ""],
    ["its GPUs and no others", { gpus: ["GPU-1", "GPU-2"] }, `${BASE} ${COMMON} --n-gpu-layers all`, "GPU-1,GPU-2"],
    ["layers as given", { gpus: ["GPU-1"], args: { "gpu-layers": 20 } }, `${BASE} ${COMMON} --gpu-layers 20`, "GPU-1"],
    [
      "embeddings, of inputs as long as the context",
      { embeddings: true, context: 8_192 },
      `${BASE} --ctx-size 8192 ${COMMON} --embeddings --pooling mean --batch-size 8192 --ubatch-size 8192`,
      "",
    ],
    [
      "embeddings otherwise",
      { embeddings: true, args: { pooling: "last", "ubatch-size": 512, "batch-size": 512 } },
      `${BASE} ${COMMON} --embeddings --pooling last --ubatch-size 512 --batch-size 512`,
      "",
    ],
    [
      "args as given",
      { args: { "flash-attn": "on", threads: 8, "no-warmup": true, "context-shift": false } },
      `${BASE} ${COMMON} --flash-attn on --threads 8 --no-warmup`,
      "",
    ],
  ])("%s", (_what, more, command, devices) => {
    const { argv, env } = engineOf("llamacpp").command(input(more));
    expect(argv.join(" ")).toBe(command);
    expect(env).toEqual({ CUDA_VISIBLE_DEVICES: devices });
  });

  test("args may not set what llmgw owns", () => {
    for (const flag of engineOf("llamacpp").owned_flags) {
      expect(() => engineOf("llamacpp").command(input({ args: { [flag.slice(2)]: "x" } }))).toThrow(OperatorError);
    }
  });

  test("its version is read from what it prints", () => {
    const { readVersion } = engineOf("llamacpp");
    expect(readVersion("version: 0.7.0 (build 11669, commit Debian)\nbuilt with GNU 16")).toBe("0.7.0 (build 11669)");
    expect(readVersion("version: 6123 (a1b2c3d)")).toBe("6123");
    expect(readVersion("hello")).toBeNull();
  });

  test("a server that came up without its model is refused, a loading one is waited for", () => {
    const [health, props] = engineOf("llamacpp").probes;
    expect(health?.judge(503, "", "m")).toBe("loading");
    expect(health?.judge(0, "", "m")).toBe("loading");
    expect(health?.judge(200, "", "m")).toBe("ready");
    expect(props?.judge(200, JSON.stringify({ model_path: "/m.gguf", total_slots: 4 }), "m")).toBe("ready");
    expect(props?.judge(200, JSON.stringify({ role: "router", model_path: "none" }), "m")).toHaveProperty("failed");
    expect(props?.judge(200, "<html>", "m")).toHaveProperty("failed");
  });
});

test("the simulated engine is this very program, its switches are args", () => {
  const { argv } = engineOf("sim").command({
    ...input({ engine: "sim", args: { "load-ms": 5, hang: true } }),
    program: ["/usr/local/bin/llmgw"],
  });
  expect(argv.join(" ")).toBe(
    "/usr/local/bin/llmgw sim-engine --socket /run/llmgw/r/0123456789abcdef.sock --model coder --load-ms 5 --hang",
  );
});

describe("every engine", () => {
  test.each(ENGINES.map((engine) => [engine.kind, engine] as const))(
    "%s: listens only on its socket, and its stop order ends with SIGKILL for all",
    (_kind, engine) => {
      const { argv } = engine.command(input({ engine: engine.kind }));
      expect(argv).toContain("/run/llmgw/r/0123456789abcdef.sock");
      expect(argv).not.toContain("--port");
      expect(engine.stop.at(-1)).toMatchObject({ signal: "SIGKILL", to: "group" });
      expect(engine.stop.reduce((sum, step) => sum + step.wait_ms, 0)).toBeLessThan(30_000);
      for (const part of argv) if (part.startsWith("-")) expect(part).toStartWith("--");
    },
  );

  test("one that this build does not know is refused with what it knows", () => {
    expect(() => engineOf("vllm")).toThrow("vllm");
  });
});
