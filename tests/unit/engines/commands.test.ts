import { describe, expect, test } from "bun:test";
import { argFaults } from "../../../src/engines/args.ts";
import { ENGINES, engineOf } from "../../../src/engines/registry.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import type { EngineKind } from "../../../src/protocol/ids.ts";
import { inGang, inputOf } from "./launches.ts";

describe("every engine", () => {
  test.each(ENGINES.map((engine) => [engine.kind, engine] as const))(
    "%s: listens only where it is told, by long flags, and its stop order ends with SIGKILL for all",
    (kind, engine) => {
      for (const more of [{}, ...(engine.gangs ? [inGang(0)] : [])]) {
        const { argv } = engine.command(inputOf(kind, more));
        if (engine.listens === "socket") {
          expect(argv).toContain("/run/llmgw/r/0123456789abcdef/e.sock");
          expect(argv).not.toContain("--port");
        } else expect(argv.join(" ")).toContain("--host 127.0.0.1 --port 20003");
        for (const part of argv.slice(argv.indexOf("-m") + 1)) if (part.startsWith("-")) expect(part).toStartWith("--");
        expect(argv.join(" ")).not.toContain("the-key-of-this-attempt");
      }
      expect(engine.stop.at(-1)).toMatchObject({ signal: "SIGKILL", to: "group" });
      expect(engine.stop.reduce((sum, step) => sum + step.wait_ms, 0)).toBeLessThan(30_000);
    },
  );

  test("args may not set what llmgw owns, by any of its names", () => {
    for (const { kind, rules } of ENGINES) {
      for (const name of rules.owned) {
        const key = name.replace(/^--?/, "");
        expect(() => engineOf(kind).command(inputOf(kind, { args: { [key]: "x" } }))).toThrow(OperatorError);
      }
    }
  });

  test.each<[EngineKind, string, string | number | boolean]>([
    ["llamacpp", "host", "0.0.0.0"],
    ["llamacpp", "m", "/etc/passwd"],
    ["llamacpp", "no-warmup", "--rpc"],
    ["llamacpp", "threads", "-m"],
    ["vllm", "hos", "0.0.0.0"],
    ["vllm", "por", 80],
    ["vllm", "master_addr", "10.0.0.9"],
    ["vllm", "uds=/tmp/x", true],
    ["vllm", "--port", 80],
    ["vllm", "api", "secret"],
    ["vllm", "data-parallel-size-l", 2],
    ["vllm", "n", 3],
    ["sglang", "mod", "/etc"],
    ["sglang", "log-req", true],
    ["sglang", "dist-init", "10.0.0.9:1"],
    ["sglang", "nccl-p", 1],
  ])("%s: no way round by %s = %s", (kind, key, value) => {
    expect(argFaults(engineOf(kind), { args: { [key]: value }, context: null, parallel: null })).toHaveLength(1);
  });

  test.each<[EngineKind, string, string | number | boolean]>([
    ["llamacpp", "threads", 8],
    ["llamacpp", "seed", -1],
    ["llamacpp", "lora-scaled", "a:0.5"],
    ["vllm", "data-parallel-size", 2],
    ["vllm", "max-model-len", 1024],
    ["vllm", "tokenizer", "/models/other"],
    ["vllm", "hf-overrides", '{"a": -1}'],
    ["sglang", "dp-size", 2],
    ["sglang", "enable-metrics-for-all-schedulers", true],
  ])("%s: %s = %s is the operator's", (kind, key, value) => {
    expect(argFaults(engineOf(kind), { args: { [key]: value }, context: null, parallel: null })).toEqual([]);
  });

  test("where a parser takes beginnings for names, every beginning of what llmgw owns is refused", () => {
    for (const { kind, rules } of ENGINES.filter((engine) => engine.rules.parser === "argparse")) {
      for (const name of rules.owned.filter((each) => each.startsWith("--"))) {
        for (let length = 3; length <= name.length; length += 1) {
          const start = name.slice(0, length).replace(/-$/, "");
          const faults = argFaults(engineOf(kind), { args: { [start.slice(2)]: 1 }, context: null, parallel: null });
          expect([start, faults.length]).toEqual([start, rules.whole.includes(start) ? 0 : 1]);
        }
      }
    }
  });

  test("what a key of the catalog says is not said again by args", () => {
    const both = { args: { "max-model-len": 1 }, context: 4_096, parallel: null };
    expect(argFaults(engineOf("vllm"), both)).toEqual(["args may not set max-model-len beside context, which says the same"]);
    expect(argFaults(engineOf("sglang"), { args: { "max-running-requests": 1 }, context: null, parallel: 3 })).toHaveLength(1);
  });

  test("in Python's engines no value of args can become a flag", () => {
    for (const kind of ["vllm", "sglang"] as const) {
      const { argv } = engineOf(kind).command(inputOf(kind, { args: { "enforce-eager": "--host" } }));
      expect(argv).toContain("--enforce-eager=--host");
      expect(argv.filter((part) => part === "--host")).toHaveLength(kind === "sglang" ? 1 : 0);
    }
  });
});

