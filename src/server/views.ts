import { deadlineOf } from "../core/lifecycle.ts";
import { memoryOf } from "../core/memory.ts";
import { certificateReason, reasonNow, reasonOfModel, serves } from "../core/reasons.ts";
import type { FabricView, KeyView, ModelView, NodeView, ReplicaView, StatusView } from "../protocol/admin-api.ts";
import type { Gpu } from "../protocol/inventory.ts";
import type { GatewayStatus } from "../protocol/gateway-api.ts";
import { freezeOf } from "../core/loss.ts";
import { DEFAULT_POLICY, holds } from "../core/world.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { isRevoked } from "../protocol/plan.ts";
import { VERSION } from "../protocol/version.ts";
import { engineWarnings } from "./engine-views.ts";
import { cordonOf, stateOf, type Fleet } from "./fleet.ts";
import type { KeyRow } from "./store.ts";

/** The fleet as the admin API shows it. Pure: everything comes in. */

/** What becomes of its replicas goes by how long it is silent, as with any node. */
const REVOKED = { state: "refused", state_reason: "its certificate was revoked, and it has not come with a newer one" } as const;

export function nodeViews(fleet: Fleet, now_ms: number): NodeView[] {
  const { islands } = fleet.fabrics(now_ms);
  return [...fleet.nodes.values()]
    .map((node): NodeView => {
      const { inventory, id, address, agent_version, last_seen_ms, joined_ms, clock_offset_ms, certificate_expires_ms } = node.kept;
      const replicas = fleet.replicas.filter((replica) => replica.placements.some((placement) => placement.node === id) && holds(replica));
      const revoked = isRevoked(fleet.revocations, { name: id, issued_ms: node.kept.certificate_issued_ms ?? Infinity });
      return {
        id,
        ...(revoked ? REVOKED : stateOf(node, fleet.listening_ms, now_ms)),
        address,
        agent_version,
        last_seen_ms: node.session?.last_seen_ms ?? last_seen_ms,
        joined_ms,
        clock_offset_ms,
        certificate_expires_ms,
        fabrics: [...new Set((inventory.ports ?? []).map((port) => port.fabric).filter((name) => name !== ""))],
        island: islands.find((island) => island.nodes.includes(id))?.name ?? id,
        cordon: cordonOf(fleet.intents.get(id)) ?? "",
        drain: fleet.intents.get(id)?.drain ?? null,
        replicas: replicas.map((replica) => replica.id),
        inventory,
      };
    })
    .sort((a, b) => (a.id < b.id ? -1 : 1));
}

export function fabricViews(fleet: Fleet, now_ms: number): FabricView[] {
  const { islands, warnings } = fleet.fabrics(now_ms);
  return islands
    .map(({ name, declared, nodes, managers, proved }) => ({
      name,
      declared: [...declared],
      nodes: [...nodes],
      managers: [...managers],
      proved,
      warnings: warnings
        .filter(({ fabric }) => declared.includes(fabric))
        .map(({ code, subject, text, remedy }) => ({ code, subject, text, remedy })),
    }))
    .sort((a, b) => (a.name < b.name ? -1 : 1));
}

export function modelViews(fleet: Fleet, now_ms: number): ModelView[] {
  const nodes = new Map(fleet.seen(now_ms).map((node) => [node.id, node]));
  return fleet.models.map((spec): ModelView => {
    const group = fleet.replicas.filter((replica) => replica.model === spec.name);
    const ready = group.filter((replica) => serves(replica, nodes)).length;
    return {
      name: spec.name,
      engine: spec.engine,
      source: spec.source ?? null,
      wanted: spec.replicas,
      catalog_replicas: fleet.catalog.find(({ name }) => name === spec.name)?.replicas ?? 0,
      scaled_by: fleet.scales.get(spec.name)?.by ?? "",
      ready,
      nodes: spec.nodes,
      gpus: spec.gpus,
      reason: reasonOfModel(spec, group, nodes),
    };
  });
}

export function replicaViews(fleet: Fleet, in_flight: ReadonlyMap<string, number> | null, now_ms: number): ReplicaView[] {
  const nodes = new Map(fleet.seen(now_ms).map((node) => [node.id, node]));
  const status = (node: string, attempt: string) => nodes.get(node)?.ranks?.find((rank) => rank.attempt === attempt);
  return fleet.replicas.map((replica): ReplicaView => {
    const first = replica.placements[0]?.launch.attempt ?? "";
    const ranks = replica.placements.map(({ node, launch }) => {
      const seen = holds(replica) ? status(node, launch.attempt) : undefined;
      return {
        rank: launch.rank,
        node,
        attempt: launch.attempt,
        address: `${launch.door.address}:${launch.door.port}`,
        engine_pid: seen?.engine_pid ?? null,
        memory_used: seen?.memory_used ?? null,
        gpu_memory_used: seen ? usedOn(launch.gpus, nodes.get(node)?.inventory.gpus ?? []) : null,
      };
    });
    return {
      id: replica.id,
      model: replica.model,
      engine: replica.spec.engine,
      state: replica.state,
      since_ms: replica.since_ms,
      reason: reasonNow(replica, nodes),
      failures: replica.failures,
      next_try_ms: replica.next_try_ms,
      deadline_ms: deadlineOf(replica, DEFAULT_POLICY),
      ranks,
      memory: memoryOf(replica.spec),
      refusals: [...(fleet.refusals.get(replica.id) ?? [])],
      in_flight: in_flight?.get(first) ?? 0,
      last_lines: [...replica.last_lines],
    };
  });
}

