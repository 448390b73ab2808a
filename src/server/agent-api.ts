import { randomUUID } from "node:crypto";
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Happening } from "../core/world.ts";
import type { Log } from "../os/log.ts";
import type { Peer } from "../pki/trust.ts";
import { CLAIMED_NODE_HEADER, JoinRequest, PollRequest, Report, ResultMessage } from "../protocol/agent-api.ts";
import type { JoinAnswer, PollAnswer, ReportAnswer } from "../protocol/agent-api.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { NodeId } from "../protocol/ids.ts";
import { comparePlanVersions } from "../protocol/plan.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { VERSION } from "../protocol/version.ts";
import type { Fleet, FleetNode } from "./fleet.ts";
import { findRoute, goneSignal, readJson, sendJson, type Route } from "./http.ts";
import { pathsOf } from "./models.ts";
import { decideJoin, refuseOlderJoin, type Session } from "./sessions.ts";
import type { Store, StoredNode } from "./store.ts";

interface AgentApiParts {
  readonly fleet: Fleet;
  readonly store: Store;
  readonly log: Log;
  readonly now: () => number;
  /** Something was observed: look at the fleet again. */
  readonly observed: () => void;
  readonly say: (event: Happening) => Promise<void>;
}

interface Call {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  readonly peer: Peer;
  readonly node: NodeId;
}

/** The agents' side of the control listener: each node speaks for itself alone. */
export class AgentApi {
  readonly #parts: AgentApiParts;
  readonly #routes: readonly Route<Call>[] = [
    { method: "POST", path: "/agent/v1/join", run: (call) => this.#join(call) },
    { method: "POST", path: "/agent/v1/poll", run: (call) => this.#poll(call) },
    { method: "POST", path: "/agent/v1/report", run: (call) => this.#report(call) },
    { method: "POST", path: "/agent/v1/results/:id", run: (call, { id = "" }) => this.#result(call, id) },
  ];

  constructor(parts: AgentApiParts) {
    this.#parts = parts;
  }

  async handle(request: IncomingMessage, response: ServerResponse, peer: Peer): Promise<void> {
    const found = findRoute(this.#routes, request.method ?? "", (request.url ?? "").split("?")[0] ?? "");
    if (!found)
      throw new OperatorError(
        "E_NOT_FOUND",
        `no ${request.method} ${request.url}`,
        "the agent API has no such call",
        "update the older side",
      );
    const node = this.#claim(request.headers[CLAIMED_NODE_HEADER], peer);
    await found.route.run({ request, response, peer, node }, found.params);
  }

  /** The node a request speaks for: the claim must be the certificate's name. */
  #claim(claimed: unknown, peer: Peer): NodeId {
    if (claimed === peer.name) return peer.name;
    const shown = typeof claimed === "string" ? claimed.slice(0, 63) : "none";
    this.#parts.log.warn("refused a node that is not who it claims to be", {
      certificate: peer.name,
      claimed: shown,
      address: peer.address,
    });
    const why = `the certificate is that of ${peer.name}, the claim is ${shown}`;
    this.#tell({ level: "warn", kind: "node-identity-refused", subject: `node/${peer.name}`, text: `${why}, from ${peer.address}` });
    throw new OperatorError(
      "E_IDENTITY",
      `this is not node ${shown}`,
      why,
      `run the agent as ${peer.name}, or issue a certificate for ${shown}`,
    );
  }

  async #join({ request, response, peer, node }: Call): Promise<void> {
    const { fleet, log, now, observed, store } = this.#parts;
    const join = await readJson(request, JoinRequest, `the join of node ${node}`);
    this.#claim(join.node, peer);
    if (join.protocol !== PROTOCOL && join.protocol !== PROTOCOL - 1) {
      const why = `its agent speaks protocol ${join.protocol}, this server ${PROTOCOL} and the one before`;
      throw new OperatorError("E_PROTOCOL", `node ${node} cannot join`, why, "update the older side");
    }
    const now_ms = now();
    const before = fleet.nodes.get(node);
    this.#refuseOther(before, join, peer, now_ms);
    const same = before?.kept.machine_id === join.session_key.machine_id;
    refuseOlderJoin(node, same ? before.session : null, join.joins, now_ms);
    const kept: StoredNode = {
      id: node,
      address: join.address,
      agent_version: join.version,
      joined_ms: before?.kept.joined_ms ?? now_ms,
      last_seen_ms: now_ms,
      clock_offset_ms: join.clock_ms - now_ms,
      certificate_expires_ms: peer.expires_ms,
      certificate_issued_ms: peer.issued_ms,
      machine_id: join.session_key.machine_id,
      peer_address: peer.address,
      inventory: join.inventory,
    };
    const { session_key: key } = join;
    const told = { seq: 0, joins: join.joins, last_seen_ms: now_ms, planned: false, notices: -1 };
    const session: Session = { id: randomUUID(), key, serial: peer.serial, address: peer.address, ...told };
    await store.saveNode(kept);
    fleet.nodes.set(node, { kept, session, ranks: join.ranks });
    fleet.noteJoin(now_ms);
    if (fleet.raiseEpoch(join.seen))
      log.warn("a node has seen a later plan than this store: giving out everything under a new epoch", {
        node,
        seen: `${join.seen.epoch}.${join.seen.generation}`,
      });
    log.info("node joined", {
      node,
      address: peer.address,
      agent_version: join.version,
      ranks: join.ranks.length,
      clock_offset_ms: kept.clock_offset_ms,
    });
    const text = before ? "its agent is back" : `joined from ${peer.address}`;
    await this.#parts.say({ level: "info", kind: "node-joined", subject: `node/${node}`, text });
    observed();
    sendJson(response, { protocol: PROTOCOL, session: session.id, version: VERSION, clock_ms: now_ms } satisfies JoinAnswer);
  }

