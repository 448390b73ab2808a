import * as v from "valibot";
import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf, argvOf, chosen, flag, wordsOf } from "./args.ts";
import type { Engine, EngineCommand, Flag, FlagRules, LaunchInput, Probe } from "./engine.ts";
import { samplesOf } from "./metrics.ts";
import { SERVES_MODEL } from "./served-model.ts";

/** llama-server of llama.cpp, 0.7.0 and later. */

const RULES: FlagRules = {
  parser: "exact",
  keyed: {},
  whole: [],
  owned: wordsOf(
    "--model -m --alias -a --offline",
    "--host --port --reuse-port --path --api-prefix --api-key --api-key-file --ssl-key-file --ssl-cert-file",
    "--ctx-size -c --parallel -np --embedding --embeddings --metrics",
    "--ui --no-ui --webui --no-webui --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy",
    // Logs are read by line from its output, and never hold prompts.
    "--log-file --log-disable --log-colors --log-jsonl --no-log-jsonl --log-prompts-dir",
    // Other ways to a model, and to other machines.
    "--rpc --model-url -mu --hf-repo -hf -hfr --hf-file -hff --hf-token -hft --docker-repo -dr",
    "--models-dir --models-preset --models-max --models-autoload --no-models-autoload",
    "--spec-draft-hf -hfd -hfrd --hf-repo-draft --mmproj-url -mmu",
    // It would do for users what its machine can.
    "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --agent -ag --no-agent -no-ag --media-path",
    // It would print something and end.
    "--help -h --usage --version --cache-list -cl --completion-bash --list-devices",
  ),
};

/** `-np N` divides the context among N slots, so the whole is context times slots. */
function contextFlags({ context, parallel }: RankLaunch): Flag[] {
  const slots = parallel === null ? [] : [flag("--parallel", parallel)];
  return context === null ? slots : [flag("--ctx-size", context * (parallel ?? 1)), ...slots];
}

/** What llmgw chooses where `args` of the catalog do not. */
function choices({ args, gpus, embeddings, context }: RankLaunch): Flag[] {
  // An input is embedded in one batch or refused, so a batch must hold the longest one there may be.
  const batch = context ?? 2_048;
  const embedding = [
    ...chosen(args, ["--pooling"], "mean"),
    ...chosen(args, ["--batch-size"], batch),
    ...chosen(args, ["--ubatch-size"], batch),
  ];
  return [...(embeddings ? embedding : []), ...(gpus.length > 0 ? chosen(args, ["--n-gpu-layers", "--gpu-layers"], "all") : [])];
}

function command({ launch, program, weights_path, endpoint }: LaunchInput): EngineCommand {
  const flags = [
    flag("--model", weights_path ?? ""),
    flag("--alias", launch.model),
    flag("--host", endpoint.kind === "socket" ? endpoint.path : "127.0.0.1"),
    ...contextFlags(launch),
    ...["--metrics", "--offline", "--no-ui"].map((name) => flag(name)),
    flag("--log-colors", "off"),
    ...(launch.embeddings ? [flag("--embeddings")] : []),
    ...choices(launch),
    ...argsOf({ kind: "llamacpp", rules: RULES }, launch),
  ];
  return { argv: [...program, ...argvOf(flags)], flags, env: { CUDA_VISIBLE_DEVICES: launch.gpus.join(",") }, files: [] };
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

/** Tokens are counted when an answer is whole; decoding steps as they are made. */
const MOVING = ["llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"];

export const llamacpp: Engine = {
  kind: "llamacpp",
  scrub: ["LLAMA_*", "GGML_*", "HF_TOKEN", "HF_HOME", "HUGGING_FACE_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"],
  rules: RULES,
  needs_weights: true,
  // Its ranks would talk in clear and run what they are sent.
  gangs: false,
  listens: "socket",
  spare_ports: 0,
  caches: false,
  telling_args: [],
  command,
  probes: [HEALTH, NOT_A_ROUTER, SERVES_MODEL],
  vitals: { path: "/metrics", read: (metrics) => samplesOf(metrics, MOVING) },
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
  accelerator: {
    argv: (program) => [program, "--list-devices"],
    fault: (output) => (/^\s*CUDA\d+:/m.test(output) ? "" : `it sees no CUDA device: ${output.trim().split("\n").at(-1) ?? ""}`),
  },
  // Arguments are read in their order, and a bad one ends it before the version is printed (0.7.0, measured).
  help: { args: ["--help"], env: {}, trial_args: ["--version"] },
  isProgress: (line) => /load_tensors|load_model|print_info|warming up|^\.+$/.test(line.trim()),
};
