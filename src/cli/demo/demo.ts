import { randomBytes } from "node:crypto";
import { access, constants, stat } from "node:fs/promises";
import { join, resolve } from "node:path";
import { messageOf, OperatorError } from "../../protocol/errors.ts";
import { DEMO_HURRY_MS } from "../../protocol/limits.ts";
import type { Catalog } from "../../protocol/catalog.ts";
import type { Child } from "./child.ts";
import { demoKey, serveCatalog, startFleet, waitNodes, type FleetOptions } from "./fleet.ts";
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
} from "./folder.ts";
import { askQuestion, type Question } from "./question.ts";
import { demoReport } from "./report.ts";
import { endRanks, killRanks, TAG } from "./ranks.ts";
import { command } from "../frame.ts";
import { freePort } from "./free-port.ts";
import type { Io } from "../spec.ts";

const QUESTION = "What does a fleet of inference machines need most?";

/** What the demo serves, and with what. */
interface Served {
  readonly catalog: Catalog;
  readonly llama_server: string | undefined;
}

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
async function servedBy(flags: DemoFlags, io: Io): Promise<Served> {
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

/**
 * Resolves when someone asks the demo to end: 130 for Ctrl-C, 0 for SIGTERM. Who asks again after a while is in a hurry;
 * two signals at once are one (a terminal sends Ctrl-C to the whole group, and npm passes it on once more).
 */
function interruption(hurry: () => void): Promise<number> {
  return new Promise((done) => {
    let first_ms: number | null = null;
    const ask = (code: number) => {
      if (first_ms !== null && performance.now() - first_ms > DEMO_HURRY_MS) hurry();
      first_ms ??= performance.now();
      done(code);
    };
    process.on("SIGINT", () => ask(130));
    process.on("SIGTERM", () => ask(0));
    process.on("SIGHUP", () => ask(0));
  });
}

interface DemoOptions {
  readonly root: string;
  readonly run: string;
  readonly memory: Remembered | null;
  readonly flags: DemoFlags;
  readonly served: Served;
}

/** Chooses ports and writes everything the processes read. */
async function prepare({ root, run, memory, flags, served }: DemoOptions): Promise<DemoFolder> {
  const gateway_port = flags.port === undefined ? await portLike(memory?.gateway_port) : await freePort(flags.port);
  const control_port = await portLike(memory?.control_port);
  const circumstances = { now_ms: Date.now(), random: (bytes: number) => new Uint8Array(randomBytes(bytes)) };
  return writeDemo({
    root,
    run,
    nodes: flags.nodes,
    gateway_port,
    control_port,
    key: memory?.key,
    circumstances,
    llama_server: served.llama_server,
  });
}

/** Starts a fleet, waits for it, asks it, and tells all about it; then runs until a part of it breaks. */
async function serve(options: DemoOptions, folder: DemoFolder, started_ms: number, fleetOptions: FleetOptions, io: Io): Promise<never> {
  const { say, signal } = fleetOptions;
  const { client, broken } = await startFleet(fleetOptions);
  const ready = async (): Promise<void> => {
    await waitNodes(client, options.flags.nodes, say);
    await serveCatalog(client, folder, options.served.catalog, say);
    const key = await demoKey(client, folder.memory.key);
    await remember(folder.root, { ...folder.memory, key });
    const model = options.served.catalog.models[0]?.name ?? "";
    const question: Question = { endpoint: folder.endpoint, key, model, text: QUESTION };
    const answer = await askQuestion(question);
    const report = await demoReport(client, folder, question, answer);
    if (signal.aborted) return;
    say(`ready after ${((performance.now() - started_ms) / 1_000).toFixed(1)} s\n`);
    io.out(report);
    say("\nCtrl-C ends it.");
  };
  await Promise.race([broken, ready()]);
  return broken;
}

/** Everything between an open folder and the end of the demo. The folder stays. */
async function runDemo(options: DemoOptions, io: Io, interrupted: Promise<number>): Promise<number> {
  const started_ms = performance.now();
  const folder = await prepare(options);
  const ending = new AbortController();
  const children: Child[] = [];
  const fleetOptions: FleetOptions = {
    folder,
    env: { ...io.env, [TAG]: options.run },
    kept: options.flags.keep !== undefined,
    signal: ending.signal,
    onStart: (child) => void children.push(child),
    say: (line) => {
      if (!ending.signal.aborted) io.err(line);
    },
  };
  try {
    return await Promise.race([interrupted, serve(options, folder, started_ms, fleetOptions, io)]);
  } finally {
    ending.abort();
    io.err("stopping");
    await Promise.all(children.map((child) => child.stop()));
    await endRanks(options.run);
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
    const served = await servedBy(flags, io);
    const kept = flags.keep === undefined ? undefined : resolve(io.cwd, flags.keep);
    const memory = kept === undefined ? null : await openKept(kept);
    const run = await temporaryFolder("llmgw-");
    const interrupted = interruption(() => void killRanks(run));
    try {
      return await runDemo({ root: kept ?? join(run, "demo"), run, memory, flags, served }, io, interrupted);
    } finally {
      await removeFolders(run);
    }
  },
});