  /** @throws OperatorError E_DUPLICATE_NODE when another machine holds the node's session */
  #refuseOther(before: FleetNode | undefined, { node, session_key: key }: JoinRequest, peer: Peer, now_ms: number): void {
    const { log, fleet } = this.#parts;
    // A server that has just started cannot know whether the machine that held the node is silent: it gets time to come back.
    const last_seen_ms = Math.max(before?.session?.last_seen_ms ?? before?.kept.last_seen_ms ?? 0, fleet.started_ms);
    const holder = before && { machine_id: before.kept.machine_id, address: before.kept.peer_address, last_seen_ms };
    try {
      decideJoin(node, holder ?? null, { key, address: peer.address }, now_ms);
    } catch (error) {
      if (!(error instanceof OperatorError)) throw error;
      log.warn("refused a second machine with a node's certificate", {
        node,
        address: peer.address,
        first: holder?.address,
        serial: peer.serial,
      });
      this.#tell({ level: "error", kind: "node-duplicate", subject: `node/${node}`, text: error.why });
      throw error;
    }
  }

  /** Notes an event without making the answer wait for it. */
  #tell(event: Happening): void {
    this.#parts.say(event).catch((error: unknown) => this.#parts.log.error("cannot note an event", { why: messageOf(error) }));
  }

  /** The node of a session. @throws OperatorError E_STALE_SESSION for any but the newest */
  #inSession(node: NodeId, session: string): FleetNode & { session: NonNullable<FleetNode["session"]> } {
    const entry = this.#parts.fleet.nodes.get(node);
    if (entry?.session?.id === session) return entry as FleetNode & { session: NonNullable<FleetNode["session"]> };
    throw new OperatorError(
      "E_STALE_SESSION",
      `node ${node} has to join again`,
      "this server does not know the session, or a newer one took its place",
      "the agent joins again by itself",
    );
  }

  async #poll({ request, response, node }: Call): Promise<void> {
    const { fleet, now } = this.#parts;
    const { session, have } = await readJson(request, PollRequest, `the poll of node ${node}`);
    this.#inSession(node, session);
    const gone = goneSignal(response);
    await fleet.news(node, have, gone);
    if (gone.aborted) return;
    const entry = this.#inSession(node, session);
    entry.session.last_seen_ms = now();
    entry.session.notices = fleet.notice_count;
    const part = fleet.part(node);
    const plan = part && comparePlanVersions(part.version, have) > 0 ? part : null;
    const told = { revocations: [...fleet.revocations], look_for: pathsOf(fleet.catalog), engines: [...fleet.engines()] };
    sendJson(response, { plan, requests: fleet.takeRequests(node), ...told } satisfies PollAnswer);
  }

  async #report({ request, response, node, peer }: Call): Promise<void> {
    const { fleet, now, observed, store } = this.#parts;
    const report = await readJson(request, Report, `the report of node ${node}`);
    const entry = this.#inSession(node, report.session);
    const now_ms = now();
    // A repeat, or one that was overtaken, changes nothing.
    if (report.seq > entry.session.seq) {
      entry.session.seq = report.seq;
      entry.session.last_seen_ms = now_ms;
      const changed = JSON.stringify(entry.ranks) !== JSON.stringify(report.ranks);
      entry.ranks = report.ranks;
      entry.kept = {
        ...entry.kept,
        last_seen_ms: now_ms,
        clock_offset_ms: report.clock_ms - now_ms,
        certificate_expires_ms: peer.expires_ms,
        certificate_issued_ms: peer.issued_ms,
        inventory: report.inventory ?? entry.kept.inventory,
      };
      if (report.inventory) await store.saveNode(entry.kept);
      if (fleet.raiseEpoch(report.seen)) observed();
      if (changed || report.inventory) observed();
    }
    sendJson(response, { clock_ms: now_ms } satisfies ReportAnswer);
  }

  async #result({ request, response, node }: Call, id: string): Promise<void> {
    const message = await readJson(request, ResultMessage, `an answer of node ${node}`);
    this.#inSession(node, message.session);
    this.#parts.fleet.answer(node, id, message.result);
    sendJson(response, {});
  }
}
