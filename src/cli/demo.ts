import { randomBytes } from "node:crypto";
import { access, constants, stat } from "node:fs/promises";
import { join, resolve } from "node:path";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { NodeList, ReplicaList } from "../protocol/admin-api.ts";
import type { Catalog } from "../protocol/catalog.ts";
import type { AdminClient } from "./admin-client.ts";
import type { Child } from "./demo-child.ts";
import { demoKey, startFleet, waitReady } from "./demo-fleet.ts";
import {
  llamaModel,
  openKept,
  remember,
  removeFolders,
  simModel,
  temporaryFolder,
  writeDemo,
  type DemoFolder,
  type Remembered,
} from "./demo-folder.ts";
import { askQuestion, curlLine, type Question } from "./demo-question.ts";
import { endRanks, TAG } from "./demo-ranks.ts";
import { command } from "./frame.ts";
import { freePort } from "./free-port.ts";
import { table } from "./output.ts";
import type { Io } from "./spec.ts";

const QUESTION = "What does a fleet of inference machines need most?";

interface DemoFlags {
  readonly nodes: number;
  readonly "llama-server": string | undefined;
  readonly model: string | undefined;
  readonly port: number | undefined;
  readonly keep: string | undefined;
}

/** @throws OperatorError E_FILE when it is not a file, or not one that can be started */
async function checkFile(flag: string, path: string, mode: number): Promise<string> {
  try {
    await access(path, mode);
    if ((await stat(path)).isFile()) return path;
  } catch (error) {
    throw new OperatorError(
      "E_FILE",
      `--${flag} ${path} cannot be used`,
      messageOf(error),
      `check the path, and that you may ${mode === constants.X_OK ? "run" : "read"} it`,
    );
  }
  throw new OperatorError("E_FILE", `--${flag} ${path} cannot be used`, "it is not a file", `name a file with --${flag}`);
}

/** What the demo serves. @throws OperatorError when only half of an engine is given, or a file is missing */
async function engineOf(flags: DemoFlags, io: Io): Promise<{ catalog: Catalog; llama_server: string | undefined }> {
  const { "llama-server": program, model } = flags;
  if (program === undefined && model === undefined) return { catalog: { models: [simModel(flags.nodes)] }, llama_server: undefined };
  if (program === undefined || model === undefined) {
    const [given, missing, value] = program === undefined ? ["model", "llama-server", "PATH"] : ["llama-server", "model", "FILE.gguf"];
    throw new OperatorError(
      "E_USAGE",
      `--${given} needs --${missing} too`,
      "an engine and a model go together",
      `add --${missing} ${value}`,
    );
  }
  const llama_server = await checkFile("llama-server", resolve(io.cwd, program), constants.X_OK);
  const file = await checkFile("model", resolve(io.cwd, model), constants.R_OK);
  return { catalog: { models: [llamaModel(file)] }, llama_server };
}

/** A port kept from before when it still is free, else any. */
const portLike = async (kept: number | undefined): Promise<number> =>
  kept === undefined ? freePort(0) : freePort(kept).catch(() => freePort(0));

/** Resolves when someone asks the demo to end: 130 for Ctrl-C, 0 for SIGTERM. A second time ends it at once. */
function interruption(): Promise<number> {
  return new Promise((done) => {
    let asked = false;
    const ask = (code: number) => {
      // What is left notices that its owner is gone and ends too.
      if (asked) process.exit(code);
      asked = true;
      done(code);
    };
    process.on("SIGINT", () => ask(130));
    process.on("SIGTERM", () => ask(0));
    process.on("SIGHUP", () => ask(0));
  });
}

async function clusterState(client: AdminClient): Promise<string> {
  const [nodes, replicas] = await Promise.all([client.get("/admin/v1/nodes", NodeList), client.get("/admin/v1/replicas", ReplicaList)]);
  const node_lines = table(
    [
      { title: "NODE", cell: (node) => node.id },
      { title: "STATE", cell: (node) => node.state },
      { title: "ADDRESS", cell: (node) => node.address },
      {
        title: "ENGINES",
        cell: (node) =>
          node.inventory.engines
            .filter(({ offered }) => offered)
            .map(({ kind }) => kind)
            .join(", "),
      },
    ],
    nodes.items,
  );
  const replica_lines = table(
    [
      { title: "REPLICA", cell: (replica) => replica.id },
      { title: "STATE", cell: (replica) => replica.state },
      { title: "NODES", cell: (replica) => replica.ranks.map(({ node }) => node).join(" ") },
    ],
    replicas.items,
  );
  return [...node_lines, "", ...replica_lines].join("\n");
}

