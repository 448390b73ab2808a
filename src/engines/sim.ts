import type { RankLaunch } from "../protocol/plan.ts";
import { argsOf } from "./args.ts";
import type { Engine } from "./engine.ts";
import { SERVES_MODEL } from "./served-model.ts";

/** The simulated engine: this very program as `llmgw sim-engine`. Its switches are in `args`, to rehearse faults. */

const OWNED = ["--socket", "--model", "--embeddings", "--owner-pid", "--rank", "--ranks", "--master-address", "--master-port"] as const;

function gangArgs({ rank, ranks, gang }: RankLaunch): string[] {
  if (!gang) return [];
  const { address, port } = gang.master;
  return ["--rank", String(rank), "--ranks", String(ranks), "--master-address", address, "--master-port", String(port)];
}

export const sim: Engine = {
  kind: "sim",
  scrub: [],
  owned_flags: OWNED,
  needs_weights: false,
  command: ({ launch, program, socket }) => ({
    argv: [
      ...program,
      "sim-engine",
      "--socket",
      socket,
      "--model",
      launch.model,
      ...gangArgs(launch),
      ...argsOf("sim", launch.args, OWNED),
    ],
    env: {},
  }),
  probes: [{ path: "/health", judge: (status) => (status === 200 ? "ready" : "loading") }, SERVES_MODEL],
  stop: [
    { signal: "SIGTERM", to: "leader", wait_ms: 2_000 },
    { signal: "SIGKILL", to: "group", wait_ms: 5_000 },
  ],
  version_args: ["version"],
  readVersion: (output) => /llmgw (\S+)/.exec(output)?.[1] ?? null,
  isProgress: (line) => /loading \d+%|has joined/.test(line),
};
