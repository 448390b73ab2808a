import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import * as v from "valibot";
import { stringify } from "yaml";
import { makePrivateFolder, readIfThere, writeAtomic } from "../../os/files.ts";
import type { Circumstances } from "../../pki/authority.ts";
import { isAlive, startTimeOf } from "../../os/process.ts";
import { parseYaml } from "../../os/yaml.ts";
import { messageOf, OperatorError } from "../../protocol/errors.ts";
import type { Catalog, ModelSpec } from "../../protocol/catalog.ts";
import { demoCertificates } from "./certificates.ts";
import { writeContexts } from "../context.ts";

/** What a demo folder remembers, so that a later demo can start from it, and that no two run in it. */
const Remembered = v.strictObject({
  gateway_port: v.number(),
  control_port: v.number(),
  key: v.optional(v.string()),
  owner: v.strictObject({ pid: v.number(), start_ticks: v.nullable(v.number()) }),
});
type Memory = Omit<Remembered, "owner">;
export type Remembered = v.InferOutput<typeof Remembered>;

const MEMORY = "demo.yaml";

interface DemoNode {
  readonly id: string;
  /** Its own loopback address, so that nodes do not share ports. */
  readonly address: string;
  readonly config: string;
}

/** All that a demo keeps on disk. */
export interface DemoFolder {
  readonly root: string;
  /** Sockets live apart from the rest: their paths have to be short. */
  readonly run: string;
  readonly logs: string;
  readonly server_config: string;
  readonly ctl_config: string;
  readonly nodes: readonly DemoNode[];
  readonly endpoint: string;
  readonly memory: Memory;
}

interface DemoPlan {
  readonly root: string;
  readonly run: string;
  readonly nodes: number;
  readonly gateway_port: number;
  readonly control_port: number;
  /** The key an earlier demo in this folder made. */
  readonly key: string | undefined;
  readonly llama_server: string | undefined;
  readonly circumstances: Circumstances;
}

/** A folder under the system's folder for temporary files that only this user can enter. */
export async function temporaryFolder(prefix: string): Promise<string> {
  try {
    return await mkdtemp(join(tmpdir(), prefix));
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot make a folder in ${tmpdir()}`, messageOf(error), "set TMPDIR to a folder of yours");
  }
}

/**
 * Makes a folder to keep, or takes up one that an earlier demo kept.
 * @throws OperatorError E_EXISTS when it holds something else
 */
export async function openKept(root: string): Promise<Remembered | null> {
  const names = await readdir(root).catch(() => []);
  const text = await readIfThere(join(root, MEMORY));
  if (text !== null) {
    const memory = parseYaml(text, join(root, MEMORY), Remembered, "what this demo folder remembers");
    const { pid, start_ticks } = memory.owner;
    if (!isAlive(pid) || startTimeOf(pid) !== start_ticks) return memory;
    throw new OperatorError(
      "E_EXISTS",
      `${root} is in use`,
      `a demo runs in it (process ${pid})`,
      "end that one first, or name another folder",
    );
  }
  if (names.length > 0) {
    throw new OperatorError(
      "E_EXISTS",
      `${root} is not used`,
      "it holds something that is not a demo's",
      "name an empty folder, or a new one, with --keep",
    );
  }
  await makePrivateFolder(root);
  return null;
}

/** Writes what the next demo in this folder has to know. */
export function remember(root: string, memory: Memory): Promise<void> {
  const owner = { pid: process.pid, start_ticks: startTimeOf(process.pid) };
  return writeAtomic(join(root, MEMORY), stringify({ ...memory, owner }), 0o600);
}

/** A model of a GGUF file, named after it. */
export function llamaModel(file: string): ModelSpec {
  const name = basename(file)
    .replace(/\.gguf$/i, "")
    .replaceAll(/[^A-Za-z0-9._-]+/g, "-")
    .replaceAll(/^[^A-Za-z0-9]+|[^A-Za-z0-9]+$/g, "")
    .slice(0, 80)
    .replace(/[^A-Za-z0-9]+$/, "");
  return { ...plainModel, name: name || "model", engine: "llamacpp", source: file };
}

const plainModel = { replicas: 1, nodes: 1, gpus: 0, embeddings: false, args: {} } as const;

/** The model of the simulated engine, a replica per node up to two. */
export const simModel = (nodes: number): ModelSpec => ({ ...plainModel, name: "sim-small", engine: "sim", replicas: Math.min(2, nodes) });

const nodeIds = (count: number): string[] => Array.from({ length: count }, (_, index) => `node-${index + 1}`);

/** 127.0.0.2 for the first node, and on. */
const nodeAddress = (index: number): string => `127.0.0.${index + 2}`;

async function writeNode(plan: DemoPlan, id: string, index: number): Promise<DemoNode> {
  const folder = join(plan.root, "nodes", id);
  const run = join(plan.run, `n${index + 1}`);
  for (const each of [folder, join(folder, "state"), run]) await makePrivateFolder(each);
  const address = nodeAddress(index);
  const config = join(folder, "agent.yaml");
  const settings = {
    node: id,
    servers: [`https://127.0.0.1:${plan.control_port}`],
    address,
    state: "state",
    run,
    ...(plan.llama_server === undefined ? {} : { llamacpp_bin: plan.llama_server }),
  };
  await writeAtomic(config, stringify({ ...settings, tls: { ca: "tls/ca.crt", cert: "tls/node.crt", key: "tls/node.key" } }), 0o600);
  return { id, address, config };
}