function summary(folder: DemoFolder, question: Question, answer: string, state: string): string {
  return [
    `endpoint  ${folder.endpoint}/v1`,
    `key       ${question.key}`,
    `model     ${question.model}`,
    `ctl       LLMGW_CONFIG=${folder.ctl_config} llmgw ctl nodes`,
    `logs      ${folder.logs}`,
    "",
    state,
    "",
    `question  ${question.text}`,
    `answer    ${answer.trim().replaceAll(/\s+/g, " ")}`,
    "",
    "ask it yourself:",
    curlLine(question),
  ].join("\n");
}

/** Everything between an open folder and the end of the demo; leaves the folder as it is. */
async function runIn(
  root: string,
  run: string,
  memory: Remembered | null,
  flags: DemoFlags,
  io: Io,
  interrupted: Promise<number>,
): Promise<number> {
  const started_ms = performance.now();
  const { catalog, llama_server } = await engineOf(flags, io);
  const gateway_port = flags.port === undefined ? await portLike(memory?.gateway_port) : await freePort(flags.port);
  const control_port = await portLike(memory?.control_port);
  const circumstances = { now_ms: Date.now(), random: (bytes: number) => new Uint8Array(randomBytes(bytes)) };
  const folder = await writeDemo({ root, run, nodes: flags.nodes, gateway_port, control_port, catalog, llama_server, circumstances });
  const tag = run;
  const ending = new AbortController();
  const children: Child[] = [];
  const serve = async (): Promise<number> => {
    const say = (line: string) => {
      if (!ending.signal.aborted) io.err(line);
    };
    const fleet = await startFleet({
      folder,
      env: { ...io.env, [TAG]: tag },
      kept: flags.keep !== undefined,
      signal: ending.signal,
      onStart: (child) => children.push(child),
      say,
    });
    const ready = async (): Promise<void> => {
      await waitReady(fleet.client, flags.nodes, say);
      const key = await demoKey(fleet.client, memory?.key);
      await remember(root, { gateway_port, control_port, key });
      const question: Question = { endpoint: folder.endpoint, key, model: catalog.models[0]?.name ?? "", text: QUESTION };
      const answer = await askQuestion(question);
      say(`ready after ${((performance.now() - started_ms) / 1_000).toFixed(1)} s\n`);
      if (!ending.signal.aborted) io.out(summary(folder, question, answer, await clusterState(fleet.client)));
      say("\nCtrl-C ends it.");
    };
    await Promise.race([fleet.broken, ready()]);
    return fleet.broken;
  };
  try {
    return await Promise.race([interrupted, serve()]);
  } finally {
    ending.abort();
    if (children.length > 0) io.err("stopping");
    await Promise.all(children.map((child) => child.stop()));
    await endRanks(tag);
  }
}

export const demoCommand = command({
  name: "demo",
  about: "Runs a server and nodes on this machine, for trying llmgw out",
  examples: ["llmgw demo", "llmgw demo --nodes 3 --port 8080", "llmgw demo --llama-server /usr/bin/llama-server --model ./model.gguf"],
  flags: {
    nodes: { type: "number", value: "N", about: "how many nodes", default: 2, min: 1, max: 50 },
    "llama-server": { type: "string", value: "PATH", about: "serve with this llama-server instead of the simulated engine" },
    model: { type: "string", value: "FILE.gguf", about: "the model it serves" },
    port: { type: "number", value: "N", about: "port of the endpoint; a free one when absent", min: 1, max: 65_535 },
    keep: { type: "string", value: "DIR", about: "keep everything in this folder, and start from it when it is there" },
  },
  args: [],
  run: async ({ flags, io }) => {
    if (!Number.isInteger(flags.nodes))
      throw new OperatorError("E_USAGE", `--nodes cannot be ${flags.nodes}`, "nodes are counted", "--nodes 2");
    const interrupted = interruption();
    const kept = flags.keep === undefined ? undefined : resolve(io.cwd, flags.keep);
    const memory = kept === undefined ? null : await openKept(kept);
    const run = await temporaryFolder("llmgw-");
    const root = kept ?? join(run, "demo");
    try {
      return await runIn(root, run, memory, flags, io, interrupted);
    } finally {
      await removeFolders(run);
    }
  },
});
