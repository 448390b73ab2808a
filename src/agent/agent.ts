/**
 * agent/ makes a node what the plan says: it discovers what the machine has, keeps a session with a server, fetches
 * weights, starts and follows shims and reports what it sees. It decides nothing about the fleet, and nothing it
 * started is ended because the agent or the server went away.
 */
import { hostname } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import type { FabricWatch } from "../hardware/fabric-watch.ts";
import { makeFolderOnce } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { serveUnix } from "../os/unix-http.ts";
import { Wakeup } from "../os/wakeup.ts";
import { makeDialer } from "../pki/dial.ts";
import type { Dialer } from "../pki/dial.ts";
import type { Identity } from "../pki/identity.ts";
import { NodeRequest } from "../protocol/agent-api.ts";
import type { NodeResult, PollAnswer } from "../protocol/agent-api.ts";
import type { AgentConfig } from "../protocol/config.ts";
import { messageOf, parseAs, explain } from "../protocol/errors.ts";
import { NodeId } from "../protocol/ids.ts";
import type { AttemptId } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import {
  DOCTOR_INTERVAL_MS,
  ENGINES_FIRST_LOOK_MS,
  INVENTORY_INTERVAL_MS,
  REPORT_GATHER_MS,
  REPORT_INTERVAL_MS,
} from "../protocol/limits.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { VERSION } from "../protocol/version.ts";
import { tailOf } from "../shim/rank-log.ts";
import { WeightStore } from "../weights/store.ts";
import { converge } from "./converge.ts";
import { custodyOf } from "./custody.ts";
import { engineUserOf, readInventory } from "./inventory.ts";
import { examine, openFabrics } from "./examination.ts";
import { keepSession, ServerLink } from "./link.ts";
import { changedFiles, loadNodeIdentity } from "./node-identity.ts";
import { NodeEngines } from "./node-engines.ts";
import { NodeState } from "./node-state.ts";
import { Places } from "./places.ts";
import type { RankContext } from "./rank.ts";
import { Ranks } from "./ranks.ts";
import type { ShimPatience } from "./shim-client.ts";
import { WeightsWatch } from "./weights-watch.ts";

export interface AgentOptions {
  readonly config: AgentConfig;
  readonly log: Log;
  /** Ends the agent; what it started goes on. */
  readonly signal: AbortSignal;
  /** What it starts ends when this process is gone; null = never. */
  readonly owner_pid: number | null;
  /** How long shims are waited for, when not as usual. */
  readonly patience?: ShimPatience;
}

/** The node id of a configuration: as given, else the host name without its domain. */
function nodeIdOf(config: AgentConfig): NodeId {
  return config.node ?? parseAs(NodeId, hostname().split(".")[0]?.toLowerCase(), "the host name as node id");
}

/**
 * Runs a node's agent until its signal aborts.
 * @throws OperatorError when it cannot start: E_IDENTITY (not its certificate), E_EXISTS (an agent runs there), E_CONFIG, E_FILE
 */
export async function runAgent(options: AgentOptions): Promise<void> {
  const { config, log, signal } = options;
  const node = nodeIdOf(config);
  const fabrics = await openFabrics(config);
  const identity = await loadNodeIdentity(config.tls, node);
  await makeFolders(config);
  const alone = await serveUnix(join(config.run, "agent.sock"), () => Response.json({ node, pid: process.pid, version: VERSION }));
  try {
    const agent = new Agent(options, await NodeState.open(config.state, log), identity, fabrics, await engineUserOf(config));
    await agent.run();
  } finally {
    if (!signal.aborted) log.error("the agent ends; what it started goes on");
    await alone.close();
  }
}

/** Ends every rank of a node, for the removal of the node or of llmgw; needs neither a server nor a certificate. */
export async function stopAll(options: AgentOptions): Promise<void> {
  await makeFolders(options.config);
  const engine_user = await engineUserOf(options.config);
  // Nothing is started: it needs no engine.
  const none = { program: () => null, refusal: async () => null, cache_folder: join(options.config.state, "cache") };
  const ranks = ranksOf(options, none, { weights: weightsOf(options), engine_user, revocations: () => [], changed: () => {} });
  await ranks.open();
  await ranks.stopAll("all ranks of this node are to stop");
}

