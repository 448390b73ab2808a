import { runGateway } from "../gateway/gateway.ts";
import { stopGateway } from "../gateway/stop.ts";
import { loadServerConfig } from "../os/config-file.ts";
import { makeLog } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { command } from "./frame.ts";
import { usageError } from "./parse.ts";

export const gatewayCommand = command({
  name: "gateway",
  about: "Runs the OpenAI-compatible endpoint (the server starts one by itself)",
  examples: ["llmgw gateway --config /etc/llmgw/server.yaml", "llmgw gateway stop --config server/server.yaml"],
  flags: {
    config: { type: "string", value: "FILE", default: "/etc/llmgw/server.yaml", about: "server.yaml" },
    "owner-pid": { type: "number", value: "PID", about: "end when this process is gone", hidden: true },
  },
  args: [
    { name: "ACTION", about: "stop: end the one that runs instead, once its requests are answered; end its server first", optional: true },
  ],
  run: async ({ flags, args, io }) => {
    if (args.ACTION !== undefined && args.ACTION !== "stop")
      throw usageError("llmgw gateway", `unknown action "${args.ACTION}"`, "the only one is stop", "llmgw gateway stop");
    const config = await loadServerConfig(flags.config);
    if (args.ACTION === "stop") {
      const pid = await stopGateway(config.run, (in_flight) => io.err(`told the gateway to end; ${in_flight} requests in flight`));
      io.err(pid === null ? `no gateway answers in ${config.run}` : `the gateway has ended (process ${pid})`);
      return 0;
    }
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
