import { islandsOf, type Fabrics, type IslandNumbers } from "../core/fabrics.ts";
import { stateAfterSilence } from "../core/loss.ts";
import { nextParts, type PlanParts } from "../core/plan-parts.ts";
import type { Happening, NodeSeen, Replica } from "../core/world.ts";
import { Waiters } from "../os/wakeup.ts";
import type { Refusal } from "../protocol/admin-api.ts";
import type { NodeRequest, NodeResult, RankStatus } from "../protocol/agent-api.ts";
import type { ModelSpec, SizedModel } from "../protocol/catalog.ts";
import type { WantedEngine } from "../protocol/engine-release.ts";
import { OperatorError } from "../protocol/errors.ts";
import type { ModelName, NodeId, ReplicaId } from "../protocol/ids.ts";
import { BLOCKING_QUERY_MS, GATHER_MS, GATHER_QUIET_MS, NODE_SUSPECT_AFTER_MS } from "../protocol/limits.ts";
import type { ModelShape } from "../protocol/model-shape.ts";
import { comparePlanVersions, type NodePlan, type PlanVersion, type RankLaunch, type Revocation } from "../protocol/plan.ts";
import { pathsOf, sourcesKept, wantedModels } from "./models.ts";
import type { Session } from "./sessions.ts";
import type { ModelScale, NodeIntent, StoredNode } from "./store.ts";

/** A node as the server knows it: what is kept, and what its present agent says. */
export interface FleetNode {
  kept: StoredNode;
  session: Session | null;
  /** Null until its agent has spoken to this server process. */
  ranks: readonly RankStatus[] | null;
}

/** State of a node from how long it has been silent. */
export function stateOf(node: FleetNode, listening_ms: number, now_ms: number): Pick<NodeSeen, "state" | "state_reason"> {
  const { last_seen_ms } = node.kept;
  // While nobody listened nobody could be heard. A time to come is of a clock that has been set since.
  const heard_ms = last_seen_ms > now_ms ? listening_ms : Math.max(last_seen_ms, listening_ms);
  const seen = stateAfterSilence(now_ms - heard_ms);
  return seen.state === "ready" && node.ranks === null ? { ...seen, state_reason: "its agent has not spoken to this server yet" } : seen;
}

/** Why nothing new goes to a node; null when it may. */
export function cordonOf(intent: NodeIntent | undefined): string | null {
  if (intent?.drain) return `it is being drained, by ${intent.by}`;
  return intent?.cordon ? `cordoned by ${intent.by}` : null;
}

/** Everything the server holds in memory, and who waits for it to change. */
export class Fleet {
  readonly started_ms: number;
  /** Since when this server listens without a pause: every node has the whole grace time from then on. */
  listening_ms: number;
  #looked_ms: number;
  readonly nodes = new Map<NodeId, FleetNode>();
  replicas: readonly Replica[] = [];
  /** The catalog as it was read last. */
  catalog: readonly ModelSpec[] = [];
  /** What is known of weights from where they come from, by source. */
  heads: ReadonlyMap<string, ModelShape> = new Map();
  /** Versions of engines that nodes are to have. */
  engines: () => readonly WantedEngine[] = () => [];
  /** Sources that are just asked for that. */
  measuring: ReadonlySet<string> = new Set();
  scales: ReadonlyMap<ModelName, ModelScale> = new Map();
  refusals: ReadonlyMap<ReplicaId, readonly Refusal[]> = new Map();
  revocations: readonly Revocation[] = [];
  /** What operators want of nodes. */
  intents: ReadonlyMap<NodeId, NodeIntent> = new Map();
  /** When an operator last said that vanished nodes are really gone. */
  thawed_ms = 0;
  /** Replicas an operator asked to have replaced, until the next decision. */
  readonly to_replace = new Map<ReplicaId, "restart" | "move">();
  /** Why no decision counts at present; null when they do. */
  decision_fault: string | null = null;
  /** Rises with every change of what all nodes are told: the revocations, and the paths to look for. */
  notice_count = 0;
  version: PlanVersion;
  #parts: PlanParts = new Map();
  #island_numbers: IslandNumbers = {};
  #next_epoch = 0;
  #last_join_ms = 0;
  readonly #waiting = new Map<NodeId, Waiters>();
  readonly #requests = new Map<NodeId, NodeRequest[]>();
  readonly #answers = new Map<string, { readonly node: NodeId; readonly resolve: (result: NodeResult) => void }>();
  readonly #told = new Map<NodeId, NodeSeen["state"]>();

