import type { RankLaunch } from "../protocol/plan.ts";

/**
 * A launch with every option of the catalog, that is never started: engines are checked and documented with it.
 * @param gpus how many the rank has
 * @param rank of two on one fabric; null = a lone one
 */
export function sampleLaunch(engine: RankLaunch["engine"], gpus: number, rank: 0 | 1 | null): RankLaunch {
  const master = { address: "10.0.0.5", port: 20_010 };
  const ports = { first: master.port, count: 16 };
  return {
    attempt: "0123456789abcdef",
    replica: "model-abcde",
    model: "model",
    rank: rank ?? 0,
    ranks: rank === null ? 1 : 2,
    engine,
    door: { address: `10.0.0.${5 + (rank ?? 0)}`, port: 20_001 },
    gpus: Array.from({ length: gpus }, (_, index) => `GPU-${index}`),
    weights: null,
    context: 32_768,
    parallel: 8,
    embeddings: false,
    args: {},
    start_deadline_ms: 0,
    ...(rank !== null && { gang: { master, ports, island: "ib-a", adapters: ["mlx5_0:1"], imex_failed: false } }),
  };
}