describe("layout over GPUs", () => {
  const gpus = ["a", "b", "c", "d"];
  test.each<[EngineKind, Record<string, number>, string]>([
    ["vllm", {}, "--tensor-parallel-size 4 --pipeline-parallel-size 2"],
    ["vllm", { "pipeline-parallel-size": 4 }, "--tensor-parallel-size 2"],
    ["vllm", { "tensor-parallel-size": 8 }, "--distributed-executor-backend"],
    ["sglang", {}, "--tp-size 8"],
    ["sglang", { "pp-size": 2 }, "--tp-size 4"],
    ["sglang", { "tensor-parallel-size": 4 }, "--pp-size 2"],
  ])("%s with %j", (kind, args, said) => {
    expect(
      engineOf(kind)
        .command(inputOf(kind, { ...inGang(0), gpus, args }))
        .argv.join(" "),
    ).toContain(said);
  });

  test("sizes that do not use every GPU are refused with the numbers", () => {
    const command = (args: Record<string, number>) => () => engineOf("vllm").command(inputOf("vllm", { ...inGang(0), gpus, args }));
    expect(command({ "tensor-parallel-size": 3 })).toThrow("cannot cut");
    expect(command({ "tensor-parallel-size": 4, "pipeline-parallel-size": 4 })).toThrow(OperatorError);
  });
});

describe("versions", () => {
  test.each<[EngineKind, string, string | null]>([
    ["llamacpp", "version: 0.7.0 (build 11669, commit Debian)\nbuilt with GNU 16", "0.7.0 (build 11669)"],
    ["llamacpp", "version: 6123 (a1b2c3d)", "6123"],
    ["llamacpp", "hello", null],
    ["vllm", "INFO 11-02 10:00:00 [__init__.py:216] Automatically detected platform cuda.\n0.33.0+cu130\n", "0.33.0+cu130"],
    ["vllm", "vllm 0.30.1", "0.30.1"],
    ["vllm", "Traceback (most recent call last):", null],
    ["sglang", "sglang 0.5.23\n", "0.5.23"],
    ["sglang", "PackageNotFoundError: No package metadata was found for sglang", null],
  ])("%s: %j", (kind, output, version) => {
    expect(engineOf(kind).readVersion(output)).toBe(version);
  });
});

describe("probes", () => {
  test("llama.cpp: a server that came up without its model is refused, a loading one is waited for", () => {
    const [health, props] = engineOf("llamacpp").probes;
    expect(health?.judge(503, "", "m")).toBe("loading");
    expect(health?.judge(0, "", "m")).toBe("loading");
    expect(health?.judge(200, "", "m")).toBe("ready");
    expect(props?.judge(200, JSON.stringify({ model_path: "/m.gguf", total_slots: 4 }), "m")).toBe("ready");
    expect(props?.judge(200, JSON.stringify({ role: "router", model_path: "none" }), "m")).toHaveProperty("failed");
    expect(props?.judge(200, "<html>", "m")).toHaveProperty("failed");
  });

  test("SGLang: an API that does not take the attempt's key is another program's", () => {
    const models = engineOf("sglang").probes[1];
    expect(models?.judge(401, "", "m")).toHaveProperty("failed");
    expect(models?.judge(503, "", "m")).toBe("loading");
    const list = (id: string) => JSON.stringify({ data: [{ id }] });
    expect(models?.judge(200, list("m"), "m")).toBe("ready");
    expect(models?.judge(200, list("other"), "m")).toHaveProperty("failed");
  });
});

describe("vitals", () => {
  const VLLM = `# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="coder"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="coder"} 0.01
vllm:prompt_tokens_total{engine="0",model_name="coder"} 12.0
vllm:generation_tokens_total{engine="0",model_name="coder"} 40.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="coder"} 40.0
vllm:iteration_tokens_total_count{engine="0",model_name="coder"} 41.0
`;
  const SGLANG = `sglang:num_running_reqs{model_name="coder",tp_rank="0"} 1.0
sglang:num_used_tokens{model_name="coder",tp_rank="0"} 512.0
sglang:gen_throughput{model_name="coder",tp_rank="0"} 40.0
sglang:generation_tokens_total{model_name="coder"} 7.0
`;
  const LLAMACPP = `llamacpp:requests_processing 1
llamacpp:n_decode_total 99
llamacpp:tokens_predicted_total 12
`;
  const SIM = "sim:requests_running 1\nsim:generated_tokens_total 5\n";
  test.each<[EngineKind, string, string, string]>([
    [
      "vllm",
      VLLM,
      'generation_tokens_total{engine="0",model_name="coder"} 40.0',
      'num_requests_running{engine="0",model_name="coder"} 1.0',
    ],
    ["vllm", VLLM, 'iteration_tokens_total_count{engine="0",model_name="coder"} 41.0', 'le="1.0",model_name="coder"} 40.0'],
    ["sglang", SGLANG, 'num_used_tokens{model_name="coder",tp_rank="0"} 512.0', 'num_running_reqs{model_name="coder",tp_rank="0"} 1.0'],
    ["llamacpp", LLAMACPP, "n_decode_total 99", "requests_processing 1"],
    ["sim", SIM, "generated_tokens_total 5", "requests_running 1"],
  ])("%s: a step is progress, a request that waits is not", (kind, metrics, step, waiting) => {
    const { read } = engineOf(kind).vitals;
    const with_more = (part: string) => metrics.replace(part, part.replace(/[\d.]+$/, "1000"));
    expect(read(metrics)).not.toBeNull();
    expect(with_more(step)).not.toBe(metrics);
    expect(read(with_more(step))).not.toBe(read(metrics));
    expect(with_more(waiting)).not.toBe(metrics);
    expect(read(with_more(waiting))).toBe(read(metrics));
    expect(read("# nothing of this engine\nprocess_cpu_seconds_total 4\n")).toBeNull();
  });
});