async function writeServer(plan: DemoPlan): Promise<string> {
  const folder = join(plan.root, "server");
  const run = join(plan.run, "s");
  for (const each of [folder, join(folder, "state"), run]) await makePrivateFolder(each);
  const settings = {
    listen: { control: `127.0.0.1:${plan.control_port}`, gateway: `127.0.0.1:${plan.gateway_port}` },
    tls: { ca: "tls/ca.crt", cert: "tls/server.crt", key: "tls/server.key" },
    gateway: { identity: { cert: "tls/gateway.crt", key: "tls/gateway.key" } },
    state: "state",
    run,
    catalog: "catalog.yaml",
    // Everything is on this machine already.
    engines: { llamacpp: "", vllm: "" },
  };
  const config = join(folder, "server.yaml");
  await writeAtomic(config, stringify(settings), 0o600);
  // The models come once all nodes have joined, so that replicas are spread over them.
  await writeCatalog(plan.root, { models: [] });
  return config;
}

/** Writes the catalog the server reads when it is told to. */
export const writeCatalog = (root: string, catalog: Catalog): Promise<void> =>
  writeAtomic(join(root, "server", "catalog.yaml"), stringify(catalog), 0o600);

/** Writes certificates, configurations and ctl's context: what an operator of a fleet would write by hand. */
export async function writeDemo(plan: DemoPlan): Promise<DemoFolder> {
  const { root, run, gateway_port, control_port, key } = plan;
  const logs = join(root, "logs");
  await makePrivateFolder(logs);
  const memory: Memory = { gateway_port, control_port, ...(key === undefined ? {} : { key }) };
  await remember(root, memory);
  const ids = nodeIds(plan.nodes);
  await demoCertificates(
    root,
    ids.map((id, index) => ({ id, address: nodeAddress(index) })),
    plan.circumstances,
  );
  const server_config = await writeServer(plan);
  const nodes: DemoNode[] = [];
  for (const [index, id] of ids.entries()) nodes.push(await writeNode(plan, id, index));
  const ctl_config = join(root, "ctl", "config.yaml");
  const context = { servers: [`https://127.0.0.1:${plan.control_port}`], ca: "ca.crt", cert: "admin.crt", key: "admin.key" };
  await writeContexts(ctl_config, { current: "demo", contexts: { demo: context } });
  return { root, run, logs, server_config, ctl_config, nodes, endpoint: `http://127.0.0.1:${gateway_port}`, memory };
}

/** Removes folders; one that is gone is no error. */
export async function removeFolders(...folders: string[]): Promise<void> {
  await Promise.all(folders.map((folder) => rm(folder, { recursive: true, force: true })));
}
