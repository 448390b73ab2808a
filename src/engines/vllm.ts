import { dirname, join } from "node:path";
import { ENGINE_SHUTDOWN_MS } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf, argvOf, chosen, flag, wordsOf } from "./args.ts";
import type { Engine, EngineCommand, Flag, FlagRules, LaunchInput } from "./engine.ts";
import { samplesOf } from "./metrics.ts";
import { SERVES_MODEL } from "./served-model.ts";
import { layoutOf, PYTHON_ENV, PYTHON_SCRUB, pythonEnv, torchQuestion, type LayoutNames } from "./python.ts";

/** vLLM 0.30 and later: `vllm serve`, several nodes by its own multiprocessing (no Ray). */

const RULES: FlagRules = {
  parser: "argparse",
  keyed: { "--max-model-len": "context", "--max-num-seqs": "parallel" },
  whole: ["--data-parallel-size"],
  owned: wordsOf(
    "--model --served-model-name --config --runner --download-dir --hf-token",
    "--host --port --uds --root-path --api-key --grpc --headless",
    "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers",
    "--enable-ssl-refresh --no-enable-ssl-refresh",
    "--nnodes -n --node-rank -r --master-addr --master-port --distributed-executor-backend",
    // Data parallelism inside a node is the operator's to choose; what spreads it over nodes is not offered.
    "--data-parallel-address -dpa --data-parallel-backend -dpb --data-parallel-rpc-port -dpp",
    "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-size-local -dpl",
    "--data-parallel-external-lb --no-data-parallel-external-lb -dpe",
    "--data-parallel-hybrid-lb --no-data-parallel-hybrid-lb -dph",
    "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port",
    "--device-ids --shutdown-timeout --uvicorn-log-level --log-config-file",
    // Prompts and answers are in no log.
    "--enable-log-requests --no-enable-log-requests --enable-log-outputs --no-enable-log-outputs",
    "--enable-log-deltas --no-enable-log-deltas",
    // Whether it is alive is read from them.
    "--disable-log-stats",
    "--help -h --version -v",
  ),
};

const SIZES: LayoutNames = {
  tensor: ["--tensor-parallel-size"],
  pipeline: ["--pipeline-parallel-size"],
  data: ["--data-parallel-size"],
};

function gangFlags({ rank, ranks, gang }: RankLaunch): Flag[] {
  if (!gang) return [];
  const { address, port } = gang.master;
  return [
    flag("--nnodes", ranks),
    flag("--node-rank", rank),
    flag("--master-addr", address),
    flag("--master-port", port),
    ...(rank > 0 ? [flag("--headless")] : []),
  ];
}

/** Tensor parallelism within a node, where the links are fast; a pipeline over the nodes. */
function layoutFlags(launch: RankLaunch): Flag[] {
  const { args, gpus, ranks } = launch;
  const { tensor, pipeline } = layoutOf(launch, SIZES, Math.max(1, gpus.length));
  const backend = gpus.length * ranks > 1 ? [flag("--distributed-executor-backend", "mp")] : [];
  return [
    ...chosen(args, ["--tensor-parallel-size"], tensor),
    ...(pipeline > 1 ? chosen(args, ["--pipeline-parallel-size"], pipeline) : []),
    ...backend,
  ];
}

/** What serves: rank 0 alone does. */
function servingFlags({ model, embeddings, context, parallel, rank }: RankLaunch, socket: string): Flag[] {
  const door = [flag("--uds", socket), flag("--uvicorn-log-level", "warning")];
  return [
    ...(rank === 0 ? door : []),
    flag("--served-model-name", model),
    flag("--shutdown-timeout", ENGINE_SHUTDOWN_MS / 1_000),
    ...(context === null ? [] : [flag("--max-model-len", context)]),
    ...(parallel === null ? [] : [flag("--max-num-seqs", parallel)]),
    ...(embeddings ? [flag("--runner", "pooling")] : []),
  ];
}

function command(input: LaunchInput): EngineCommand {
  const { launch, program, weights_path, endpoint, cache } = input;
  const socket = endpoint.kind === "socket" ? endpoint.path : "";
  const flags = [
    ...servingFlags(launch, socket),
    ...layoutFlags(launch),
    ...gangFlags(launch),
    ...argsOf({ kind: "vllm", rules: RULES }, launch),
  ];
  const env = {
    ...pythonEnv(input),
    VLLM_NO_USAGE_STATS: "1",
    VLLM_CACHE_ROOT: `${cache}/vllm`,
    // Its processes meet on sockets whose paths have to be short.
    VLLM_RPC_BASE_PATH: dirname(socket),
    // llmgw's own deadline ends what does not start; this one knows nothing of progress.
    VLLM_ENGINE_READY_TIMEOUT_S: "86400",
  };
  return { argv: [...program, "serve", weights_path ?? "", ...argvOf(flags)], flags, env, files: [] };
}

/** The last one counts the engine's steps, whatever becomes of them. */
const MOVING = wordsOf("vllm:generation_tokens_total vllm:prompt_tokens_total vllm:iteration_tokens_total_count");

export const vllm: Engine = {
  kind: "vllm",
  scrub: PYTHON_SCRUB,
  rules: RULES,
  needs_weights: true,
  gangs: true,
  listens: "socket",
  spare_ports: 0,
  caches: true,
  telling_args: [],
  command,
  probes: [{ path: "/health", judge: (status) => (status === 200 ? "ready" : "loading") }, SERVES_MODEL],
  vitals: {
    path: "/metrics",
    read: (metrics) => samplesOf(metrics, MOVING),
  },
  // Its workers are killed with it: some outlive a parent that was killed alone (vllm #55510).
  stop: [
    { signal: "SIGTERM", to: "leader", wait_ms: ENGINE_SHUTDOWN_MS + 10_000 },
    { signal: "SIGKILL", to: "group", wait_ms: 5_000 },
  ],
  version_args: ["--version"],
  readVersion: (output) => /^(?:vllm )?(\d+\.\d+\S*)$/m.exec(output)?.[1] ?? null,
  accelerator: torchQuestion((program) => join(dirname(program), "python")),
  help: { args: ["serve", "--help=all"], env: { ...PYTHON_ENV, VLLM_TARGET_DEVICE: "cpu" }, trial_args: null },
  isProgress: (line) =>
    /Loading .*(shards|weights|safetensors)|Capturing|Compiling|torch\.compile|Autotun|GPU KV cache size|init engine|\d+%\|/i.test(line),
};
