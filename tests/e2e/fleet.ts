/**
 * A whole fleet for tests: the compiled binary's server and agents on loopback addresses of their own, as the calling
 * user, set up by the commands an operator would use. Nothing of it outlives the test process.
 */
import { spawn, type ChildProcess } from "node:child_process";
import { randomBytes, randomInt } from "node:crypto";
import { closeSync, mkdirSync, openSync } from "node:fs";
import { mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { stringify } from "yaml";
import { binary } from "../../release/fresh.ts";
import { endRanks, TAG } from "../../src/cli/demo/ranks.ts";
import { fetchUnix } from "../../src/os/unix-http.ts";
import type { EventView, ModelView, NodeView, ReplicaView, StatusView } from "../../src/protocol/admin-api.ts";
import type { GatewayStatus } from "../../src/protocol/gateway-api.ts";

/** One model of a test's catalog, as an operator writes it. */
export interface CatalogEntry {
  readonly name: string;
  readonly engine: "sim" | "llamacpp" | "vllm" | "sglang";
  readonly [key: string]: unknown;
}

export interface FleetOptions {
  readonly nodes?: number;
  readonly models?: readonly CatalogEntry[];
  readonly llama_server?: string;
  /** `engines` of server.yaml. */
  readonly engines?: Readonly<Record<string, string>>;
  /** More keys of every agent.yaml. */
  readonly agent?: Readonly<Record<string, unknown>>;
  /** Done with the fleet's folder before anything starts: mounts, say. */
  readonly prepare?: (folder: string) => Promise<void>;
}

export interface Ran {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

/** A free TCP port of an address; taken again by nobody likely before it is used. */
export function freePortOf(address: string): Promise<number> {
  return new Promise((resolve, reject) => {
    const server = createServer().once("error", reject);
    server.listen(0, address, () => {
      const bound = server.address();
      server.close(() => (typeof bound === "object" && bound ? resolve(bound.port) : reject(new Error("no port"))));
    });
  });
}

/**
 * Waits until a look returns something that is not null, undefined or false.
 * @throws when the deadline is over, saying what was waited for, what was thrown last, and `context()`
 */
export async function waitFor<T>(
  what: string,
  look: () => Promise<T> | T,
  deadline_ms = 30_000,
  context: () => Promise<string> = async () => "",
): Promise<Exclude<T, null | undefined | false>> {
  const end_ms = performance.now() + deadline_ms;
  let last: unknown = "nothing was thrown";
  for (;;) {
    try {
      const seen = await look();
      if (seen !== null && seen !== undefined && seen !== false) return seen as Exclude<T, null | undefined | false>;
    } catch (error) {
      last = error;
    }
    if (performance.now() > end_ms) throw new Error(`waited ${deadline_ms} ms for ${what}; last: ${String(last)}\n${await context()}`);
    await sleep(50);
  }
}

/** Whether a process is there and not a zombie. */
export async function alive(pid: number): Promise<boolean> {
  const text = await readFile(`/proc/${pid}/stat`, "utf8").catch(() => "");
  return text !== "" && !/\) [ZX] /.test(text);
}

/** Runs the compiled binary to its end. */
export async function runBinary(words: readonly string[], env: Record<string, string> = {}, cwd = tmpdir()): Promise<Ran> {
  const child = Bun.spawn([binary, ...words], {
    cwd,
    env: { PATH: process.env["PATH"] ?? "", HOME: cwd, ...env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { code, out, err };
}

export class Fleet {
  readonly #processes = new Map<string, ChildProcess>();
  readonly folder: string;
  readonly run: string;
  readonly addresses: readonly string[];
  readonly control: string;
  readonly gateway: string;
  readonly llama_server: string | undefined;
  /** What the server names; as a rule nothing is to be installed. */
  engines: Readonly<Record<string, string>>;
  readonly agent: Readonly<Record<string, unknown>>;

  private constructor(
    folder: string,
    addresses: readonly string[],
    ports: { control: number; gateway: number },
    { llama_server, engines = {}, agent = {} }: FleetOptions,
  ) {
    this.folder = folder;
    this.run = join(folder, "r");
    this.addresses = addresses;
    this.control = `https://127.0.0.1:${ports.control}`;
    this.gateway = `http://127.0.0.1:${ports.gateway}`;
    this.llama_server = llama_server;
    this.agent = agent;
    this.engines = { llamacpp: "", vllm: "", sglang: "", ...engines };
  }

  /** Makes certificates and configurations, starts everything, and waits until all nodes have joined. */
  static async start(options: FleetOptions = {}): Promise<Fleet> {
    const { nodes = 2, models = [], prepare } = options;
    const folder = await mkdtemp(join(tmpdir(), "lg-"));
    const [a, b] = [randomInt(1, 250), randomInt(0, 250)];
    const addresses = Array.from({ length: nodes }, (_, index) => `127.${a}.${b}.${index + 2}`);
    const ports = { control: await freePortOf("127.0.0.1"), gateway: await freePortOf("127.0.0.1") };
    const fleet = new Fleet(folder, addresses, ports, options);
    try {
      await fleet.#certificates();
      await fleet.#configure();
      await prepare?.(fleet.folder);
      fleet.startServer();
      await fleet.waitFor("the server", async () => (await fleet.ctl("status")) as StatusView);
      for (const id of fleet.nodes) fleet.startAgent(id);
      await fleet.waitFor("all nodes", async () => (await fleet.nodeViews()).filter(({ state }) => state === "ready").length === nodes);
      // Only now, so that replicas are spread over all nodes and not placed on the first that joined.
      await fleet.serve(models);
      return fleet;
    } catch (error) {
      await fleet.stop();
      throw error;
    }
  }

  get nodes(): string[] {
    return this.addresses.map((_, index) => `n${index + 1}`);
  }

  get ctlConfig(): string {
    return join(this.folder, "ctl", "config.yaml");
  }

  /** The folder of the fleet's authority. */
  get authority(): string {
    return join(this.folder, "ca");
  }

  /** `llmgw ca WORDS` with the fleet's authority. */
  async issue(...words: string[]): Promise<void> {
    await this.must("ca", ...words, "--dir", this.authority);
  }

  /** Runs a command that must succeed. */
  async must(...words: string[]): Promise<Ran> {
    const ran = await runBinary(words, { LLMGW_CONFIG: this.ctlConfig }, this.folder);
    if (ran.code !== 0) throw new Error(`llmgw ${words.join(" ")} ended with ${ran.code}: ${ran.err}`);
    return ran;
  }

  /** `llmgw ctl WORDS -o json`, parsed. */
  async ctl(...words: string[]): Promise<unknown> {
    return JSON.parse((await this.must("ctl", ...words, "-o", "json")).out);
  }

  nodeViews = async (): Promise<NodeView[]> => ((await this.ctl("nodes")) as { items: NodeView[] }).items;
  modelViews = async (): Promise<ModelView[]> => ((await this.ctl("models")) as { items: ModelView[] }).items;
  replicas = async (): Promise<ReplicaView[]> => ((await this.ctl("replicas")) as { items: ReplicaView[] }).items;
  events = async (): Promise<EventView[]> => ((await this.ctl("events", "--limit", "1000")) as { items: EventView[] }).items;
  status = async (): Promise<StatusView> => (await this.ctl("status")) as StatusView;

  /** A new key to the gateway, once the gateway knows it. */
  async key(name = "test"): Promise<string> {
    const key = (await this.must("ctl", "key", "create", name)).out.trim();
    await this.waitFor("the gateway to know the key", async () => {
      const response = await fetch(`${this.gateway}/v1/models`, { headers: { authorization: `Bearer ${key}` } });
      await response.arrayBuffer();
      return response.status === 200;
    });
    return key;
  }

  /** Waits until a model has all its replicas ready; returns them. */
  async ready(model: string, deadline_ms = 60_000): Promise<ReplicaView[]> {
    await this.waitFor(
      `${model} to be ready`,
      async () => (await this.modelViews()).find(({ name, ready, wanted }) => name === model && ready >= wanted),
      deadline_ms,
    );
    return (await this.replicas()).filter((replica) => replica.model === model && replica.state === "ready");
  }

  waitFor<T>(what: string, look: () => Promise<T> | T, deadline_ms = 30_000): Promise<Exclude<T, null | undefined | false>> {
    return waitFor(what, look, deadline_ms, () => this.logs());
  }

  /** The process ids of the engines of a model, sorted. */
  async enginePids(model: string): Promise<number[]> {
    const pids = (await this.replicas())
      .filter((replica) => replica.model === model)
      .flatMap(({ ranks }) => ranks.map((rank) => rank.engine_pid));
    return pids.filter((pid) => pid !== null).toSorted((left, right) => left - right);
  }

  async gatewayStatus(): Promise<GatewayStatus> {
    return (await (await fetchUnix(join(this.run, "s", "gateway.sock"), "/status")).json()) as GatewayStatus;
  }

  startServer(): void {
    this.#start("server", ["server", "--config", join(this.folder, "server.yaml")]);
  }

  startAgent(id: string): void {
    this.#start(id, ["agent", "--config", join(this.folder, id, "agent.yaml")]);
  }

  pid(name: string): number {
    const pid = this.#processes.get(name)?.pid;
    if (pid === undefined) throw new Error(`${name} does not run`);
    return pid;
  }

  /** Sends a signal to the server ("server") or an agent (its node's id); waits until it is gone when that ends it. */
  async signal(name: string, signal: NodeJS.Signals): Promise<void> {
    const child = this.#processes.get(name);
    if (!child) throw new Error(`${name} does not run`);
    child.kill(signal);
    if (signal === "SIGSTOP" || signal === "SIGCONT" || signal === "SIGHUP") return;
    await waitFor(`${name} to end`, () => child.exitCode !== null || child.signalCode !== null, 15_000);
    this.#processes.delete(name);
  }

  /** Makes these the models of the catalog. */
  async serve(models: readonly CatalogEntry[]): Promise<void> {
    await this.#writeCatalog(models);
    await this.must("ctl", "reload");
  }

  /** Makes these the engines of server.yaml. */
  async nameEngines(engines: Readonly<Record<string, string>>): Promise<void> {
    this.engines = { llamacpp: "", vllm: "", sglang: "", ...engines };
    await this.#writeServer();
    await this.must("ctl", "reload");
  }

  async #writeServer(): Promise<void> {
    const strip = (url: string) => url.replace(/^https?:\/\//, "");
    const server = {
      listen: { control: strip(this.control), gateway: strip(this.gateway) },
      state: "state",
      run: join(this.run, "s"),
      engines: this.engines,
      log: { level: "debug" },
    };
    await writeFile(join(this.folder, "server.yaml"), stringify(server), { mode: 0o600 });
  }

  async #writeCatalog(models: readonly CatalogEntry[]): Promise<void> {
    await writeFile(join(this.folder, "catalog.yaml"), stringify({ models }), { mode: 0o600 });
  }

  /** The logs of every process, for the report of a failure. */
  async logs(): Promise<string> {
    const names = (await readdir(join(this.folder, "logs")).catch(() => [])).toSorted((left, right) => left.localeCompare(right));
    const texts = names.map(async (name) => {
      const lines = (await readFile(join(this.folder, "logs", name), "utf8")).trimEnd().split("\n").slice(-40);
      return `--- ${name}\n${lines.join("\n")}`;
    });
    return (await Promise.all(texts)).join("\n");
  }

  async log(name: string): Promise<string> {
    return readFile(join(this.folder, "logs", `${name}.log`), "utf8");
  }

  /** Ends everything and removes the folder. */
  async stop(): Promise<void> {
    for (const child of this.#processes.values()) child.kill("SIGKILL");
    await endRanks(this.run);
    if (process.env["LLMGW_TEST_KEEP"] === undefined) await rm(this.folder, { recursive: true, force: true });
  }

  #start(name: string, words: string[]): void {
    const log = openSync(join(this.folder, "logs", `${name}.log`), "a", 0o600);
    try {
      const child = spawn(binary, [...words, "--owner-pid", String(process.pid)], {
        stdio: ["ignore", log, log],
        env: { PATH: process.env["PATH"], HOME: this.folder, [TAG]: this.run },
        cwd: "/",
        detached: true,
      });
      this.#processes.set(name, child);
    } finally {
      closeSync(log);
    }
  }

  async #certificates(): Promise<void> {
    const tls = join(this.folder, "tls");
    await this.must("ca", "init", "--dir", this.authority);
    await this.issue("issue-server", "--name", "server", "--ip", "127.0.0.1", "--out", tls);
    await this.issue("issue-gateway", "--out", tls);
    await this.issue("issue-admin", "tester", "--out", join(this.folder, "ctl"));
    for (const [index, id] of this.nodes.entries()) {
      await this.issue("issue-node", id, "--ip", this.addresses[index] as string, "--out", join(this.folder, id, "tls"));
    }
  }

  async #configure(): Promise<void> {
    for (const each of ["logs", "state", "ctl", "r", "r/s"]) mkdirSync(join(this.folder, each), { recursive: true, mode: 0o700 });
    await this.#writeCatalog([]);
    await this.#writeServer();
    for (const [index, id] of this.nodes.entries()) {
      const run = join(this.run, id);
      for (const each of [join(this.folder, id), run]) mkdirSync(each, { recursive: true, mode: 0o700 });
      const agent = {
        node: id,
        servers: [this.control],
        address: this.addresses[index],
        state: "state",
        run,
        ...(this.llama_server === undefined ? {} : { llamacpp_bin: this.llama_server }),
        ...this.agent,
        log: { level: "debug" },
      };
      await writeFile(join(this.folder, id, "agent.yaml"), stringify(agent), { mode: 0o600 });
    }
    const identity = ["--ca", "ca.crt", "--cert", "admin.crt", "--key", "admin.key"].map((word) =>
      word.startsWith("--") ? word : join(this.folder, "ctl", word),
    );
    await this.must("ctl", "context", "add", "test", "--server", this.control, ...identity);
  }
}

/** A name no other test uses. */
export const unusual = (prefix: string): string => `${prefix}-${randomBytes(4).toString("hex")}`;
