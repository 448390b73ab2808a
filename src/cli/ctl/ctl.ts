import { group, lazy } from "../frame.ts";

/** `llmgw ctl`: everything an operator asks of a server, over mutual TLS, from anywhere. */
export const ctlCommands = group({
  name: "ctl",
  about: "Asks a server about its fleet, and tells it what to do",
  examples: ["llmgw ctl status", "llmgw ctl nodes -o wide", "llmgw ctl key create alice"],
  commands: () => [
    lazy("status", async () => (await import("./status.ts")).statusCommand),
    lazy("nodes", async () => (await import("./nodes.ts")).nodesCommand),
    lazy("node", async () => (await import("./node.ts")).nodeCommands),
    lazy("fabrics", async () => (await import("./fabrics.ts")).fabricsCommand),
    lazy("models", async () => (await import("./models.ts")).modelsCommand),
    lazy("replicas", async () => (await import("./replicas.ts")).replicasCommand),
    lazy("events", async () => (await import("./events.ts")).eventsCommand),
    lazy("logs", async () => (await import("./logs.ts")).logsCommand),
    lazy("keys", async () => (await import("./keys.ts")).keysCommand),
    lazy("key", async () => (await import("./keys.ts")).keyCommands),
    lazy("engine-check", async () => (await import("./engine-check.ts")).engineCheckCommand),
    lazy("wait", async () => (await import("./wait.ts")).waitCommand),
    lazy("why", async () => (await import("./why.ts")).whyCommand),
    lazy("plan", async () => (await import("./why.ts")).planCommand),
    lazy("drain", async () => (await import("./drain.ts")).drainCommand),
    lazy("cordon", async () => (await import("./drain.ts")).cordonCommand),
    lazy("uncordon", async () => (await import("./drain.ts")).uncordonCommand),
    lazy("replica", async () => (await import("./replica.ts")).replicaCommands),
    lazy("restart", async () => (await import("./replica.ts")).restartCommand),
    lazy("scale", async () => (await import("./scale.ts")).scaleCommand),
    lazy("thaw", async () => (await import("./drain.ts")).thawCommand),
    lazy("revoke", async () => (await import("./acts.ts")).revokeCommand),
    lazy("reload", async () => (await import("./acts.ts")).reloadCommand),
    lazy("context", async () => (await import("./context.ts")).contextCommands),
  ],
});