async function makeFolders({ state, run }: AgentConfig): Promise<void> {
  await Promise.all([state, run].map((folder) => makeFolderOnce(folder, 0o711)));
}

function weightsOf({ config }: AgentOptions): WeightStore {
  return new WeightStore(join(config.state, "weights"));
}

type RanksRest = Pick<RankContext, "weights" | "engine_user" | "revocations" | "changed">;

function ranksOf(options: AgentOptions, engines: Pick<NodeEngines, "program" | "refusal" | "cache_folder">, rest: RanksRest): Ranks {
  const { config, log, owner_pid, signal, patience } = options;
  const node = nodeIdOf(config);
  return new Ranks({
    ...rest,
    node,
    log: log.with({ component: "agent", node }),
    places: new Places(node),
    tls: config.tls,
    ranks_folder: join(config.state, "ranks"),
    socket_folder: join(config.run, "r"),
    owner_pid,
    custody: custodyOf(config.custody, owner_pid !== null),
    closed: signal,
    patience,
    program: (kind) => engines.program(kind),
    cache_folder: engines.cache_folder,
    refusal: (launch, weights_path) => engines.refusal(launch, weights_path),
  });
}

class Agent {
  readonly #options: AgentOptions;
  readonly #node: NodeId;
  readonly #log: Log;
  readonly #state: NodeState;
  readonly #dialer: Dialer;
  readonly #ranks: Ranks;
  readonly #weights: WeightsWatch;
  readonly #changed = new Wakeup();
  readonly #fabrics: FabricWatch;
  readonly #engines: NodeEngines;
  #inventory!: Inventory;
  #inventory_revision = 1;
  #identity: Identity;

