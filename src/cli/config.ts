import { parse } from "yaml";
import { record, string, unknown, type GenericSchema } from "valibot";
import { catalogFaults } from "../core/spec.ts";
import { argFaultsOf } from "../engines/registry.ts";
import { checkExposure } from "../gateway/gateway.ts";
import { parseFabric } from "../hardware/fabric-declaration.ts";
import { checkYaml, parseYaml, readConfigText } from "../os/yaml.ts";
import { Catalog, type ModelSpec } from "../protocol/catalog.ts";
import { AgentConfig, ProvisionFile, ServerConfig } from "../protocol/config.ts";
import { OperatorError } from "../protocol/errors.ts";
import { command, group } from "./frame.ts";

const KINDS = ["server", "agent", "catalog", "provision"] as const;
type Kind = (typeof KINDS)[number];

const SCHEMAS: Record<Kind, GenericSchema> = { server: ServerConfig, agent: AgentConfig, catalog: Catalog, provision: ProvisionFile };
/** Keys that only one kind of file has at its top. */
const TELLING_KEYS: Record<Kind, readonly string[]> = {
  server: ["listen", "catalog", "engines", "gateway"],
  agent: ["servers", "address", "node", "nvidia_smi", "fabrics", "ib_root", "llamacpp_bin", "engine_user"],
  catalog: ["models"],
  provision: ["pve_host", "pve_node", "pve_token_file", "pve_user", "cores", "disk", "bridge", "storage", "image", "hostpci"],
};

/** Which kind of file a text is, by its keys. Null when they do not tell. */
export function recognise(text: string): Kind | null {
  let value: unknown;
  try {
    value = parse(text, { logLevel: "silent" });
  } catch {
    return null;
  }
  if (typeof value !== "object" || value === null) return null;
  const keys = Object.keys(value);
  const hits = KINDS.filter((kind) => TELLING_KEYS[kind].some((key) => keys.includes(key)));
  return hits.length === 1 ? (hits[0] as Kind) : null;
}

function kindOf(text: string, file: string): Kind {
  const kind = recognise(text);
  if (kind) return kind;
  // A file that is not YAML at all is told where it breaks, whatever kind it was meant to be.
  parseYaml(text, file, record(string(), unknown()), "this file");
  throw new OperatorError("E_USAGE", `cannot tell what ${file} is`, "its keys do not say", `llmgw config check ${file} --kind server`);
}

/** @throws OperatorError E_CONFIG when no server would serve it, with every fault */
function checkServable(models: readonly ModelSpec[], file: string): void {
  const faults = [...catalogFaults(models), ...models.flatMap(argFaultsOf)];
  if (faults.length === 0) return;
  throw new OperatorError("E_CONFIG", `${file} cannot be served`, faults.join("; "), "correct these, then check it again");
}

const check = command({
  name: "check",
  about: "Checks a configuration or catalog file",
  examples: ["llmgw config check /etc/llmgw/server.yaml", "llmgw config check --kind catalog models.yaml"],
  flags: { kind: { type: "string", value: "KIND", choices: KINDS, about: "what the file is; recognised by its keys when absent" } },
  args: [{ name: "FILE", about: "the file" }],
  run: async ({ flags, args, io }) => {
    const file = args.FILE;
    const text = await readConfigText(file, file);
    const kind = flags.kind ?? kindOf(text, file);
    const { faults } = checkYaml(text, SCHEMAS[kind]);
    for (const fault of faults?.slice(1) ?? []) io.err(`${file}:${fault.line}:${fault.column}: ${fault.what}`);
    const subject = `this ${kind} file`;
    if (kind === "server") checkExposure(parseYaml(text, file, ServerConfig, subject));
    else if (kind === "agent") parseYaml(text, file, AgentConfig, subject).fabrics?.forEach((each) => parseFabric(each));
    else if (kind === "provision") parseYaml(text, file, ProvisionFile, subject);
    else checkServable(parseYaml(text, file, Catalog, subject).models, file);
    io.out(`${file}: ${kind} file, valid`);
  },
});

export const configCommands = group({ name: "config", about: "Checks configuration files", commands: () => [check] });
