import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf, argvOf, flag } from "./args.ts";
import type { Engine, EngineCommand, Flag, FlagRules, LaunchInput } from "./engine.ts";
import { samplesOf } from "./metrics.ts";
import { SERVES_MODEL } from "./served-model.ts";

/** The simulated engine: this very program as `llmgw sim-engine`. Its switches are in `args`, to rehearse faults. */

const RULES: FlagRules = {
  parser: "exact",
  owned: ["--socket", "--model", "--embeddings", "--owner-pid", "--rank", "--ranks", "--master-address", "--master-port"],
  keyed: {},
  whole: [],
};

function gangFlags({ rank, ranks, gang }: RankLaunch): Flag[] {
  if (!gang) return [];
  const { address, port } = gang.master;
  return [flag("--rank", rank), flag("--ranks", ranks), flag("--master-address", address), flag("--master-port", port)];
}

function command({ launch, program, endpoint }: LaunchInput): EngineCommand {
  const flags = [
    flag("--socket", endpoint.kind === "socket" ? endpoint.path : ""),
    flag("--model", launch.model),
    ...gangFlags(launch),
    ...argsOf({ kind: "sim", rules: RULES }, launch),
  ];
  return { argv: [...program, "sim-engine", ...argvOf(flags)], flags, env: {}, files: [] };
}

export const sim: Engine = {
  kind: "sim",
  scrub: [],
  rules: RULES,
  needs_weights: false,
  gangs: true,
  listens: "socket",
  spare_ports: 0,
  caches: false,
  telling_args: [],
  command,
  probes: [{ path: "/health", judge: (status) => (status === 200 ? "ready" : "loading") }, SERVES_MODEL],
  vitals: {
    path: "/metrics",
    read: (metrics) => samplesOf(metrics, ["sim:generated_tokens_total", "sim:prompt_tokens_total", "sim:requests_total"]),
  },
  stop: [
    { signal: "SIGTERM", to: "leader", wait_ms: 2_000 },
    { signal: "SIGKILL", to: "group", wait_ms: 5_000 },
  ],
  version_args: ["version"],
  readVersion: (output) => /llmgw (\S+)/.exec(output)?.[1] ?? null,
  accelerator: null,
  help: null,
  isProgress: (line) => /loading \d+%|has joined/.test(line),
};
