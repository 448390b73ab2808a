// The whole fleet from a seed, with faults, against what must always hold. SIM_SEED=n repeats one seed and prints what
// happened; SIM_FROM, SIM_SEEDS and SIM_STEPS say what is run.
import { expect, test } from "bun:test";
import { Simulation, type Mood } from "./simulation.ts";

const ONE = process.env["SIM_SEED"];
const FROM = Number(process.env["SIM_FROM"] ?? 0);
const SEEDS = Number(process.env["SIM_SEEDS"] ?? 500);
const STEPS = Number(process.env["SIM_STEPS"] ?? 500);

function run(seed: number, mood: Mood): Simulation {
  const simulation = new Simulation(seed, mood);
  try {
    for (let step = 0; step < STEPS; step++) simulation.step();
    simulation.settle();
  } catch (error) {
    throw new Error(`SIM_SEED=${seed} (${mood}): ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
  return simulation;
}

const seeds = ONE === undefined ? Array.from({ length: SEEDS }, (_, seed) => FROM + seed) : [Number(ONE)];
// A calm fleet has less to go wrong: a quarter of the seeds is enough for it.
const quarter = Math.ceil(seeds.length / 4);

test.each<[Mood, number[]]>([
  ["rough", ONE === undefined ? seeds.slice(quarter) : seeds],
  ["calm", ONE === undefined ? seeds.slice(0, quarter) : seeds],
])(
  `the fleet keeps every promise when it is %s`,
  (mood, chosen) => {
    for (const seed of chosen) {
      const simulation = run(seed, mood);
      if (ONE !== undefined) console.log(simulation.log.join("\n"));
    }
  },
  3_600_000,
);

test("a seed gives the same run each time", () => {
  for (const seed of seeds.slice(0, 5)) expect(run(seed, "rough").log).toEqual(run(seed, "rough").log);
});
