/**
 * agent/ makes a node what the plan says: it discovers what the machine has, keeps a session with a server, fetches
 * weights, starts and follows shims and reports what it sees. It decides nothing about the fleet, and nothing it
 * started is ended because the agent or the server went away.
 */
import { mkdir } from "node:fs/promises";
import { hostname, userInfo } from "node:os";
import { join } from "node:path";
import { discoverHardware } from "../hardware/discover.ts";
import type { Log } from "../os/log.ts";
import { makeDialer } from "../pki/dial.ts";
import type { Dialer } from "../pki/dial.ts";
import { loadIdentity } from "../pki/identity.ts";
import type { Identity } from "../pki/identity.ts";
import type { NodeRequest, PollAnswer } from "../protocol/agent-api.ts";
import type { AgentConfig } from "../protocol/config.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { NodeId } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import { INVENTORY_INTERVAL_MS, LOG_TAIL_LINES_COUNT, REPORT_GATHER_MS, REPORT_INTERVAL_MS } from "../protocol/limits.ts";
import type { Revocation } from "../protocol/plan.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { VERSION } from "../protocol/version.ts";
import { tailOf } from "../shim/rank-log.ts";
import { WeightStore } from "../weights/store.ts";
import { converge } from "./converge.ts";
import { discoverEngines } from "./engine-offers.ts";
import type { EnginePaths } from "./engine-offers.ts";
import { keepSession, ServerLink } from "./link.ts";
import { NodeState } from "./node-state.ts";
import type { RankContext } from "./rank.ts";
import { Ranks } from "./ranks.ts";
import { Signal } from "./signal.ts";

export interface AgentOptions {
  readonly config: AgentConfig;
  readonly log: Log;
  /** Ends the agent; what it started goes on. */
  readonly signal: AbortSignal;
  /** What it starts ends when this process is gone; null = never. */
  readonly owner_pid: number | null;
}

/** The node id of a configuration: as given, else the host name without its domain. */
export function nodeIdOf(config: AgentConfig): NodeId {
  return config.node ?? parseAs(NodeId, hostname().split(".")[0], "the host name as node id");
}

/** Runs a node's agent until its signal aborts. @throws OperatorError when it cannot start */
export async function runAgent(options: AgentOptions): Promise<void> {
  const agent = await Agent.open(options);
  await agent.run();
}

/** Ends every rank of a node, for the removal of the node or of llmgw. */
export async function stopAll(options: AgentOptions): Promise<void> {
  const agent = await Agent.open(options);
  await agent.ranks.stopAll("all ranks of this node are to stop");
}

class Agent {
  readonly ranks: Ranks;
  readonly #options: AgentOptions;
  readonly #node: NodeId;
  readonly #log: Log;
  readonly #state: NodeState;
  readonly #dialer: Dialer;
  readonly #engine_paths: EnginePaths;
  readonly #changed = new Signal();
  #inventory: Inventory;
  #inventory_revision = 1;
  #identity: Identity;
  #revocations: readonly Revocation[] = [];

  private constructor(options: AgentOptions, state: NodeState, identity: Identity, engine_paths: EnginePaths, inventory: Inventory) {
    const { config, log, owner_pid } = options;
    this.#options = options;
    this.#node = nodeIdOf(config);
    this.#log = log.with({ component: "agent", node: this.#node });
    this.#state = state;
    this.#identity = identity;
    this.#dialer = makeDialer(identity);
    this.#engine_paths = engine_paths;
    this.#inventory = inventory;
    const context: RankContext = {
      node: this.#node,
      log: this.#log,
      weights: new WeightStore(join(config.state, "weights")),
      tls: config.tls,
      ranks_folder: join(config.state, "ranks"),
      socket_folder: join(config.run, "r"),
      engine_user: engineUser(config.engine_user),
      owner_pid,
      enginePath: (kind) => engine_paths[kind] ?? "",
      revocations: () => this.#revocations,
      changed: () => this.#changed.raise(),
    };
    this.ranks = new Ranks(context);
  }

  static async open(options: AgentOptions): Promise<Agent> {
    const { config } = options;
    const node = nodeIdOf(config);
    const identity = await loadIdentity(config.tls);
    if (identity.role !== "node" || identity.name !== node) {
      const why = `${config.tls.cert} is the certificate of ${identity.role} ${identity.name}`;
      throw new OperatorError(
        "E_IDENTITY",
        `this agent cannot be node ${node}`,
        why,
        `issue a certificate with llmgw ca issue-node ${node}, or set node`,
      );
    }
    await mkdir(config.state, { recursive: true, mode: 0o711 });
    const state = await NodeState.open(config.state);
    const engine_paths: EnginePaths = config.llamacpp_bin === undefined ? {} : { llamacpp: config.llamacpp_bin };
    const agent = new Agent(options, state, identity, engine_paths, await readInventory(config, engine_paths));
    await agent.ranks.open();
    return agent;
  }

