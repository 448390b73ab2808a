import { loadServerConfig } from "../os/config-file.ts";
import { makeLog } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { runServer } from "../server/server.ts";
import { command } from "./frame.ts";

export const serverCommand = command({
  name: "server",
  about: "Runs the control plane",
  examples: ["llmgw server --config /etc/llmgw/server.yaml"],
  flags: {
    config: { type: "string", value: "FILE", default: "/etc/llmgw/server.yaml", about: "server.yaml" },
    "owner-pid": { type: "number", value: "PID", about: "end, with the gateway, when this process is gone", hidden: true },
  },
  args: [],
  run: async ({ flags }) => {
    const config = await loadServerConfig(flags.config);
    const over = new AbortController();
    for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => over.abort());
    const owner_pid = flags["owner-pid"] ?? null;
    if (owner_pid !== null) watchOwner(owner_pid, () => over.abort());
    await runServer({ config_file: flags.config, config, log: makeLog(config.log), signal: over.signal, owner_pid });
    return 0;
  },
});
