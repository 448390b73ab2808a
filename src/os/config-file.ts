import { access, constants } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import * as v from "valibot";
import { Catalog } from "../protocol/catalog.ts";
import { AgentConfig, ENGINE_PATH_KEYS, ServerConfig } from "../protocol/config.ts";
import { OperatorError } from "../protocol/errors.ts";
import { readYaml } from "./yaml.ts";

/** Where an agent's configuration is when no other file is named. */
export const AGENT_FILE = "/etc/llmgw/agent.yaml";

type Pair = { readonly cert: string; readonly key: string };

/** Reads `server.yaml`; relative paths become absolute, from the file's folder. @throws OperatorError E_CONFIG, E_FILE */
export async function loadServerConfig(path: string): Promise<ServerConfig> {
  const config = await readYaml(path, ServerConfig, "the server's configuration");
  const at = (relative: string) => resolve(dirname(resolve(path)), relative);
  const pair = ({ cert, key }: Pair) => ({ cert: at(cert), key: at(key) });
  const { tls, gateway } = config;
  return {
    ...config,
    tls: { ca: at(tls.ca), ...pair(tls) },
    state: at(config.state),
    run: at(config.run),
    catalog: at(config.catalog),
    gateway: { ...gateway, ...(gateway.tls && { tls: pair(gateway.tls) }), identity: pair(gateway.identity) },
  };
}

/**
 * Reads `agent.yaml`, with flags laid over it.
 * @param path null when everything is given by flags
 * @param flags keys of the file; their relative paths are relative to `cwd`
 * @throws OperatorError E_CONFIG, E_FILE
 */
export async function loadAgentConfig(path: string | null, flags: Readonly<Record<string, unknown>>, cwd: string): Promise<AgentConfig> {
  const given = Object.fromEntries(Object.entries(flags).filter(([, value]) => value !== undefined));
  const here = absolute(given, cwd);
  const file = path === null ? null : resolve(cwd, path);
  const base = dirname(file ?? AGENT_FILE);
  const config = file === null ? DEFAULT_AGENT : await readYaml(file, AgentConfig, "the agent's configuration");
  const merged: Record<string, unknown> = { ...absolute(config, base), ...here };
  // Of what has parts, a flag replaces only the part it names.
  for (const part of ["tls", "log"] as const)
    merged[part] = { ...absolute({ [part]: config[part] }, base)[part], ...(here[part] as object | undefined) };
  const result = v.safeParse(AgentConfig, merged);
  if (result.success) return result.output;
  const first = result.issues[0];
  const key = v.getDotPath(first)?.replace(/\.\d+$/, "") ?? "";
  const flag = `--${["servers", "fabrics"].includes(key) ? key.slice(0, -1) : key.replaceAll(/[._]/g, "-")}`;
  if (key in merged)
    throw new OperatorError("E_CONFIG", "the agent's flags are not usable", `${flag}: ${first.message}`, "see llmgw agent --help");
  throw new OperatorError(
    "E_CONFIG",
    `the agent needs ${flag}`,
    "neither a flag nor agent.yaml names it",
    `give ${flag}, or a file with --config (${AGENT_FILE} is read when it is there)`,
  );
}

/** What an agent without a file starts from: all that has a default. */
const DEFAULT_AGENT = (() => {
  const { servers: _servers, address: _address, ...defaults } = v.parse(AgentConfig, { servers: ["https://none"], address: "127.0.0.1" });
  return defaults;
})();

/**
 * What an agent on this machine goes by, its paths absolute; the defaults where there is no file, or none that this user may
 * read.
 * @throws OperatorError E_CONFIG
 */
export async function agentConfigHere(file = AGENT_FILE): Promise<typeof DEFAULT_AGENT & Partial<AgentConfig>> {
  const readable = await access(file, constants.R_OK).then(
    () => true,
    () => false,
  );
  return readable ? loadAgentConfig(file, {}, "/") : absolute(DEFAULT_AGENT, dirname(file));
}

/** Keys of agent.yaml that hold paths. */
const AGENT_PATHS = ["state", "run", "nvidia_smi", "ib_root", ...Object.values<string>(ENGINE_PATH_KEYS)];

function absolute<T extends Readonly<Record<string, unknown>>>(config: T, base: string): T {
  const at = (value: unknown) => (typeof value === "string" ? resolve(base, value) : value);
  const resolved = Object.entries(config).map(([key, value]) => {
    if (AGENT_PATHS.includes(key)) return [key, at(value)];
    if (key === "tls" && typeof value === "object" && value !== null)
      return [key, Object.fromEntries(Object.entries(value).map(([name, file]) => [name, at(file)]))];
    return [key, value];
  });
  return Object.fromEntries(resolved) as T;
}

/** Reads the catalog. @throws OperatorError E_CONFIG, E_FILE */
export function loadCatalog(path: string): Promise<Catalog> {
  return readYaml(path, Catalog, "the catalog");
}
