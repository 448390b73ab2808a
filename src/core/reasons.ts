import { CERTIFICATE_WARN_MS } from "../protocol/limits.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { NodeId } from "../protocol/ids.ts";
import { runs } from "./world.ts";
import type { NodeSeen, Placement, Replica } from "./world.ts";

type Nodes = ReadonlyMap<NodeId, NodeSeen>;

/** Why a replica is in its state, with what is observed just now: what it does, or which of its nodes is not well. */
export function reasonNow(replica: Replica, nodes: Nodes): string {
  if (!runs(replica)) return replica.reason;
  const unwell = replica.placements.map(({ node }) => nodes.get(node)).find((node) => node !== undefined && node.state !== "ready");
  if (unwell) return `node ${unwell.id} is ${unwell.state}: ${unwell.state_reason}; the replica stays assigned to it`;
  if (replica.state !== "fetching" && replica.state !== "starting") return replica.reason;
  const details = replica.placements.map((placement) => detailOf(placement, nodes)).filter((detail) => detail !== "");
  return details[0] ?? replica.reason;
}

function detailOf({ node, launch }: Placement, nodes: Nodes): string {
  const status = nodes.get(node)?.ranks?.find((rank) => rank.attempt === launch.attempt);
  return status && status.phase !== "ready" && status.phase !== "exited" ? status.detail : "";
}

/** Ready, and on nodes that are not lost. */
export function serves(replica: Replica, nodes: Nodes): boolean {
  return replica.state === "ready" && replica.placements.every(({ node }) => nodes.get(node)?.state !== "lost");
}

/** Why a model has fewer ready replicas than wanted; empty when it has them all. */
export function reasonOfModel(spec: SizedModel, group: readonly Replica[], nodes: Nodes): string {
  if (group.filter((replica) => serves(replica, nodes)).length >= spec.replicas) return "";
  const short = group.filter((replica) => !serves(replica, nodes));
  const first = (["failed", "pending"] as const).map((state) => short.find((replica) => replica.state === state)).find(Boolean) ?? short[0];
  return first ? `${first.id} is ${first.state}: ${reasonNow(first, nodes)}` : "replicas are being made";
}

/** Why a node's certificate should be renewed now; null while it has time. */
export function certificateReason(expires_ms: number, now_ms: number): string | null {
  const left_ms = expires_ms - now_ms;
  if (left_ms >= CERTIFICATE_WARN_MS) return null;
  const days = Math.floor(left_ms / 86_400_000);
  return left_ms <= 0 ? "its certificate has ended" : `its certificate ends in ${days} ${days === 1 ? "day" : "days"}`;
}
