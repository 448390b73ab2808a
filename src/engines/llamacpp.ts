import * as v from "valibot";
import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf } from "./args.ts";
import type { Engine, LaunchInput, Probe } from "./engine.ts";

/** llama-server of llama.cpp, 0.7.0 and later. */

const OWNED = [
  "--model",
  "--alias",
  "--host",
  "--port",
  "--api-key",
  "--api-key-file",
  "--ctx-size",
  "--parallel",
  "--metrics",
  "--embedding",
  "--embeddings",
  "--offline",
  "--n-gpu-layers",
  "--gpu-layers",
  "--rpc",
  "--hf-repo",
  "--model-url",
  "--models-dir",
  "--reuse-port",
  "--ssl-key-file",
  "--ssl-cert-file",
] as const;

/** `-np N` divides the context among N slots, so the whole is context times slots. */
function contextArgs({ context, parallel }: RankLaunch): string[] {
  const slots = parallel === null ? [] : ["--parallel", String(parallel)];
  return context === null ? slots : ["--ctx-size", String(context * (parallel ?? 1)), ...slots];
}

function command({ launch, program, weights_path, socket }: LaunchInput) {
  const argv: [string, ...string[]] = [
    ...program,
    "--model",
    weights_path ?? "",
    "--alias",
    launch.model,
    "--host",
    socket,
    ...contextArgs(launch),
    "--metrics",
    "--offline",
    "--no-ui",
    "--log-colors",
    "off",
    ...(launch.embeddings ? ["--embeddings", "--pooling", String(launch.args["pooling"] ?? "mean")] : []),
    ...(launch.gpus.length > 0 ? ["--n-gpu-layers", "all"] : []),
    ...argsOf("llamacpp", withoutPooling(launch), OWNED),
  ];
  return { argv, env: { CUDA_VISIBLE_DEVICES: launch.gpus.join(",") } };
}

function withoutPooling({ args, embeddings }: RankLaunch): RankLaunch["args"] {
  const { pooling: _given, ...rest } = args;
  return embeddings ? rest : args;
}

const HEALTH: Probe = {
  path: "/health",
  judge: (status) => (status === 200 ? "ready" : "loading"),
};

const Props = v.object({ role: v.optional(v.string()), model_path: v.optional(v.string()) });

/** Started without its model, llama-server comes up healthy as a router with no models. */
const NOT_A_ROUTER: Probe = {
  path: "/props",
  judge: (status, body) => {
    if (status !== 200) return "loading";
    const props = v.safeParse(v.pipe(v.string(), v.parseJson(), Props), body);
    if (!props.success) return { failed: "its /props cannot be read" };
    const { role, model_path } = props.output;
    if (role === "router" || model_path === "none" || model_path === "") return { failed: "it came up as a router, without its model" };
    return "ready";
  },
};

const MODELS: Probe = {
  path: "/v1/models",
  judge: (status) => (status === 200 ? "ready" : "loading"),
};

export const llamacpp: Engine = {
  kind: "llamacpp",
  scrub: ["LLAMA_*", "GGML_*", "HF_TOKEN", "HF_HOME", "HUGGING_FACE_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"],
  owned_flags: OWNED,
  needs_weights: true,
  command,
  probes: [HEALTH, NOT_A_ROUTER, MODELS],
  // SIGTERM waits for clients without limit; the second ends at once (0.7.0, measured).
  stop: [
    { signal: "SIGTERM", to: "leader", wait_ms: 3_000 },
    { signal: "SIGTERM", to: "leader", wait_ms: 2_000 },
    { signal: "SIGKILL", to: "group", wait_ms: 5_000 },
  ],
  version_args: ["--version"],
  readVersion: (output) => {
    const found = /^version: (\S+)(?: \(build (\d+))?/m.exec(output);
    if (!found) return null;
    return found[2] === undefined ? (found[1] ?? null) : `${found[1]} (build ${found[2]})`;
  },
  isProgress: (line) => /load_tensors|load_model|print_info|warming up|^\.+$/.test(line.trim()),
};
