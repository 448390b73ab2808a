import { describe, expect, test } from "bun:test";
import { checkFlags, readHelp, type HelpFlag } from "../../../src/engines/help.ts";

const LLAMACPP = `ggml: loading backends
----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      threads, as --no-mmap is not a flag here
                                        (env: LLAMA_ARG_THREADS)
-fa,   --flash-attn [on|off|auto]       set Flash Attention
-lm,   --load-mode MODE                 how to read the file
-dev,  --device <dev1,dev2,..>          devices
--cpu-strict <0|1>                      strict placement
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        checkpoints per slot
-dt,   --defrag-thold N                 threshold (DEPRECATED)
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        another

----- sampling params -----

--temp N                                temperature

----- example-specific params -----

--host HOST                             address
--port PORT                             port
--gpt-oss-20b-default                   a preset
--spec-default                          a preset
`;

const VLLM = `INFO 11-02 10:00:00 loading
usage: vllm serve [model_tag] [options]

options:
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many; see --data-parallel-size. (default: None)
  --enable-log-requests, --no-enable-log-requests
                        Log requests.
  --grpc                A gRPC server.

ParallelConfig:
  --distributed-executor-backend {external_launcher,mp,ray,uni}
                        Backend.
  --nnodes NNODES, -n NNODES
                        Nodes.

VllmConfig:
  --optimization-level OPTIMIZATION_LEVEL
                        Level.

When passing JSON CLI arguments, the following sets of arguments are equivalent:
`;

const SGLANG = `usage: launch_server.py [-h] --model-path MODEL_PATH [--tp-size TP_SIZE]
                        [--tokenizer-mode {auto,slow}] [--disable-cuda-graph]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The weights.
  --tp-size TP_SIZE, --tensor-parallel-size TP_SIZE
                        Tensor parallel size.
  --tokenizer-mode {auto,slow}
                        Mode.
  --disable-cuda-graph  Deprecated. Use another.
`;

describe("readHelp", () => {
  test.each([
    ["llamacpp", LLAMACPP, "whole"],
    ["llamacpp", LLAMACPP.slice(0, LLAMACPP.indexOf("----- example")), "cut"],
    ["llamacpp", LLAMACPP.slice(0, LLAMACPP.indexOf("--gpt-oss")), "cut"],
    ["llamacpp", "bash: llama-server: command not found", "none"],
    ["vllm", VLLM, "whole"],
    ["vllm", VLLM.slice(0, VLLM.indexOf("VllmConfig")), "cut"],
    ["vllm", VLLM.slice(0, VLLM.indexOf("When passing")), "cut"],
    ["vllm", "usage: vllm serve\n\nConfig Groups:\n  options\n  Use `--help=all` to show all\n", "none"],
    ["vllm", "RuntimeError: Failed to infer device type, please set …", "none"],
    ["sglang", SGLANG, "whole"],
    ["sglang", SGLANG.slice(0, SGLANG.indexOf("  --tokenizer-mode")), "cut"],
    ["sglang", SGLANG.slice(0, SGLANG.indexOf("options:")), "cut"],
    ["sglang", "", "none"],
  ] as const)("%s text %#: %s", (kind, text, state) => {
    const help = readHelp(kind, text);
    expect(help.state).toBe(state);
    expect(help.reason === "").toBe(state === "whole");
  });

  test("a flag named in a description is not one the engine has", () => {
    expect(readHelp("llamacpp", LLAMACPP).flags.has("--no-mmap")).toBe(false);
    expect(readHelp("vllm", VLLM).flags.has("--data-parallel-size")).toBe(false);
  });

  test("all names of an option are known, with the value behind the last or each", () => {
    const flags = readHelp("llamacpp", LLAMACPP).flags;
    expect(flags.get("-ctxcp")).toBe(flags.get("--swa-checkpoints") as HelpFlag);
    expect(flags.get("--ctx-checkpoints")?.value).toBe("N");
    expect(readHelp("vllm", VLLM).flags.get("-n")?.value).toBe("NNODES");
  });
});

describe("checkFlags", () => {
  const llamacpp = readHelp("llamacpp", LLAMACPP);
  const cut = readHelp("llamacpp", LLAMACPP.slice(0, LLAMACPP.indexOf("----- example")));
  const vllm = readHelp("vllm", VLLM);
  const sglang = readHelp("sglang", SGLANG);

  test.each([
    [llamacpp, "--port", "1", "accepted"],
    [llamacpp, "--flash-attn", "on", "accepted"],
    [llamacpp, "--flash-attn", null, "bad-value"],
    [llamacpp, "--flash-attn", "yes", "bad-value"],
    [llamacpp, "--device", "CUDA0", "accepted"],
    [llamacpp, "--cpu-strict", "2", "bad-value"],
    [llamacpp, "--spec-default", "1", "bad-value"],
    [llamacpp, "--no-mmap", null, "missing"],
    [llamacpp, "--draft-max", "3", "removed"],
    [llamacpp, "--defrag-thold", "0.1", "deprecated"],
    [cut, "--port", "1", "unproved"],
    [cut, "--flash-attn", null, "bad-value"],
    [vllm, "--disable-log-requests", null, "missing"],
    [vllm, "--enable_log_requests", null, "accepted"],
    [vllm, "--distributed-executor-backend", "threads", "bad-value"],
    [sglang, "--pp", "2", "missing"],
    [sglang, "--disable-cuda-graph", null, "deprecated"],
    [sglang, "--tensor-parallel-size", "2", "accepted"],
  ] as const)("%# %s %s: %s", (help, flag, value, verdict) => {
    const [finding] = checkFlags(help, [{ name: flag, value }]);
    expect(finding?.verdict).toBe(verdict);
    expect(finding?.text === "").toBe(verdict === "accepted");
  });

  test("a renamed flag is answered with its new name, an unknown one with the nearest", () => {
    const text = (flag: string) => checkFlags(llamacpp, [{ name: flag, value: null }])[0]?.text;
    expect(text("--no-mmap")).toContain("--load-mode none");
    expect(text("--loading-mode")).toContain("--load-mode");
  });
});
