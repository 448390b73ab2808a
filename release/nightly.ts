/**
 * `npm run nightly`: 10,000 seeds of the simulated fleet over all cores, then every rule of the planner broken on purpose,
 * then what boots a virtual machine. Takes a few minutes; exits with 1 when a seed breaks a promise, a broken rule is not noticed,
 * or a machine does not become a node.
 */
import { cpus } from "node:os";
import { buildIfStale, runHere } from "./fresh.ts";

const SEEDS = Number(process.env["SIM_SEEDS"] ?? 10_000);
const parts = Math.max(1, cpus().length);
const each = Math.ceil(SEEDS / parts);
const started = performance.now();
const codes = await Promise.all(
  Array.from({ length: parts }, (_, part) => {
    const env = { SIM_FROM: String(part * each), SIM_SEEDS: String(each) };
    return runHere([process.execPath, "test", "--timeout", "3600000", "./tests/sim"], env);
  }),
);
console.log(`${each * parts} seeds in ${Math.round((performance.now() - started) / 1_000)} s on ${parts} cores`);
codes.push(await runHere([process.execPath, "tests/sim/mutants.ts"]));
await buildIfStale();
codes.push(await runHere([process.execPath, "test", "--timeout", "900000", "./tests/nightly"]));
process.exit(codes.every((code) => code === 0) ? 0 : 1);
