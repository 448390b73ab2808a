import { runShim } from "../shim/shim.ts";
import { command } from "./frame.ts";

export const shimCommand = command({
  name: "shim",
  about: "Owns one rank on a node",
  hidden: true,
  examples: ["llmgw shim --spec /var/lib/llmgw/ranks/0123456789abcdef/spec.json"],
  flags: { spec: { type: "string", value: "FILE", required: true, about: "what to run, written by the agent" } },
  args: [],
  run: async ({ flags }) => {
    await runShim(flags.spec);
    // Whatever is still open belongs to clients of a rank that is gone.
    process.exit(0);
  },
});