/** Memory in use on these GPUs together, by anyone: they are given whole to one replica. */
function usedOn(uuids: readonly string[], gpus: readonly Gpu[]): number | null {
  const used = gpus.flatMap(({ uuid, memory_used }) => (uuids.includes(uuid) && "value" in memory_used ? [memory_used.value] : []));
  return used.length === 0 ? null : used.reduce((sum, bytes) => sum + bytes, 0);
}

export function keyView({ id, name, created_ms, revoked_ms }: KeyRow): KeyView {
  return { id, name, created_ms, revoked_ms };
}

export interface GatewaySeen {
  readonly status: GatewayStatus | null;
  readonly trouble: string;
  readonly address: string;
}

export function statusView(fleet: Fleet, gateway: GatewaySeen, config_fault: string | null, now_ms: number): StatusView {
  const nodes = nodeViews(fleet, now_ms);
  const count = (state: string) => nodes.filter((node) => node.state === state).length;
  const replicas = (state: string) => fleet.replicas.filter((replica) => replica.state === state).length;
  return {
    server_version: VERSION,
    protocol: PROTOCOL,
    started_ms: fleet.started_ms,
    now_ms,
    plan: fleet.version,
    nodes: { ready: count("ready"), suspect: count("suspect"), lost: count("lost") },
    replicas: {
      wanted: fleet.models.reduce((sum, spec) => sum + spec.replicas, 0),
      ready: replicas("ready"),
      failed: replicas("failed"),
      pending: replicas("pending"),
    },
    gateway: {
      state: gateway.status ? "serving" : "unreachable",
      detail: gateway.trouble,
      address: gateway.address,
      in_flight: gateway.status?.in_flight ?? 0,
    },
    warnings: warningsOf(fleet, gateway, nodes, config_fault, now_ms),
  };
}

/** Clocks further apart than this are worth a look, in ms. */
const CLOCK_OFFSET_MS = 5_000;

function warningsOf(
  fleet: Fleet,
  gateway: GatewaySeen,
  nodes: readonly NodeView[],
  config_fault: string | null,
  now_ms: number,
): StatusView["warnings"] {
  const warnings: StatusView["warnings"] = [];
  const add = (code: string, subject: string, text: string, remedy: string) => warnings.push({ code, subject, text, remedy });
  if (fleet.decision_fault !== null) {
    const text = `no decision counts, what runs goes on: ${fleet.decision_fault}`;
    add("decisions-fail", "server", text, "free some space when the store cannot be written; the server's log says more");
  }
  const freeze = freezeOf({ nodes: fleet.seen(now_ms), policy: DEFAULT_POLICY, thawed_ms: fleet.thawed_ms });
  if (freeze) {
    const text = `${freeze.nodes.length} nodes vanished together (${freeze.nodes.join(", ")}): nothing of theirs is replaced`;
    add("frozen", "server", text, "look at the network; when they are really gone: llmgw ctl thaw");
  }
  if (!gateway.status)
    add(
      "gateway-unreachable",
      "gateway",
      `the gateway does not answer: ${gateway.trouble}`,
      "see the server's log, or journalctl -u llmgw-gateway",
    );
  for (const node of nodes) {
    if (node.state === "lost" || node.state === "suspect")
      add(`node-${node.state}`, `node/${node.id}`, node.state_reason, "check the machine and journalctl -u llmgw-agent there");
    if (node.state === "refused")
      add("node-refused", `node/${node.id}`, node.state_reason, `llmgw ctl node remove ${node.id}, or llmgw onboard --renew for it`);
  }
  for (const model of modelViews(fleet, now_ms)) {
    if (model.ready < model.wanted)
      add(
        "model-short",
        `model/${model.name}`,
        `${model.ready} of ${model.wanted} replicas are ready: ${model.reason}`,
        `llmgw ctl why model/${model.name}`,
      );
  }
  if (config_fault !== null)
    add("config-invalid", "server", `kept the old configuration: ${config_fault}`, "llmgw config check, then llmgw ctl reload");
  for (const { code, subject, text, remedy } of fleet.fabrics(now_ms).warnings) add(code, subject, text, remedy);
  warnings.push(...engineWarnings(nodes, fleet.engines()));
  for (const node of nodes) {
    const ending = certificateReason(node.certificate_expires_ms, now_ms);
    if (ending !== null)
      add("certificate-ends", `node/${node.id}`, ending, `llmgw onboard --node ${node.id} --addr ${node.address} --renew`);
    if (Math.abs(node.clock_offset_ms) > CLOCK_OFFSET_MS)
      add(
        "clock-offset",
        `node/${node.id}`,
        `its clock is ${Math.round(node.clock_offset_ms / 1_000)} s off`,
        "set up time synchronisation on it",
      );
    for (const { code, text } of node.inventory.warnings) add(code, `node/${node.id}`, text, "llmgw doctor on the node says more");
    for (const engine of node.inventory.engines)
      if (!engine.offered)
        add("engine-refused", `node/${node.id}`, `${engine.kind} at ${engine.path}: ${engine.reason}`, "correct the path or the engine");
  }
  return warnings;
}
