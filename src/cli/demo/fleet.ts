import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { ownProgram } from "../../os/program.ts";
import { CreatedKey, KeyList, ModelList, NodeList, ReloadAnswer, ReplicaList, StatusView } from "../../protocol/admin-api.ts";
import type { Catalog } from "../../protocol/catalog.ts";
import { messageOf, OperatorError } from "../../protocol/errors.ts";
import { DEMO_POLL_MS, DEMO_READY_MS } from "../../protocol/limits.ts";
import { makeAdminClient, type AdminClient } from "../admin-client.ts";
import { chooseContext, readContexts } from "../context.ts";
import { diedError, startChild, type Child } from "./child.ts";
import { writeCatalog, type DemoFolder } from "./folder.ts";

const KEY_NAME = "demo";

interface DemoFleet {
  readonly client: AdminClient;
  readonly children: readonly Child[];
  /** Rejects with an OperatorError when a child ends on its own. */
  readonly broken: Promise<never>;
}

export interface FleetOptions {
  readonly folder: DemoFolder;
  readonly env: Readonly<Record<string, string | undefined>>;
  /** Whether the folder stays after the demo. */
  readonly kept: boolean;
  /** Aborts when the demo is to end: children that end then are meant to. */
  readonly signal: AbortSignal;
  readonly onStart: (child: Child) => void;
  readonly say: (line: string) => void;
}

/** A request of the demo itself failed because the server does not listen yet. */
const notYet = (error: unknown) => error instanceof OperatorError && ["E_UNREACHABLE", "E_TIMEOUT"].includes(error.code);

async function startOne(options: FleetOptions, name: string, words: string[]): Promise<Child> {
  const [program, ...rest] = ownProgram();
  const child = await startChild({
    name,
    argv: [program, ...rest, ...words, "--owner-pid", String(process.pid)],
    log: join(options.folder.logs, `${name.replaceAll(" ", "-")}.log`),
    env: options.env,
  });
  options.onStart(child);
  return child;
}

function watch(child: Child, { kept, signal }: FleetOptions): Promise<never> {
  const broken = child.ended.then(async (how) => {
    if (signal.aborted) return new Promise<never>(() => {});
    throw await diedError(child, how, kept);
  });
  // Whoever waits for it sees the error; until then it is not an unhandled one.
  broken.catch(() => {});
  return broken;
}

/** Starts the server, then the agents once it answers. */
export async function startFleet(options: FleetOptions): Promise<DemoFleet> {
  const { folder, say } = options;
  const server = await startOne(options, "server", ["server", "--config", folder.server_config]);
  const server_broken = watch(server, options);
  const client = await makeAdminClient(chooseContext(await readContexts(folder.ctl_config), undefined, {}, folder.ctl_config));
  await Promise.race([
    server_broken,
    until("the server", async () => {
      await client.get("/admin/v1/status", StatusView);
      return null;
    }),
  ]);
  say("server started");
  const agents = await Promise.all(
    folder.nodes.map(({ id, config }) => startOne(options, `agent of ${id}`, ["agent", "--config", config])),
  );
  const broken = Promise.race([server_broken, ...agents.map((agent) => watch(agent, options))]);
  broken.catch(() => {});
  return { client, children: [server, ...agents], broken };
}

/** Looks again and again until the look says nothing is missing (null), or what is missing stays so for too long. */
async function until(subject: string, look: () => Promise<string | null>, say: (line: string) => void = () => {}): Promise<void> {
  const end_ms = performance.now() + DEMO_READY_MS;
  for (let last = ""; ;) {
    const missing = await look().catch((error: unknown) => {
      if (notYet(error)) return messageOf(error);
      throw error;
    });
    if (missing === null) return;
    if (missing !== last) say(missing);
    last = missing;
    if (performance.now() > end_ms)
      throw new OperatorError("E_TIMEOUT", `${subject} did not become ready`, missing, "run it again with --keep DIR and see DIR/logs");
    await sleep(DEMO_POLL_MS);
  }
}

/** Waits until all nodes have joined. */
export async function waitNodes(client: AdminClient, wanted_nodes: number, say: (line: string) => void): Promise<void> {
  await until("the nodes", async () => {
    const { items } = await client.get("/admin/v1/nodes", NodeList);
    const joined = items.filter(({ state }) => state === "ready").length;
    return joined >= wanted_nodes ? null : `${joined} of ${wanted_nodes} nodes joined`;
  });
  say(`${wanted_nodes} ${wanted_nodes === 1 ? "node" : "nodes"} joined`);
}

/** Makes the server serve a catalog, and waits until every model has its replicas. */
export async function serveCatalog(client: AdminClient, folder: DemoFolder, catalog: Catalog, say: (line: string) => void): Promise<void> {
  await writeCatalog(folder.root, catalog);
  await client.send("POST", "/admin/v1/reload", {}, ReloadAnswer);
  await until(
    "the models",
    async () => {
      const { items } = await client.get("/admin/v1/models", ModelList);
      const [short] = items.filter(({ ready, wanted }) => ready < wanted);
      if (!short) return items.length === 0 ? "the catalog is not read yet" : null;
      await refuseIfHopeless(client, short.name);
      return `${short.name}: ${short.ready} of ${short.wanted} replicas ready`;
    },
    say,
  );
}

/** A model that failed twice is not worth waiting for: its engine's last lines say why. */
async function refuseIfHopeless(client: AdminClient, model: string): Promise<void> {
  const { items } = await client.get("/admin/v1/replicas", ReplicaList);
  const failed = items.find((replica) => replica.model === model && replica.failures >= 2);
  if (!failed) return;
  const lines = failed.last_lines.map((line) => `\n    ${line}`).join("");
  throw new OperatorError(
    "E_ENGINE",
    `${model} does not start`,
    `${failed.reason}${lines}`,
    "give another --model, or another --llama-server",
  );
}

/** The key kept from an earlier demo while the server still honours one of that name, else a new one. */
export async function demoKey(client: AdminClient, kept: string | undefined): Promise<string> {
  const { items } = await client.get("/admin/v1/keys", KeyList);
  if (kept !== undefined && items.some(({ name, revoked_ms }) => name === KEY_NAME && revoked_ms === null)) return kept;
  return (await client.send("POST", "/admin/v1/keys", { name: KEY_NAME }, CreatedKey)).key;
}
