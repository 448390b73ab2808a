import type { LaunchInput } from "../../../src/engines/engine.ts";
import { engineOf } from "../../../src/engines/registry.ts";
import type { EngineKind } from "../../../src/protocol/ids.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { rankLaunch } from "../../fixtures/launch.ts";

/** The launch of a lone rank without GPUs, for tests to change. */
export function launchOf(engine: EngineKind, more: Partial<RankLaunch> = {}): RankLaunch {
  const about = { replica: "coder-abcde", model: "coder", door: { address: "10.0.0.5", port: 20_001 }, start_deadline_ms: 600_000 };
  return rankLaunch({ ...about, engine, ...more });
}

/** What the other ranks are, for rank `rank` of two. */
export function inGang(rank: 0 | 1): Partial<RankLaunch> {
  return {
    rank,
    ranks: 2,
    door: { address: `10.0.0.${5 + rank}`, port: 20_001 },
    gang: {
      master: { address: "10.0.0.5", port: 20_010 },
      ports: { first: 20_010, count: 16 },
      island: "ib-a",
      adapters: ["mlx5_0:1"],
      imex_failed: false,
    },
  };
}

export function inputOf(engine: EngineKind, more: Partial<RankLaunch> = {}): LaunchInput {
  return {
    launch: launchOf(engine, more),
    program: ["/opt/engine/bin/program"],
    weights_path: "/models/coder",
    endpoint:
      engineOf(engine).listens === "socket"
        ? { kind: "socket", path: "/run/llmgw/r/0123456789abcdef/e.sock" }
        : { kind: "loopback", port: 20_003, spare_ports: [20_004, 20_005], key: "the-key-of-this-attempt" },
    folder: "/var/lib/llmgw/ranks/0123456789abcdef/work",
    cache: "/var/lib/llmgw/cache/engine",
  };
}
