import { randomUUID } from "node:crypto";
import { existsSync } from "node:fs";
import { resolve } from "node:path";
import { readYaml } from "../os/yaml.ts";
import { ProvisionFile } from "../protocol/config.ts";
import { provision, type Made, type ProvisionOptions, type ProvisionReporter } from "../provision/provision.ts";
import { settingsOf } from "../provision/settings.ts";
import { duration } from "./duration.ts";
import { command } from "./frame.ts";
import { stepReporter } from "./onboard.ts";
import { printable } from "./output.ts";
import { keysOf, PROVISION_FILE, transportOf } from "./provision-sources.ts";
import type { FlagSpecs, FlagValues, Io } from "./spec.ts";

/** Flags of making a machine, besides its name and address. */
export const provisionFlags = {
  vmid: { type: "number", value: "N", min: 100, about: "number of the machine; the last part of its address when absent" },
  cores: { type: "number", value: "N", min: 1, about: "processor cores; 8 when absent" },
  memory: { type: "number", value: "MIB", min: 512, about: "memory; 32768 when absent" },
  disk: { type: "number", value: "GIB", min: 8, about: "disk; 60 when absent" },
  cpu: { type: "string", value: "TYPE", about: "processor type; host when absent, and others cost much" },
  gateway: { type: "string", value: "IP", about: "way out of its network; the bridge's when absent" },
  bridge: { type: "string", value: "NAME", about: "bridge it is on; the one in its network when absent" },
  vlan: { type: "number", value: "TAG", min: 1, max: 4_094, about: "VLAN it is in" },
  mtu: { type: "number", value: "BYTES", min: 576, about: "MTU of its network card; the bridge's when absent" },
  storage: { type: "string", value: "NAME", about: "where its disk is kept; the one with most room when absent" },
  image: { type: "string", value: "URL|VOLUME", about: "cloud image; Debian 13's, pinned by its digest, when absent" },
  "image-checksum": { type: "string", value: "sha512:HEX", about: "digest of the image at a URL" },
  "ssh-keys": { type: "string", value: "FILE", about: "more public keys that may log in, beside this host's own" },
  user: { type: "string", value: "USER", about: "user the keys are for; root when absent" },
  hostpci: { type: "list", value: "MAPPING", about: "a mapped PCI device it gets, a GPU or an InfiniBand card; repeatable" },
  "pve-host": { type: "string", value: "URL", about: "Proxmox; the host's own pvesh when absent and this is one" },
  "pve-node": { type: "string", value: "NAME", about: "node of the cluster that runs it" },
  "pve-token-file": { type: "string", value: "FILE", about: "file with an API token, USER@REALM!NAME=UUID" },
  "pve-user": { type: "string", value: "USER@REALM", about: "user to log in as, with --pve-password-file" },
  "pve-password-file": { type: "string", value: "FILE", about: "file with that user's password" },
  "pve-ca": { type: "string", value: "FILE", about: "authority of Proxmox's certificate; the system's when absent" },
  "pve-fingerprint": { type: "string", value: "SHA256", about: "fingerprint of Proxmox's certificate, instead of an authority" },
  timeout: { type: "string", value: "TIME", about: "how long making the machine may take; 10m when absent" },
  "provision-config": { type: "string", value: "FILE", about: `file with these keys (_ for -); ${PROVISION_FILE} when it is there` },
} as const satisfies FlagSpecs;

function reporterOf(io: Io): ProvisionReporter {
  const steps = stepReporter(io);
  return {
    step: (name, text, length_ms) => steps.step(name, text, length_ms),
    note: (text) => steps.note(text),
    call: (method, path, parameters) => {
      const shown = Object.entries(parameters).map(([name, value]) => `  ${name}=${String(value)}`);
      io.out([`${method} ${path}`, ...shown].map(printable).join("\n"));
    },
  };
}

/** The machine that is wanted, and the way to make it. */
type Wish = Omit<ProvisionOptions, "signal" | "run">;

/** What making a machine needs, from flags, environment and file. @throws OperatorError */
export async function provisionOptions(
  who: { readonly name: string; readonly ip: string },
  flags: FlagValues<typeof provisionFlags>,
  dry_run: boolean,
  io: Io,
): Promise<Wish> {
  const named = flags["provision-config"];
  const path = named === undefined ? PROVISION_FILE : resolve(io.cwd, named);
  const file = named !== undefined || existsSync(path) ? await readYaml(path, ProvisionFile, "the configuration of new machines") : {};
  const byKey = Object.fromEntries(Object.entries(flags).map(([name, value]) => [name.replaceAll("-", "_"), value]));
  const settings = settingsOf(who, byKey, io.env, file);
  const report = reporterOf(io);
  const transport = await transportOf(settings, { cwd: io.cwd, note: (text) => report.note(text) });
  const keys = await keysOf(settings, io.cwd);
  report.note(`${keys.length} ${keys.length === 1 ? "key" : "keys"} may log in as ${settings.user}:`);
  for (const { line, fingerprint } of keys) report.note(`  ${fingerprint} ${line.split(" ").slice(2).join(" ")}`);
  return { settings, transport, keys, timeout_ms: duration("timeout", settings.timeout ?? "10m"), dry_run, report };
}

/**
 * Makes the machine; null after a dry run. Whoever asks it to stop is told what was left; who asks a second time is obeyed at once.
 * @throws OperatorError
 */
export async function makeMachine(options: Wish): Promise<Made | null> {
  options.report.note(`making ${options.settings.name} at ${options.settings.address} by ${options.transport.shown}`);
  const over = new AbortController();
  const stop = () => {
    over.abort();
    options.report.note("asked to stop: a call that changes something is waited for; ask again to end at once");
  };
  for (const signal of ["SIGINT", "SIGTERM"] as const) process.once(signal, stop);
  try {
    return await provision({ ...options, signal: over.signal, run: randomUUID() });
  } finally {
    for (const signal of ["SIGINT", "SIGTERM"] as const) process.off(signal, stop);
  }
}

export const provisionCommand = command({
  name: "provision",
  about: "Makes a virtual machine on Proxmox that ssh reaches",
  examples: [
    "llmgw provision --name llmgw-node05 --ip 10.0.0.145/24",
    "llmgw provision --name gpu-1 --ip 10.0.0.150/24 --hostpci h100-0 --pve-host https://pve1:8006 --pve-token-file token",
    "llmgw provision --name llmgw-node05 --ip 10.0.0.145/24 --dry-run",
  ],
  flags: {
    name: { type: "string", value: "ID", required: true, about: "name of the machine, its host name and its node id" },
    ip: { type: "string", value: "ADDRESS/BITS", required: true, about: "its address, with the bits of its network" },
    ...provisionFlags,
    "dry-run": { type: "boolean", about: "look, and print the calls that would be made" },
  },
  args: [],
  run: async ({ flags, io }) => {
    const began_ms = performance.now();
    const made = await makeMachine(await provisionOptions(flags, flags, flags["dry-run"], io));
    if (made === null) return io.err("nothing was made");
    io.out(`${flags.name} ${made.vmid} ${made.node}`);
    io.err(`${flags.name} is made and starts, after ${((performance.now() - began_ms) / 1_000).toFixed(1)} s`);
  },
});
