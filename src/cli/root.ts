import { group, lazy } from "./frame.ts";
import type { Group } from "./spec.ts";

/** The whole command tree. A command's module is loaded only when it is called or listed. */
export const root: Group = group({
  name: "llmgw",
  about: "Runs a fleet of LLM inference machines behind an OpenAI-compatible endpoint",
  examples: ["llmgw demo", "llmgw server --config /etc/llmgw/server.yaml", "llmgw ctl nodes"],
  commands: () => [
    lazy("ca", async () => (await import("./ca.ts")).caCommands),
    lazy("keygen", async () => (await import("./keygen.ts")).keygenCommand),
    lazy("provision", async () => (await import("./provision.ts")).provisionCommand),
    lazy("add-node", async () => (await import("./add-node.ts")).addNodeCommand),
    lazy("onboard", async () => (await import("./onboard.ts")).onboardCommand),
    lazy("server", async () => (await import("./server.ts")).serverCommand),
    lazy("gateway", async () => (await import("./gateway.ts")).gatewayCommand),
    lazy("agent", async () => (await import("./agent.ts")).agentCommand),
    lazy("doctor", async () => (await import("./doctor.ts")).doctorCommand),
    lazy("ctl", async () => (await import("./ctl/ctl.ts")).ctlCommands),
    lazy("demo", async () => (await import("./demo/demo.ts")).demoCommand),
    lazy("shim", async () => (await import("./shim.ts")).shimCommand),
    lazy("sim-engine", async () => (await import("./sim-engine.ts")).simEngineCommand),
    lazy("completion", async () => (await import("./completion.ts")).makeCompletionCommand(() => root)),
    lazy("config", async () => (await import("./config.ts")).configCommands),
    lazy("version", async () => (await import("./version.ts")).versionCommand),
  ],
});
