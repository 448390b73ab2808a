import { homedir } from "node:os";
import { isIP } from "node:net";
import { join, resolve } from "node:path";
import * as v from "valibot";
import { engineOf } from "../engines/registry.ts";
import { AGENT_UNIT_TEXT } from "../onboard/agent-unit.ts";
import { binariesOf } from "../onboard/binary.ts";
import { credentialsOf } from "../onboard/keys.ts";
import { onboard, type OnboardOptions, type Reporter } from "../onboard/onboard.ts";
import type { NamedEngine } from "../onboard/step.ts";
import { INSTALLABLE_KINDS, NodeId } from "../protocol/ids.ts";
import { VERSION } from "../protocol/version.ts";
import { nodeColumns } from "./ctl/nodes.ts";
import { duration } from "./duration.ts";
import { command } from "./frame.ts";
import { printable, table } from "./output.ts";
import { usageError } from "./parse.ts";
import { askSecret } from "./secret.ts";
import type { FlagSpecs, FlagValues, Io } from "./spec.ts";

/** Flags of onboarding besides who the node is and where. */
export const onboardFlags = {
  server: { type: "list", value: "URL", about: "a server the agent dials, https://host:port; repeatable" },
  binary: { type: "list", value: "FILE", about: "llmgw for the node's architecture; the release's beside this program when absent" },
  fabric: { type: "list", value: "NAME[:ADAPTER,...]", about: "an InfiniBand fabric the node is on, and its adapters there" },
  "nvidia-smi": { type: "string", value: "PATH", about: "nvidia-smi on the node, when it is in no usual place" },
  "ib-root": { type: "string", value: "DIR", about: "InfiniBand devices on the node; /sys/class/infiniband when absent" },
  "llamacpp-bin": { type: "string", value: "PATH", about: "a llama-server on the node to use; it must answer there" },
  "vllm-bin": { type: "string", value: "PATH", about: "a vllm on the node to use; it must answer there" },
  "sglang-python": { type: "string", value: "PATH", about: "the Python on the node that has SGLang; it must answer there" },
  "ssh-user": { type: "string", value: "USER", default: "root", about: "whom to log in as; others than root need sudo without a password" },
  "ssh-port": { type: "number", value: "PORT", default: 22, min: 1, max: 65_535, about: "port of ssh on the node" },
  "ssh-key": { type: "string", value: "FILE", about: "key to log in with; the agent's and the usual ones when absent" },
  "known-hosts": { type: "string", value: "FILE", about: "known host keys; ~/.ssh/known_hosts and the system's when absent" },
  wait: { type: "string", value: "TIME", default: "5m", about: "how long a machine that is not up yet is waited for" },
  ca: { type: "string", value: "DIR", default: "/etc/llmgw/ca", about: "the authority's folder" },
  renew: { type: "boolean", about: "issue a new certificate even when the node's is good" },
  "dry-run": { type: "boolean", about: "look at the machine, say what would be done, and change nothing" },
} as const satisfies FlagSpecs;

/** Flags that name a place on the node. */
const NODE_PATH_FLAGS = ["llamacpp-bin", "vllm-bin", "sglang-python", "nvidia-smi", "ib-root"] as const;

/** Steps with their seconds, on stderr. */
export function stepReporter(io: Io): Reporter {
  const line = (first: string, name: string, text: string) => io.err(`${first.padStart(7)}  ${name.padEnd(11)}  ${printable(text)}`);
  return {
    step: (name, text, length_ms) => line(length_ms === null ? "-" : `${(length_ms / 1_000).toFixed(2)} s`, name, text),
    note: (text) => line("", "", text),
  };
}

interface Who {
  readonly node: string;
  readonly address: string;
}

/** @throws OperatorError E_USAGE when a node cannot be made of what was typed */
function refuseWrongWords(path: string, { node, address }: Who, flags: FlagValues<typeof onboardFlags>): void {
  if (!v.safeParse(NodeId, node).success)
    throw usageError(path, `"${node}" cannot be a node id`, "it takes 1-63 of a-z 0-9 -, not starting or ending with -");
  if (isIP(address) === 0)
    throw usageError(path, `"${address}" is not an IP address`, "a node is reached by its address, so that it needs no name service");
  if (flags.server.length === 0)
    throw usageError(path, "--server is missing", "the agent must know whom to dial", "--server https://ADDRESS:7443");
  for (const url of flags.server)
    if (!/^https:\/\/[^/\s]+\/?$/.test(url)) throw usageError(path, `--server cannot be "${url}"`, "it is https://host:port");
  for (const flag of NODE_PATH_FLAGS) {
    const place = flags[flag] ?? "/";
    if (!place.startsWith("/")) throw usageError(path, `--${flag} cannot be "${place}"`, "it is a path on the node, and begins with /");
    if (/^\/(var\/)?tmp(\/|$)/.test(place))
      throw usageError(path, `--${flag} cannot be below /tmp`, "the agent has a /tmp of its own, and would not see it");
  }
}

