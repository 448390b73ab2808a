import { existsSync } from "node:fs";
import { runAgent, stopAll } from "../agent/agent.ts";
import type { AgentOptions } from "../agent/agent.ts";
import { AGENT_FILE, loadAgentConfig } from "../os/config-file.ts";
import { makeLog } from "../os/log.ts";
import { watchOwner } from "../os/process.ts";
import { command } from "./frame.ts";
import { usageError } from "./parse.ts";
import type { FlagValues, Io } from "./spec.ts";

const FLAGS = {
  config: { type: "string", value: "FILE", about: "agent.yaml; every key of it is also a flag; /etc/llmgw/agent.yaml when it is there" },
  node: { type: "string", value: "ID", about: "node id; the host name without domain when absent" },
  server: { type: "list", value: "URL", about: "a server, https://host:port" },
  address: { type: "string", value: "IP", about: "address other machines reach this node at" },
  "tls-ca": { type: "string", value: "FILE", about: "certificate of the authority" },
  "tls-cert": { type: "string", value: "FILE", about: "this node's certificate" },
  "tls-key": { type: "string", value: "FILE", about: "this node's key" },
  state: { type: "string", value: "DIR", about: "where weights, logs and ranks are kept" },
  run: { type: "string", value: "DIR", about: "where sockets are made; a short path" },
  "nvidia-smi": { type: "string", value: "PATH", about: "nvidia-smi, when it is in no usual place" },
  fabric: { type: "list", value: "NAME[:ADAPTER,...]", about: "an InfiniBand fabric this node is on, and its adapters there" },
  "ib-root": { type: "string", value: "DIR", about: "InfiniBand devices; /sys/class/infiniband when absent" },
  "llamacpp-bin": { type: "string", value: "PATH", about: "a llama-server to use" },
  "vllm-bin": { type: "string", value: "PATH", about: "a vllm to use" },
  "sglang-python": { type: "string", value: "PATH", about: "the Python that has SGLang, to use" },
  custody: { type: "string", value: "KIND", choices: ["auto", "systemd", "session"], about: "where engines live apart from the agent" },
  "engine-user": { type: "string", value: "USER", about: "user the engines run as when the agent is root" },
  "log-level": { type: "string", value: "LEVEL", choices: ["error", "warn", "info", "debug"], about: "least level that is logged" },
  "log-format": { type: "string", value: "FORM", choices: ["text", "json"], about: "form of log lines" },
  "owner-pid": { type: "number", value: "PID", about: "end, with all ranks, when this process is gone", hidden: true },
} as const;

/** The agent's options from its file and flags. */
async function optionsOf(flags: FlagValues<typeof FLAGS>, io: Io, signal: AbortSignal): Promise<AgentOptions> {
  const given = {
    node: flags.node,
    servers: flags.server.length > 0 ? flags.server : undefined,
    address: flags.address,
    tls: parts({ ca: flags["tls-ca"], cert: flags["tls-cert"], key: flags["tls-key"] }),
    state: flags.state,
    run: flags.run,
    nvidia_smi: flags["nvidia-smi"],
    fabrics: flags.fabric.length > 0 ? flags.fabric : undefined,
    ib_root: flags["ib-root"],
    llamacpp_bin: flags["llamacpp-bin"],
    vllm_bin: flags["vllm-bin"],
    sglang_python: flags["sglang-python"],
    custody: flags.custody,
    engine_user: flags["engine-user"],
    log: parts({ level: flags["log-level"], format: flags["log-format"] }),
  };
  const file = flags.config ?? (existsSync(AGENT_FILE) ? AGENT_FILE : null);
  const config = await loadAgentConfig(file, given, io.cwd);
  return { config, log: makeLog(config.log), signal, owner_pid: flags["owner-pid"] ?? null };
}

/** The parts of a key that flags name; undefined when they name none. */
function parts(all: Readonly<Record<string, string | undefined>>): Readonly<Record<string, string>> | undefined {
  const named = Object.entries(all).filter((entry): entry is [string, string] => entry[1] !== undefined);
  return named.length > 0 ? Object.fromEntries(named) : undefined;
}

export const agentCommand = command({
  name: "agent",
  about: "Runs this machine as a node of the fleet",
  examples: [
    "llmgw agent",
    "llmgw agent --config ./agent.yaml",
    "llmgw agent --server https://10.0.0.1:7443 --address 10.0.0.5 --llamacpp-bin /opt/llama.cpp/llama-server",
    "llmgw agent stop-all",
  ],
  flags: FLAGS,
  args: [{ name: "ACTION", about: "stop-all: end every rank on this node instead", optional: true }],
  run: async ({ flags, args, io }) => {
    const over = new AbortController();
    const options = await optionsOf(flags, io, over.signal);
    if (args.ACTION === "stop-all") {
      await stopAll(options);
      return 0;
    }
    if (args.ACTION !== undefined)
      throw usageError("llmgw agent", `unknown action "${args.ACTION}"`, "the only one is stop-all", "llmgw agent stop-all");
    for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => over.abort());
    if (options.owner_pid !== null) watchOwner(options.owner_pid, () => over.abort());
    await runAgent(options);
    return 0;
  },
});
