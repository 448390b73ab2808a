import { runGateway } from "../gateway/gateway.ts";
import { loadServerConfig } from "../os/config-file.ts";
import { makeLog } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { command } from "./frame.ts";

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