/**
 * What onboarding needs, from its flags.
 * @throws OperatorError E_USAGE, E_FILE, E_CONFIG, E_SSH (no key to log in with)
 */
export async function onboardOptions(path: string, who: Who, flags: FlagValues<typeof onboardFlags>, io: Io): Promise<OnboardOptions> {
  refuseWrongWords(path, who, flags);
  const home = homedir();
  const { credentials, left_out } = await credentialsOf({
    key_file: flags["ssh-key"] === undefined ? null : resolve(io.cwd, flags["ssh-key"]),
    agent: io.env["SSH_AUTH_SOCK"] || null,
    home,
    passphrase: (file) => askSecret(`passphrase of ${file}: `),
  });
  const report = stepReporter(io);
  for (const key of left_out) report.note(`not offered: ${key}`);
  const paths = { llamacpp: flags["llamacpp-bin"], vllm: flags["vllm-bin"], sglang: flags["sglang-python"] };
  const engines = INSTALLABLE_KINDS.flatMap((kind): NamedEngine[] => {
    const path = paths[kind];
    return path === undefined ? [] : [{ kind, argv: [path, ...engineOf(kind).version_args] }];
  });
  const known = flags["known-hosts"];
  const { node, address } = who;
  return {
    node,
    address,
    servers: flags.server,
    ssh: {
      host: address,
      port: flags["ssh-port"],
      user: flags["ssh-user"],
      credentials,
      known_hosts: known === undefined ? [join(home, ".ssh", "known_hosts"), "/etc/ssh/ssh_known_hosts"] : [resolve(io.cwd, known)],
    },
    wait_ms: duration("wait", flags.wait),
    binaries: await binariesOf({
      given: flags.binary.map((file) => resolve(io.cwd, file)),
      own: Bun.isStandaloneExecutable ? process.execPath : null,
    }),
    binaries_given: flags.binary.length > 0,
    config: {
      node,
      servers: flags.server,
      address,
      nvidia_smi: flags["nvidia-smi"],
      fabrics: flags.fabric.length > 0 ? flags.fabric : undefined,
      ib_root: flags["ib-root"],
      llamacpp_bin: paths.llamacpp,
      vllm_bin: paths.vllm,
      sglang_python: paths.sglang,
    },
    engines,
    copies: [],
    ca_folder: resolve(io.cwd, flags.ca),
    unit: AGENT_UNIT_TEXT,
    renew: flags.renew,
    dry_run: flags["dry-run"],
    report,
  };
}

export const onboardCommand = command({
  name: "onboard",
  about: "Makes a machine that ssh reaches a node of the fleet, and does only what is missing",
  examples: [
    "llmgw onboard --node llmgw-node05 --addr 10.0.0.145 --server https://10.0.0.140:7443",
    "llmgw onboard --node llmgw-node05 --addr 10.0.0.145 --server https://10.0.0.140:7443 --renew",
    "llmgw onboard --node gpu-1 --addr 10.0.0.7 --server https://10.0.0.140:7443 --ssh-user debian --fabric ib-a --dry-run",
  ],
  flags: {
    node: { type: "string", value: "ID", required: true, about: "node id; the machine's host name must be the same" },
    addr: { type: "string", value: "IP", required: true, about: "the machine's address" },
    ...onboardFlags,
  },
  args: [],
  run: async ({ flags, io }) => {
    const began_ms = performance.now();
    const options = await onboardOptions("llmgw onboard", { node: flags.node, address: flags.addr }, flags, io);
    options.report.note(`llmgw ${VERSION} makes ${flags.addr} the node ${flags.node}`);
    const node = await onboard(options);
    const seconds = ((performance.now() - began_ms) / 1_000).toFixed(1);
    if (node === null) return io.err("nothing was changed");
    io.out(table(nodeColumns(Date.now()), [node]).join("\n"));
    io.err(`${flags.node} is a node, after ${seconds} s`);
  },
});
