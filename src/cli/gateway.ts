import { runGateway } from "../gateway/gateway.ts";
import { loadServerConfig } from "../os/config-file.ts";
import { makeLog } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { ownProgram } from "../os/program.ts";
import { UPSTREAM_REQUESTS_COUNT } from "../protocol/limits.ts";
import { command } from "./frame.ts";

/** Bun reads at its start how many requests `fetch` runs at once; without it, it is 256. */
const FETCH_LIMIT = "BUN_CONFIG_MAX_HTTP_REQUESTS";

export const gatewayCommand = command({
  name: "gateway",
  about: "Runs the OpenAI-compatible endpoint (the server starts one by itself)",
  examples: ["llmgw gateway --config /etc/llmgw/server.yaml"],
  flags: {
    config: { type: "string", value: "FILE", default: "/etc/llmgw/server.yaml", about: "server.yaml" },
    "owner-pid": { type: "number", value: "PID", about: "end when this process is gone", hidden: true },
  },
  args: [],
  run: async ({ flags }) => {
    if (process.env[FETCH_LIMIT] === undefined) return runAgainWithLimit();
    const config = await loadServerConfig(flags.config);
    const over = new AbortController();
    const stop = () => {
      if (over.signal.aborted) process.exit(1);
      over.abort();
    };
    for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, stop);
    const owner = flags["owner-pid"];
    if (owner !== undefined) watchOwner(owner, () => process.exit(0));
    await runGateway({ config, log: makeLog(config.log), signal: over.signal });
    return 0;
  },
});

/** The same command in a process that starts with the limit lifted; signals are handed on, its exit code is ours. */
async function runAgainWithLimit(): Promise<number> {
  const child = Bun.spawn([...ownProgram(), ...process.argv.slice(2)], {
    stdio: ["ignore", "inherit", "inherit"],
    env: { ...process.env, [FETCH_LIMIT]: String(UPSTREAM_REQUESTS_COUNT) },
  });
  for (const signal of ["SIGTERM", "SIGINT", "SIGHUP"] as const) process.on(signal, () => child.kill(signal));
  return child.exited;
}
