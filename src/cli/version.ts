import { PROTOCOL } from "../protocol/protocol.ts";
import { COMMIT, VERSION } from "../protocol/version.ts";
import { command } from "./frame.ts";

export const versionCommand = command({
  name: "version",
  about: "Says which llmgw this is",
  examples: ["llmgw version", "llmgw version -o json"],
  flags: {
    output: {
      type: "string",
      short: "o",
      value: "FORM",
      choices: ["table", "json"],
      default: "table",
      about: "form of the answer",
    },
  },
  args: [],
  run: async ({ flags, io }) => {
    const facts = {
      version: VERSION,
      commit: COMMIT,
      bun: Bun.version,
      protocol: PROTOCOL,
    };
    if (flags.output === "json") io.out(JSON.stringify(facts, null, 2));
    else io.out(`llmgw ${VERSION} (commit ${COMMIT}, Bun ${Bun.version}, protocol ${PROTOCOL})`);
  },
});
