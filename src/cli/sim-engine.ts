import { watchOwner } from "../os/process.ts";
import { runSimEngine } from "../sim/sim-engine.ts";
import { command } from "./frame.ts";

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
    "owner-pid": { type: "number", value: "PID", about: "end when this process is gone", hidden: true },
  },
  args: [],
  run: async ({ flags }) => {
    if (flags["owner-pid"] !== undefined) watchOwner(flags["owner-pid"], () => process.exit(1));
    return runSimEngine({
      socket: flags.socket,
      model: flags.model,
      tokens_per_second: flags["tokens-per-second"],
      tokens: flags.tokens,
      parallel: flags.parallel,
      load_ms: flags["load-ms"],
      crash_at_load: flags["crash-at-load"],
      crash_after_tokens: flags["crash-after-tokens"],
      hang: flags.hang,
      ignore_sigterm: flags["ignore-sigterm"],
    });
  },
});
