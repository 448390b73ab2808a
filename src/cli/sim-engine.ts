import { watchOwner } from "../os/process.ts";
import { runSimEngine } from "../sim/sim-engine.ts";
import { RENDEZVOUS_MS } from "../protocol/limits.ts";
import type { GangSettings } from "../sim/rendezvous.ts";
import { command } from "./frame.ts";
import { usageError } from "./parse.ts";

interface GangFlags {
  readonly rank: number;
  readonly ranks: number;
  readonly "master-address": string | undefined;
  readonly "master-port": number | undefined;
  readonly "rendezvous-ms": number;
}

function gangOf(flags: GangFlags): GangSettings | null {
  const { rank, ranks, "master-address": master_address, "master-port": master_port, "rendezvous-ms": rendezvous_ms } = flags;
  if (ranks === 1) return null;
  if (master_address !== undefined && master_port !== undefined) return { rank, ranks, master_address, master_port, rendezvous_ms };
  throw usageError("llmgw sim-engine", "a gang needs a master", "--ranks is more than 1", "add --master-address and --master-port");
}

export const simEngineCommand = command({
  name: "sim-engine",
  about: "Runs the simulated engine",
  hidden: true,
  examples: ["llmgw sim-engine --socket /run/user/1000/sim.sock --model demo --tokens-per-second 50"],
  flags: {
    socket: { type: "string", value: "PATH", required: true, about: "the unix socket to listen on" },
    model: { type: "string", value: "NAME", required: true, about: "the name the model answers to" },
    "tokens-per-second": { type: "number", value: "N", default: 50, min: 0.1, about: "speed of an answer" },
    tokens: { type: "number", value: "N", default: 32, min: 1, about: "length of an answer that the request does not limit" },
    parallel: { type: "number", value: "N", default: 64, min: 1, about: "requests served at once" },
    "load-ms": { type: "number", value: "MS", default: 100, min: 0, about: "time to load" },
    "crash-at-load": { type: "boolean", about: "fail while loading" },
    "crash-after-tokens": { type: "number", value: "N", default: 0, min: 0, about: "die once this many tokens were made" },
    hang: { type: "boolean", about: "answer no request, with the socket open" },
    "ignore-sigterm": { type: "boolean", about: "go on after SIGTERM" },
    "hold-memory-mib": { type: "number", value: "N", default: 0, min: 0, max: 1_048_576, about: "memory it takes and keeps" },
    "answer-as": { type: "string", value: "NAME", about: "answer to this name, and to no other, in place of the model's" },
    "refuse-flag": { type: "string", value: "NAME", about: "end at once, as an engine does that no longer knows this flag" },
    rank: { type: "number", value: "N", default: 0, min: 0, about: "which rank of a gang this is" },
    ranks: { type: "number", value: "N", default: 1, min: 1, about: "how many ranks the gang has" },
    "master-address": { type: "string", value: "IP", about: "where rank 0 of the gang waits" },
    "master-port": { type: "number", value: "PORT", about: "the port rank 0 waits at" },
    "rendezvous-ms": { type: "number", value: "MS", default: RENDEZVOUS_MS, min: 1, about: "time in which all ranks must have met" },
    "lose-rank-after-ms": {
      type: "number",
      value: "MS",
      default: 0,
      min: 0,
      about: "a rank other than 0 dies this long after all have met",
    },
    "owner-pid": { type: "number", value: "PID", about: "end when this process is gone", hidden: true },
  },
  args: [],
  run: async ({ flags, io }) => {
    if (flags["owner-pid"] !== undefined) watchOwner(flags["owner-pid"], () => process.exit(1));
    if (flags["refuse-flag"] !== undefined) {
      io.err(`error: invalid argument: --${flags["refuse-flag"]}`);
      return 1;
    }
    return runSimEngine({
      socket: flags.socket,
      model: flags["answer-as"] ?? flags.model,
      tokens_per_second: flags["tokens-per-second"],
      tokens: flags.tokens,
      parallel: flags.parallel,
      load_ms: flags["load-ms"],
      crash_at_load: flags["crash-at-load"],
      crash_after_tokens: flags["crash-after-tokens"],
      hang: flags.hang,
      ignore_sigterm: flags["ignore-sigterm"],
      hold_memory: flags["hold-memory-mib"] * 2 ** 20,
      gang: gangOf(flags),
      lose_rank_after_ms: flags["lose-rank-after-ms"],
    });
  },
});
