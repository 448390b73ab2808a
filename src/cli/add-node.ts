import { stat } from "node:fs/promises";
import { join, resolve } from "node:path";
import { forgetHost, hostName } from "../onboard/known-hosts.ts";
import { onboard } from "../onboard/onboard.ts";
import type { Copy } from "../onboard/step.ts";
import { nodeColumns } from "./ctl/nodes.ts";
import { command } from "./frame.ts";
import { onboardFlags, onboardOptions } from "./onboard.ts";
import { table } from "./output.ts";
import { usageError } from "./parse.ts";
import { makeMachine, provisionFlags, provisionOptions } from "./provision.ts";
import type { Io } from "./spec.ts";

const PATH = "llmgw add-node";

/** Where an engine of `--llamacpp-bin` is taken from, and the path the node's agent uses. */
interface EnginePlace {
  readonly path: string;
  readonly copies: readonly Copy[];
  /** Which of the two it was, for the operator. */
  readonly text: string;
}

/**
 * A folder of a llama.cpp release on this machine is copied, with its libraries; anything else is a path on the node.
 * @throws OperatorError E_USAGE when it is a folder here without a llama-server
 */
export async function engineAt(given: string, cwd: string): Promise<EnginePlace> {
  const here = resolve(cwd, given);
  const kind = await stat(here).catch(() => null);
  if (!kind?.isDirectory()) return { path: given, copies: [], text: `--llamacpp-bin ${given} is a path on the node` };
  const path = join(here, "llama-server");
  if (!(await Bun.file(path).exists()))
    throw usageError(PATH, `there is no llama-server in ${here}`, "a folder is copied only when it is a release of llama.cpp");
  return { path, copies: [{ folder: here }], text: `--llamacpp-bin ${here} is a folder here: the node gets a copy of all of it` };
}

/** The address of `10.0.0.145/24`, or of an address alone. */
export function addressOf(cidr: string): string {
  return cidr.replace(/\/\d+$/, "");
}

async function optionsOf(flags: Parameters<typeof onboardOptions>[2] & { name: string; ip: string }, io: Io) {
  const place = flags["llamacpp-bin"] === undefined ? null : await engineAt(flags["llamacpp-bin"], io.cwd);
  const who = { node: flags.name, address: addressOf(flags.ip) };
  const options = await onboardOptions(PATH, who, { ...flags, "llamacpp-bin": place?.path }, io);
  if (place !== null) options.report.note(place.text);
  return { ...options, copies: place?.copies ?? [] };
}

export const addNodeCommand = command({
  name: "add-node",
  about: "Adds a node to the fleet: makes the machine, and makes a node of it",
  examples: [
    "llmgw add-node --name llmgw-node05 --ip 10.0.0.145/24 --server https://10.0.0.140:7443",
    "llmgw add-node --name llmgw-node05 --ip 10.0.0.145/24 --server https://10.0.0.140:7443 --cores 8 --memory 32768 --disk 60",
    "llmgw add-node --onboard-only --name gpu-1 --ip 10.0.0.7 --server https://10.0.0.140:7443 --llamacpp-bin /opt/llama.cpp",
  ],
  flags: {
    name: { type: "string", value: "ID", required: true, about: "node id, host name and name of the machine" },
    ip: { type: "string", value: "ADDRESS/BITS", required: true, about: "its address, with the bits of its network" },
    "provision-only": { type: "boolean", about: "only make the machine" },
    "onboard-only": { type: "boolean", about: "the machine is there; only make it a node" },
    ...provisionFlags,
    ...onboardFlags,
    "ssh-user": { type: "string", value: "USER", about: "whom to log in as; that of --user when absent" },
    "llamacpp-bin": {
      type: "string",
      value: "PATH",
      about: "a llama-server on the node, or a folder of a llama.cpp release here: it is copied",
    },
  },
  args: [],
  run: async ({ flags, io }) => {
    const began_ms = performance.now();
    const seconds = () => ((performance.now() - began_ms) / 1_000).toFixed(1);
    if (flags["provision-only"] && flags["onboard-only"])
      throw usageError(
        PATH,
        "--provision-only and --onboard-only exclude each other",
        "one half was asked for twice",
        "leave out both for the whole",
      );
    const user = flags["ssh-user"] ?? flags.user ?? (io.env["LLMGW_USER"] || "root");
    // What onboarding needs is looked at before a machine is made: a typing error must not cost one.
    const joining = flags["provision-only"] ? null : await optionsOf({ ...flags, "ssh-user": user }, io);
    if (!flags["onboard-only"]) {
      const made = await makeMachine(await provisionOptions(flags, flags, flags["dry-run"], io));
      if (made === null) return io.err("nothing was made; what onboarding would do is seen once the machine is there");
      io.err(`${flags.name} is made and starts, after ${seconds()} s`);
      if (joining === null) return io.out(`${flags.name} ${made.vmid} ${made.node}`);
      // Whoever had the address before is not whom we made just now.
      const { host, port, known_hosts } = joining.ssh;
      const gone = await forgetHost(known_hosts[0], hostName(host, port));
      if (gone > 0) joining.report.note(`took the old host key of ${host} out of ${known_hosts[0]}: the machine is new`);
    }
    if (joining === null) return;
    const node = await onboard(joining);
    if (node === null) return io.err("nothing was changed");
    io.out(table(nodeColumns(Date.now()), [node]).join("\n"));
    io.err(`${flags.name} is a node, after ${seconds()} s`);
  },
});
