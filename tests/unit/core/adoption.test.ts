// Taking over what runs on the nodes but is in no record.
import { expect, test } from "bun:test";
import { adopt } from "../../../src/core/adoption.ts";
import { DEFAULT_POLICY, type NodeSeen, type World } from "../../../src/core/world.ts";
import type { RankStatus } from "../../../src/protocol/agent-api.ts";
import { rankLaunch } from "../../fixtures/launch.ts";
import { inventoryOf, modelOf } from "./fleet-for-tests.ts";

const MODEL = modelOf("m", { nodes: 2 });

/** A ready rank of a two-rank replica that was started with this port of rank 0. */
function rankOf(start: number, rank: number): RankStatus {
  const attempt = `${start}${rank}`.padStart(16, "0");
  const ports = { first: start, count: 10 };
  const gang = { master: { address: "10.0.0.1", port: start }, ports, island: "ib-a", adapters: ["mlx5_0:1"], imex_failed: false };
  const door = { address: `10.0.0.${rank + 1}`, port: start + 20 };
  const launch = rankLaunch({ attempt, replica: "m-aaaaa", model: "m", rank, ranks: 2, door, gang });
  const about = { since_ms: 1, detail: "", engine_pid: 1, progress: null, exit: null };
  return { attempt, replica: "m-aaaaa", rank, phase: "ready", ...about, launch };
}

function worldWith(ranks: Record<string, RankStatus[]>): World {
  const nodes = Object.entries(ranks).map(([id, found], index): NodeSeen => {
    const about = { state: "ready" as const, state_reason: "", holds: [], heard_ms: 1, cordon: null, drain: null };
    return { id, address: `10.0.0.${index + 1}`, inventory: inventoryOf({ id }), ranks: found, ...about };
  });
  const unsaid = { in_flight: null, unreachable: null, thawed_ms: 0, gathering: false, measuring: new Set<string>() };
  return {
    models: [MODEL],
    nodes,
    replicas: [],
    policy: DEFAULT_POLICY,
    fabrics: { islands: [], warnings: [], torn: [], numbers: {} },
    ...unsaid,
  };
}

test("ranks of one start become their replica again", () => {
  const { replicas } = adopt(worldWith({ a: [rankOf(20_000, 0)], b: [rankOf(20_000, 1)] }), [], 10);
  expect(replicas.map(({ id, state, placements }) => [id, state, placements.map(({ node }) => node)])).toEqual([
    ["m-aaaaa", "ready", ["a", "b"]],
  ]);
});

test("ranks of two starts of one gang are no replica: they know nothing of each other", () => {
  expect(adopt(worldWith({ a: [rankOf(20_000, 0)], b: [rankOf(20_050, 1)] }), [], 10).replicas).toEqual([]);
});

test("a whole start is taken over beside what another one left", () => {
  const world = worldWith({ a: [rankOf(20_000, 0), rankOf(20_050, 0)], b: [rankOf(20_050, 1)] });
  const [only, ...others] = adopt(world, [], 10).replicas;
  expect(others).toEqual([]);
  expect(only?.placements.map(({ launch }) => launch.gang?.master.port)).toEqual([20_050, 20_050]);
});
