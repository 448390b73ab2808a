import * as v from "valibot";
import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf } from "./args.ts";
import type { Engine, LaunchInput, Probe } from "./engine.ts";
import { SERVES_MODEL } from "./served-model.ts";

/** llama-server of llama.cpp, 0.7.0 and later. */

const OWNED = [
  "--model",
  "--alias",
  "--host",
  "--port",
  "--reuse-port",
  "--api-prefix",
  "--api-key",
  "--api-key-file",
  "--ssl-key-file",
  "--ssl-cert-file",
  "--ctx-size",
  "--parallel",
  "--metrics",
  "--embedding",
  "--embeddings",
  "--log-file",
  "--log-disable",
  // Other ways to a model, and to other machines.
  "--offline",
  "--rpc",
  "--model-url",
  "--hf-repo",
  "--hf-file",
  "--hf-token",
  "--docker-repo",
  "--models-dir",
  "--models-preset",
] as const;

/** `-np N` divides the context among N slots, so the whole is context times slots. */
function contextArgs({ context, parallel }: RankLaunch): string[] {
  const slots = parallel === null ? [] : ["--parallel", String(parallel)];
  return context === null ? slots : ["--ctx-size", String(context * (parallel ?? 1)), ...slots];
}

/** What llmgw chooses where `args` of the catalog do not. */
interface Choice {
  readonly flag: string;
  readonly value: string;
  readonly other_name?: string;
}

function choices({ gpus, embeddings, context }: RankLaunch): Choice[] {
  // An input is embedded in one batch or refused, so a batch must hold the longest one there may be.
  const batch = String(context ?? 2_048);
  const embedding = ["pooling", "batch-size", "ubatch-size"].map((flag) => ({ flag, value: flag === "pooling" ? "mean" : batch }));
  const offload = { flag: "n-gpu-layers", value: "all", other_name: "gpu-layers" };
  return [...(embeddings ? embedding : []), ...(gpus.length > 0 ? [offload] : [])];
}

function command({ launch, program, weights_path, socket }: LaunchInput) {
  const { args } = launch;
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
    ...(launch.embeddings ? ["--embeddings"] : []),
    ...choices(launch).flatMap(({ flag, value, other_name }) =>
      flag in args || (other_name !== undefined && other_name in args) ? [] : [`--${flag}`, value],
    ),
    ...argsOf("llamacpp", args, OWNED),
  ];
  return { argv, env: { CUDA_VISIBLE_DEVICES: launch.gpus.join(",") } };
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

export const llamacpp: Engine = {
  kind: "llamacpp",
  scrub: ["LLAMA_*", "GGML_*", "HF_TOKEN", "HF_HOME", "HUGGING_FACE_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"],
  owned_flags: OWNED,
  needs_weights: true,
  command,
  probes: [HEALTH, NOT_A_ROUTER, SERVES_MODEL],
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
