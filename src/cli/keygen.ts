import { resolve } from "node:path";
import * as v from "valibot";
import { requestWithKeyFile } from "../pki/ca-folder.ts";
import { NodeId } from "../protocol/ids.ts";
import { command } from "./frame.ts";
import { usageError } from "./parse.ts";

export const keygenCommand = command({
  name: "keygen",
  about: "Makes this node's key here and prints a certificate request for it",
  examples: ["llmgw keygen --node llmgw-node05 > node05.csr"],
  flags: {
    node: { type: "string", value: "ID", required: true, about: "node id" },
    key: { type: "string", value: "FILE", default: "/etc/llmgw/tls/node.key", about: "the key's file; made when missing, never replaced" },
    "dry-run": { type: "boolean", about: "say what would be done, and do nothing" },
  },
  args: [],
  run: async ({ flags, io }) => {
    const { node } = flags;
    if (!v.safeParse(NodeId, node).success)
      throw usageError("llmgw keygen", `"${node}" cannot be a node id`, "it takes 1-63 of a-z 0-9 -, not starting or ending with -");
    const file = resolve(io.cwd, flags.key);
    if (flags["dry-run"]) {
      io.err(`would make ${file} unless it is there, and print a request for ${node}`);
      return;
    }
    const { csr, made } = await requestWithKeyFile(file, node, "node");
    io.err(`${made ? "made" : "used"} the key ${file}; it never has to leave this machine`);
    io.out(csr);
  },
});