  constructor(options: AgentOptions, state: NodeState, identity: Identity, fabrics: FabricWatch, engine_user: string | null) {
    this.#options = options;
    this.#node = nodeIdOf(options.config);
    this.#log = options.log.with({ component: "agent", node: this.#node });
    this.#state = state;
    this.#identity = identity;
    this.#fabrics = fabrics;
    this.#engines = new NodeEngines({
      config: options.config,
      engine_user,
      log: this.#log,
      signal: options.signal,
      machine: () => this.#inventory,
      running: (kind) => this.#ranks.versionsOf(kind),
      changed: () => this.#showEngines(),
    });
    this.#dialer = makeDialer(identity, { revocations: () => state.revocations });
    const changed = () => this.#changed.raise();
    const weights = weightsOf(options);
    this.#weights = new WeightsWatch(weights);
    this.#ranks = ranksOf(options, this.#engines, { weights, engine_user, revocations: () => state.revocations, changed });
  }

  async run(): Promise<void> {
    const { config, signal } = this.#options;
    // What runs is known before anybody is told of it, so that nobody takes it for gone.
    await this.#ranks.open();
    this.#inventory = { ...(await readInventory(config, this.#fabrics.ports())), weights: await this.#weights.look() };
    // Engines that answer at once are offered from the first moment on; Python's need longer, and nobody waits for them.
    await Promise.race([this.#engines.open(), Bun.sleep(ENGINES_FIRST_LOOK_MS)]);
    this.#showEngines();
    const about = { address: config.address, version: VERSION, serial: this.#identity.serial };
    this.#log.info("agent started", { ...about, servers: config.servers.join(" ") });
    for (const { code, text } of this.#inventory.warnings) this.#log.warn(text, { code });
    this.#ranks.resume();
    const renew = () => void this.#renew();
    process.on("SIGHUP", renew);
    void this.#examine();
    const examination = setInterval(() => void this.#examine(), DOCTOR_INTERVAL_MS);
    const refresh = setInterval(() => void this.#refresh(), INVENTORY_INTERVAL_MS);
    try {
      await keepSession(config.servers, (server, joined) => this.#session(server, joined), this.#log, signal);
    } finally {
      clearInterval(refresh);
      clearInterval(examination);
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
        joins: await this.#state.nextJoin(),
        address: this.#options.config.address,
        clock_ms: Date.now(),
        inventory: this.#inventory,
        ranks: this.#ranks.statuses(),
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

  async #follow({ plan, revocations, look_for, engines }: PollAnswer): Promise<void> {
    if (engines !== undefined) this.#engines.want(engines);
    if (await this.#state.revoke(revocations)) this.#ranks.trust();
    if (this.#weights.ask(look_for)) void this.#lookForWeights();
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
    await Promise.all(converge(plan.ranks, this.#ranks.statuses()).map((action) => this.#ranks.act(action)));
    this.#changed.raise();
  }

  async #report(link: ServerLink, session: string, joined_inventory: number, signal: AbortSignal): Promise<void> {
    let sent = joined_inventory;
    for (let seq = 1; ; seq += 1) {
      await this.#changed.wait(REPORT_INTERVAL_MS, signal);
      signal.throwIfAborted();
      await Bun.sleep(REPORT_GATHER_MS);
      this.#changed.clear();
      const revision = this.#inventory_revision;
      const inventory = revision === sent ? null : this.#inventory;
      await link.report({ session, seq, clock_ms: Date.now(), seen: this.#state.seen, inventory, ranks: this.#ranks.statuses() }, signal);
      sent = revision;
    }
  }

  async #answer(link: ServerLink, session: string, request: PollAnswer["requests"][number], signal: AbortSignal): Promise<void> {
    try {
      const known = v.safeParse(NodeRequest, request);
      const error = `its agent ${VERSION} does not know "${request.kind}"`;
      await link.result(request.id, { session, result: known.success ? await this.#resultOf(known.output) : { error } }, signal);
    } catch (error) {
      this.#log.debug("an answer did not arrive", { id: request.id, why: messageOf(error) });
    }
  }

  async #resultOf(request: NodeRequest): Promise<NodeResult> {
    try {
      return request.kind === "log" ? this.#logOf(request.attempt, request.lines) : await this.#engines.check(request.engine);
    } catch (error) {
      return { error: explain(error) };
    }
  }

  #logOf(attempt: AttemptId, lines: number): NodeResult {
    const folder = this.#ranks.folderOf(attempt);
    if (folder === null) return { error: `attempt ${attempt} is not on this node` };
    return { lines: tailOf(folder, lines) };
  }

  async #refresh(): Promise<void> {
    try {
      if (await changedFiles(this.#options.config.tls, this.#identity)) await this.#renew();
      await this.#ranks.measure();
      await this.#engines.tidy();
      const ports = await this.#fabrics.look();
      const inventory = await readInventory(this.#options.config, ports);
      const weights = await this.#weights.look();
      const { engines, installs, doctor } = this.#inventory;
      this.#inventory = { ...inventory, engines, installs, weights, ...(doctor && { doctor }) };
      this.#inventory_revision += 1;
    } catch (error) {
      this.#log.warn("cannot read this machine", { why: messageOf(error) });
    }
  }

  /** Engines are offered, withdrawn or installed. */
  #showEngines(): void {
    this.#inventory = { ...this.#inventory, engines: this.#engines.offers(), installs: this.#engines.installs() };
    this.#inventory_revision += 1;
    this.#changed.raise();
  }

  /** The server has asked about other weights: places for replicas wait for the answer. */
  async #lookForWeights(): Promise<void> {
    this.#inventory = { ...this.#inventory, weights: await this.#weights.look() };
    this.#inventory_revision += 1;
    this.#changed.raise();
  }

  /** Examines the machine as doctor does, beside everything else; a subnet manager that is silent makes it slow. */
  async #examine(): Promise<void> {
    const { config } = this.#options;
    try {
      const doctor = await examine(config, this.#node, this.#log);
      // The ports are looked at again, too: the first examination may have installed what asks them.
      await this.#refresh();
      this.#inventory = { ...this.#inventory, doctor };
      this.#inventory_revision += 1;
      this.#changed.raise();
    } catch (error) {
      this.#log.warn("cannot examine this machine", { why: messageOf(error) });
    }
  }

  /** The certificate was renewed on disk: takes it, and makes the shims take it. */
  async #renew(): Promise<void> {
    try {
      this.#identity = await loadNodeIdentity(this.#options.config.tls, this.#node);
      this.#dialer.setIdentity(this.#identity);
      this.#ranks.trust();
      this.#log.info("took the certificate again", { serial: this.#identity.serial });
    } catch (error) {
      const why = explain(error);
      this.#log.error("kept the old certificate", { why });
    }
  }
}