  async run(): Promise<void> {
    const { config, signal } = this.#options;
    const { certificate, ...about } = { certificate: this.#identity.serial, address: config.address, version: VERSION };
    this.#log.info("agent started", { ...about, serial: certificate, servers: config.servers.join(" ") });
    for (const offer of this.#inventory.engines)
      if (!offer.offered) this.#log.warn("an engine is not offered", { engine: offer.kind, path: offer.path, why: offer.reason });
    const renew = () => void this.#renew();
    process.on("SIGHUP", renew);
    const refresh = setInterval(() => void this.#refresh(), INVENTORY_INTERVAL_MS);
    try {
      await keepSession(config.servers, (server, joined) => this.#session(server, joined), this.#log, signal);
    } finally {
      clearInterval(refresh);
      process.off("SIGHUP", renew);
    }
  }

  /** One session with one server: join, then poll and report side by side until one of them fails. */
  async #session(server: string, joined: () => void): Promise<void> {
    const over = new AbortController();
    const signal = AbortSignal.any([this.#options.signal, over.signal]);
    const link = new ServerLink(this.#dialer, server, this.#node);
    const inventory_revision = this.#inventory_revision;
    const { session, version } = await link.join(
      {
        protocol: PROTOCOL,
        node: this.#node,
        version: VERSION,
        session_key: this.#state.session_key,
        address: this.#options.config.address,
        clock_ms: Date.now(),
        inventory: this.#inventory,
        ranks: this.ranks.statuses(),
        seen: this.#state.seen,
      },
      signal,
    );
    joined();
    this.#log.info("joined", { server, server_version: version });
    try {
      await Promise.all([this.#poll(link, session, signal), this.#report(link, session, inventory_revision, signal)]);
    } finally {
      over.abort();
    }
  }

  async #poll(link: ServerLink, session: string, signal: AbortSignal): Promise<void> {
    // The first answer of a session is asked for whole: what was seen before may not have been done.
    let have = { epoch: 0, generation: 0 };
    for (;;) {
      const answer = await link.poll({ session, have }, signal);
      if (answer.plan) ({ version: have } = answer.plan);
      await this.#follow(answer);
      for (const request of answer.requests) void this.#answer(link, session, request, signal);
    }
  }

  async #follow({ plan, revocations }: PollAnswer): Promise<void> {
    if (JSON.stringify(revocations) !== JSON.stringify(this.#revocations)) {
      this.#revocations = revocations;
      await this.ranks.trust(revocations);
    }
    if (plan === null) return;
    if (plan.node !== this.#node || !(await this.#state.accept(plan.version))) {
      this.#log.warn("refused a plan", {
        node: plan.node,
        epoch: plan.version.epoch,
        generation: plan.version.generation,
        why: "it is older than what was seen, or for another node",
      });
      return;
    }
    for (const action of converge(plan.ranks, this.ranks.statuses())) await this.ranks.act(action);
    this.#changed.raise();
  }

  async #report(link: ServerLink, session: string, joined_inventory: number, signal: AbortSignal): Promise<void> {
    let sent = joined_inventory;
    for (let seq = 1; ; seq += 1) {
      await this.#changed.wait(REPORT_INTERVAL_MS, signal);
      await Bun.sleep(REPORT_GATHER_MS);
      this.#changed.clear();
      const revision = this.#inventory_revision;
      const inventory = revision === sent ? null : this.#inventory;
      await link.report({ session, seq, clock_ms: Date.now(), seen: this.#state.seen, inventory, ranks: this.ranks.statuses() }, signal);
      sent = revision;
    }
  }

  async #answer(link: ServerLink, session: string, request: NodeRequest, signal: AbortSignal): Promise<void> {
    const folder = this.ranks.folderOf(request.attempt);
    const lines = folder === null ? null : tailOf(folder, Math.min(request.lines, LOG_TAIL_LINES_COUNT));
    const result = lines === null ? { error: `attempt ${request.attempt} is not on this node` } : { lines };
    await link.result(request.id, { session, result }, signal).catch((error: unknown) => {
      this.#log.debug("an answer did not arrive", { id: request.id, why: messageOf(error) });
    });
  }

  async #refresh(): Promise<void> {
    try {
      this.#inventory = await readInventory(this.#options.config, this.#engine_paths, this.#inventory);
      this.#inventory_revision += 1;
    } catch (error) {
      this.#log.warn("cannot read this machine", { why: messageOf(error) });
    }
  }

  /** SIGHUP: the certificate was renewed on disk. */
  async #renew(): Promise<void> {
    try {
      this.#identity = await loadIdentity(this.#options.config.tls);
      this.#dialer.setIdentity(this.#identity);
      await this.ranks.trust(this.#revocations);
      this.#log.info("took the certificate again", { serial: this.#identity.serial });
    } catch (error) {
      this.#log.error("kept the old certificate", { why: messageOf(error) });
    }
  }
}

/** What the node is and has. Engines are looked at once; what they are does not change while the agent runs. */
async function readInventory(config: AgentConfig, paths: EnginePaths, before?: Inventory): Promise<Inventory> {
  const { nvidia_smi, state } = config;
  const [hardware, engines] = await Promise.all([
    discoverHardware({ state, ...(nvidia_smi !== undefined && { nvidia_smi }) }),
    before?.engines ?? discoverEngines(paths),
  ]);
  const root = process.getuid?.() === 0;
  const text = `engines run as root: there is no user ${config.engine_user}`;
  const warnings = root && engineUser(config.engine_user) === null ? [{ code: "engine-user-missing", text }] : [];
  return { ...hardware, engines, warnings: [...hardware.warnings, ...warnings] };
}

/** The user engines run as: only root can choose, and only one there is. */
function engineUser(name: string): string | null {
  if (userInfo().uid !== 0) return null;
  const found = Bun.spawnSync(["getent", "passwd", name], { stdin: "ignore", stdout: "pipe", stderr: "ignore" });
  return found.exitCode === 0 ? name : null;
}