  constructor(version: PlanVersion, started_ms: number) {
    this.version = version;
    this.started_ms = started_ms;
    this.listening_ms = started_ms;
    this.#looked_ms = started_ms;
  }

  /** What is wanted. */
  get models(): readonly SizedModel[] {
    return this.wanted(this.catalog);
  }

  /** What would be wanted with another catalog. */
  wanted(catalog: readonly ModelSpec[]): readonly SizedModel[] {
    const inventories = [...this.nodes.values()].map(({ kept }) => kept.inventory);
    return wantedModels(catalog, this.scales, this.heads, inventories);
  }

  /** Takes a catalog; every node is told of paths that are new in it. */
  setCatalog(catalog: readonly ModelSpec[]): void {
    const before = pathsOf(this.catalog);
    this.catalog = catalog;
    if (!Bun.deepEquals(before, pathsOf(catalog))) this.notify();
  }

  /** Has every node told what all nodes are told. */
  notify(): void {
    this.notice_count += 1;
    this.wakeAll();
  }

  /** The server looks at its fleet. If it has not for long, it or its machine stood still, or the clock was set. */
  look(now_ms: number): void {
    if (Math.abs(now_ms - this.#looked_ms) >= NODE_SUSPECT_AFTER_MS) this.listening_ms = now_ms;
    this.#looked_ms = now_ms;
  }

  /** A node has joined just now. */
  noteJoin(now_ms: number): void {
    this.#last_join_ms = now_ms;
  }

  /** Whether nodes are still coming: known ones have not spoken yet, or one has joined this very moment. Ends soon in any case. */
  isGathering(now_ms: number): boolean {
    if (now_ms - this.started_ms >= GATHER_MS) return false;
    return now_ms - this.#last_join_ms < GATHER_QUIET_MS || [...this.nodes.values()].some(({ ranks }) => ranks === null);
  }

  /** A node's part; null while none counts for its present session. */
  part(node: NodeId): NodePlan | null {
    return this.nodes.get(node)?.session?.planned ? (this.#parts.get(node) ?? null) : null;
  }

  /** Which parts a decision changes, at which version; nothing is given out until {@link publish}. */
  preview(ranks: ReadonlyMap<NodeId, readonly RankLaunch[]>): { parts: PlanParts; changed: readonly NodeId[]; version: PlanVersion } {
    this.#startEpoch();
    const next = { epoch: this.version.epoch, generation: this.version.generation + 1 };
    const { parts, changed } = nextParts(this.#parts, ranks, next);
    return { parts, changed, version: changed.length > 0 ? next : this.version };
  }

  /** @param sessions those that had spoken when the decision was begun */
  publish(parts: PlanParts, version: PlanVersion, sessions: readonly Session[]): void {
    const before = this.#parts;
    this.#parts = parts;
    this.version = version;
    const fresh = new Set(sessions.filter((session) => !session.planned));
    for (const session of fresh) session.planned = true;
    for (const [id, { session }] of this.nodes) {
      if (parts.get(id) !== before.get(id) || (session && fresh.has(session))) this.wake(id);
    }
  }

  /** Somebody has seen more than this store knows: the next decision is given out anew, whole, under a later epoch. */
  raiseEpoch(seen: PlanVersion): boolean {
    if (comparePlanVersions(seen, this.version) <= 0 || seen.epoch < this.#next_epoch) return false;
    this.#next_epoch = Math.max(seen.epoch + 1, Math.floor(this.started_ms / 1_000));
    return true;
  }

  #startEpoch(): void {
    if (this.#next_epoch <= this.version.epoch) return;
    this.version = { epoch: this.#next_epoch, generation: 0 };
    this.#parts = new Map();
  }

  wake(node: NodeId): void {
    this.#waiting.get(node)?.wake();
  }

  wakeAll(): void {
    for (const node of this.#waiting.keys()) this.wake(node);
  }

  /** Waits until a node has something new: a part beyond `have`, a request, or anything that woke it. */
  async news(node: NodeId, have: PlanVersion, signal: AbortSignal): Promise<void> {
    const part = this.part(node);
    const has = this.nodes.get(node)?.session?.notices === this.notice_count;
    if ((part && comparePlanVersions(part.version, have) > 0) || (this.#requests.get(node)?.length ?? 0) > 0) return;
    if (!has || signal.aborted) return;
    const waiting = this.#waiting.get(node) ?? new Waiters();
    this.#waiting.set(node, waiting);
    await waiting.wait(BLOCKING_QUERY_MS, signal);
  }

  /** Takes the questions that wait for a node. */
  takeRequests(node: NodeId): NodeRequest[] {
    const requests = this.#requests.get(node) ?? [];
    this.#requests.delete(node);
    return requests;
  }

  /**
   * Asks a node something through its agent.
   * @param within_ms how long its answer may take
   * @throws OperatorError E_UNREACHABLE, E_TIMEOUT, E_NOT_FOUND when the node cannot say
   */
  async ask(node: NodeId, request: NodeRequest, within_ms: number): Promise<Exclude<NodeResult, { error: string }>> {
    if (!this.nodes.get(node)?.session)
      throw new OperatorError("E_UNREACHABLE", `cannot ask node ${node}`, "its agent is not connected", "see llmgw ctl nodes");
    const answered = Promise.withResolvers<NodeResult | null>();
    const late = setTimeout(() => answered.resolve(null), within_ms);
    this.#answers.set(request.id, { node, resolve: answered.resolve });
    this.#requests.set(node, [...(this.#requests.get(node) ?? []), request]);
    this.wake(node);
    const result = await answered.promise;
    clearTimeout(late);
    this.#answers.delete(request.id);
    this.#requests.set(
      node,
      (this.#requests.get(node) ?? []).filter(({ id }) => id !== request.id),
    );
    if (result === null) {
      const why = `no answer within ${within_ms / 1_000} s`;
      throw new OperatorError("E_TIMEOUT", `node ${node} did not answer`, why, "see llmgw ctl nodes");
    }
    if ("error" in result) throw new OperatorError("E_NOT_FOUND", `node ${node} cannot say`, result.error, "see llmgw ctl events");
    return result;
  }

  /** Takes an answer; one nobody waits for, or of a node that was not asked, changes nothing. */
  answer(node: NodeId, id: string, result: NodeResult): void {
    const asked = this.#answers.get(id);
    if (asked?.node === node) asked.resolve(result);
  }

  /** What changed of the nodes' states since this was last asked, for the list of events. */
  transitions(now_ms: number): Happening[] {
    const news: Happening[] = [];
    for (const [id, node] of this.nodes) {
      const { state, state_reason } = stateOf(node, this.listening_ms, now_ms);
      const before = this.#told.get(id) ?? "ready";
      if (state === before) continue;
      this.#told.set(id, state);
      const subject = `node/${id}`;
      if (state === "ready") news.push({ level: "info", kind: "node-ready", subject, text: `it reports again; it was ${before}` });
      else news.push({ level: state === "lost" ? "error" : "warn", kind: `node-${state}`, subject, text: state_reason });
    }
    return news;
  }

  /** Which nodes share which fabric, by what their ports see. Islands keep their names from one call to the next. */
  fabrics(now_ms: number): Fabrics {
    // A lost node's ports tell of a fabric that may no longer be as it was.
    const present = [...this.nodes.values()].filter((node) => stateOf(node, this.listening_ms, now_ms).state !== "lost");
    const ports = present.flatMap(({ kept }) => (kept.inventory.ports ?? []).map((port) => ({ ...port, node: kept.id })));
    const fabrics = islandsOf(ports, this.#island_numbers);
    this.#island_numbers = fabrics.numbers;
    return fabrics;
  }

  /** Nodes as the planner sees them, in order of their ids. */
  seen(now_ms: number): NodeSeen[] {
    return [...this.nodes.values()]
      .map((node) => ({
        id: node.kept.id,
        address: node.kept.address,
        ...stateOf(node, this.listening_ms, now_ms),
        inventory: node.kept.inventory,
        holds: sourcesKept(this.catalog, node.kept.inventory),
        ranks: node.ranks,
        heard_ms: node.kept.last_seen_ms,
        cordon: cordonOf(this.intents.get(node.kept.id)),
        drain: this.intents.get(node.kept.id)?.drain ?? null,
      }))
      .sort((a, b) => (a.id < b.id ? -1 : 1));
  }
}
