/** How long a plan takes, from scratch and for one change, and how that grows with the fleet. Prints; asserts nothing. */
import { modelOf, TestFleet, type NodeShape } from "../unit/core/fleet-for-tests.ts";

const SIZES = [
  [250, 500],
  [1_000, 2_000],
  [10_000, 20_000],
] as const;

function fleetOf(nodes: number, replicas: number): TestFleet {
  const shapes = Array.from({ length: nodes }, (_, index): NodeShape => {
    const address = `10.${index >> 16}.${(index >> 8) & 255}.${index & 255}`;
    return { id: `n${index}`, address, gpus: 8, memory: 2 ** 40 };
  });
  const models = Array.from({ length: 20 }, (_, index) => modelOf(`m${index}`, { gpus: 1 + (index % 4), replicas: replicas / 20 }));
  return new TestFleet(shapes, models);
}

/** Processor time, so that a busy machine does not count; the collector's threads are in it. */
function time(work: () => void): number {
  const start = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(start);
  return (user + system) / 1_000;
}

const median = (values: number[]) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

let before: { readonly replicas: number; readonly scratch_ms: number } | null = null;
for (const [nodes, replicas] of SIZES) {
  // The first of a size also pays for code that the engine has yet to compile.
  const tries = Array.from({ length: 5 }, () => time(() => fleetOf(nodes, replicas).decide()));
  const made_ms = median(Array.from({ length: 5 }, () => time(() => fleetOf(nodes, replicas))));
  const scratch_ms = median(tries) - made_ms;
  const fleet = fleetOf(nodes, replicas);
  fleet.decide();
  fleet.turns(3);
  if (fleet.ready().length !== replicas) throw new Error(`${fleet.ready().length} of ${replicas} are ready`);
  const still_ms = median(Array.from({ length: 5 }, () => time(() => fleet.decide())));
  const one_ms = median(
    Array.from({ length: 5 }, (_, index) => {
      const hit = fleet.ready()[index * 7];
      const node = fleet.node(hit?.placements[0]?.node ?? "");
      node.exit(hit?.placements[0]?.launch.attempt ?? "", "died", fleet.now_ms);
      node.report(fleet.now_ms);
      return time(() => fleet.decide());
    }),
  );
  const per = (ms: number) => `${ms.toFixed(1)} ms`.padStart(10);
  const each = `${((1_000 * scratch_ms) / replicas).toFixed(0)} µs a replica from scratch`;
  console.log(
    `${nodes} nodes, ${replicas} replicas:`.padEnd(32),
    `scratch ${per(scratch_ms)}, one change ${per(one_ms)}, none ${per(still_ms)}; ${each}`,
  );
  if (before) {
    const [fleet_times, time_times] = [replicas / before.replicas, scratch_ms / before.scratch_ms];
    const power = (Math.log(time_times) / Math.log(fleet_times)).toFixed(2);
    console.log(`  ${fleet_times} times the fleet takes ${time_times.toFixed(1)} times as long: power ${power}`);
  }
  before = { replicas, scratch_ms };
}
