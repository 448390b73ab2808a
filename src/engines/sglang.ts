import { join } from "node:path";
import { ENGINE_START_MS, PROBE_MS } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf, argvOf, chosen, flag, wordsOf } from "./args.ts";
import type { Endpoint, Engine, EngineCommand, Flag, FlagRules, LaunchInput } from "./engine.ts";
import { samplesOf } from "./metrics.ts";
import { SERVES_MODEL } from "./served-model.ts";
import { layoutOf, PYTHON_ENV, PYTHON_SCRUB, pythonEnv, torchQuestion, type LayoutNames } from "./python.ts";

/** SGLang 0.5.19 and later: `python -m sglang.launch_server`, on loopback behind a key, since it serves on no unix socket. */

const RULES: FlagRules = {
  parser: "argparse",
  keyed: { "--context-length": "context", "--max-running-requests": "parallel" },
  whole: ["--log-level"],
  owned: wordsOf(
    "--model-path --model --served-model-name --config --is-embedding --download-dir",
    "--host --port --fastapi-root-path --api-key --admin-api-key --grpc-mode --smg-grpc-mode",
    "--smg-http-sidecar-port --grpc-http-sidecar-port",
    "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-keyfile-password --enable-ssl-refresh",
    "--nnodes --node-rank --dist-init-addr --nccl-init-addr --nccl-port --dist-timeout",
    "--engine-info-bootstrap-port --base-gpu-id --gpu-id-step",
    // A server that only prefills or only decodes needs a partner, which llmgw does not place.
    "--disaggregation-mode --disaggregation-bootstrap-port --encoder-bootstrap-port --encoder-only --language-only",
    "--enable-metrics --log-level-http",
    // Prompts and answers are in no log.
    "--log-requests --log-requests-level --log-requests-format --log-requests-target --crash-dump-folder",
    "--help -h --version",
  ),
};

const SIZES: LayoutNames = {
  tensor: ["--tp-size", "--tensor-parallel-size"],
  pipeline: ["--pp-size", "--pipeline-parallel-size"],
  // With attention spread by `--enable-dp-attention` the data size divides the tensor size and takes no GPUs of its own.
  data: [],
};

function sizes(launch: RankLaunch): LayoutNames {
  return launch.args["enable-dp-attention"] === true ? SIZES : { ...SIZES, data: ["--dp-size", "--data-parallel-size"] };
}

/** Tensor parallelism over all GPUs of all nodes: a pipeline takes overlapped scheduling away. */
function layoutFlags(launch: RankLaunch): Flag[] {
  const { args, gpus, ranks } = launch;
  const { tensor, pipeline } = layoutOf(launch, sizes(launch), Math.max(1, gpus.length) * ranks);
  return [
    ...chosen(args, ["--tp-size", "--tensor-parallel-size"], tensor),
    ...(pipeline > 1 ? chosen(args, ["--pp-size", "--pipeline-parallel-size"], pipeline) : []),
  ];
}

function gangFlags({ rank, ranks, gang }: RankLaunch): Flag[] {
  if (!gang) return [];
  const { address, port } = gang.master;
  const host = address.includes(":") ? `[${address}]` : address;
  return [
    flag("--nnodes", ranks),
    flag("--node-rank", rank),
    flag("--dist-init-addr", `${host}:${port}`),
    flag("--dist-timeout", ENGINE_START_MS / 1_000),
  ];
}

function portFlags(endpoint: Endpoint): Flag[] {
  if (endpoint.kind === "socket") return [];
  const [nccl = 0, info = 0] = endpoint.spare_ports;
  // Those it does not get it takes at a fixed number or by chance, and a second one on the node finds them taken.
  return [
    flag("--host", "127.0.0.1"),
    flag("--port", endpoint.port),
    flag("--nccl-port", nccl),
    flag("--engine-info-bootstrap-port", info),
  ];
}

function command(input: LaunchInput): EngineCommand {
  const { launch, program, weights_path, endpoint, folder } = input;
  const { model, context, parallel, embeddings } = launch;
  const key_file = join(folder, "key.yaml");
  const flags = [
    flag("--model-path", weights_path ?? ""),
    flag("--served-model-name", model),
    ...portFlags(endpoint),
    flag("--config", key_file),
    flag("--enable-metrics"),
    flag("--log-level-http", "warning"),
    ...(context === null ? [] : [flag("--context-length", context)]),
    ...(parallel === null ? [] : [flag("--max-running-requests", parallel)]),
    ...(embeddings ? [flag("--is-embedding")] : []),
    ...layoutFlags(launch),
    ...gangFlags(launch),
    ...argsOf({ kind: "sglang", rules: RULES }, launch),
  ];
  const env = {
    ...pythonEnv(input),
    // Its health would make a token each time it is asked.
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION: "0",
    // Its own limit ends before that of the question.
    SGLANG_HEALTH_CHECK_TIMEOUT: String(PROBE_MS / 1_000 - 5),
    ...(launch.gang && { SGLANG_HOST_IP: launch.door.address }),
  };
  const files = endpoint.kind === "loopback" ? [{ path: key_file, text: `api-key: ${endpoint.key}\n` }] : [];
  return { argv: [...program, "-m", "sglang.launch_server", ...argvOf(flags)], flags, env, files };
}

const STRANGER = { failed: "it does not know the key of this attempt: another program may have its port" };

/** Tokens are counted when an answer is whole; the others move while it is made. */
const MOVING = wordsOf(
  "sglang:prompt_tokens_total sglang:generation_tokens_total sglang:realtime_tokens_total",
  "sglang:inter_token_latency_seconds_count sglang:num_used_tokens sglang:gen_throughput",
);

export const sglang: Engine = {
  kind: "sglang",
  scrub: PYTHON_SCRUB,
  rules: RULES,
  needs_weights: true,
  gangs: true,
  listens: "loopback",
  spare_ports: 2,
  caches: true,
  telling_args: [{ "tp-size": 8 }],
  command,
  probes: [
    { path: "/health", judge: (status) => (status === 200 ? "ready" : "loading") },
    { ...SERVES_MODEL, judge: (status, body, model) => (status === 401 ? STRANGER : SERVES_MODEL.judge(status, body, model)) },
    // One token: the schedulers of all ranks work.
    { path: "/health_generate", judge: (status) => (status === 200 ? "ready" : "loading") },
  ],
  vitals: {
    path: "/metrics",
    read: (metrics) => samplesOf(metrics, MOVING),
  },
  // Its schedulers are killed with it: they outlive a parent that was killed alone (sglang #23627).
  stop: [
    { signal: "SIGTERM", to: "leader", wait_ms: 15_000 },
    { signal: "SIGKILL", to: "group", wait_ms: 5_000 },
  ],
  // Read from what is installed: to import it takes half a minute.
  version_args: ["-c", "from importlib.metadata import version; print('sglang', version('sglang'))"],
  readVersion: (output) => /^sglang (\d\S*)$/m.exec(output)?.[1] ?? null,
  accelerator: torchQuestion((program) => program),
  help: { args: ["-m", "sglang.launch_server", "--help"], env: PYTHON_ENV, trial_args: null },
  isProgress: (line) => /Load weight|Loading .*shards|Capturing|Capture cuda graph|Memory pool|KV Cache|\d+%\|/i.test(line),
};
