import type { NodeId } from "../protocol/ids.ts";
import { NODE_LOST_AFTER_MS, NODE_SUSPECT_AFTER_MS } from "../protocol/limits.ts";
import { runs, type NodeSeen, type Replica, type World } from "./world.ts";

/** A node's state by how long its agent has been silent, in ms, and why; "" while it is ready. */
export function stateAfterSilence(silent_ms: number): Pick<NodeSeen, "state" | "state_reason"> {
  const state_reason = `no report for ${Math.round(silent_ms / 1_000)} s`;
  if (silent_ms >= NODE_LOST_AFTER_MS) return { state: "lost", state_reason };
  if (silent_ms >= NODE_SUSPECT_AFTER_MS) return { state: "suspect", state_reason };
  return { state: "ready", state_reason: "" };
}

/** Nodes that vanished together: more likely the network or the server than all of them. */
interface Freeze {
  readonly nodes: readonly NodeId[];
  /** When the first of them was last heard. */
  readonly since_ms: number;
}

/**
 * Whether so many nodes vanished within one window that nothing of theirs is replaced until they are back, are removed,
 * or an operator says that it is so. Null = no.
 */
export function freezeOf({ nodes, policy, thawed_ms }: Pick<World, "nodes" | "policy" | "thawed_ms">): Freeze | null {
  const silent = nodes.filter((node) => node.state !== "ready" && node.heard_ms > thawed_ms).sort((a, b) => a.heard_ms - b.heard_ms);
  for (const [index, first] of silent.entries()) {
    const together = silent.slice(index).filter((node) => node.heard_ms - first.heard_ms <= policy.freeze_window_ms);
    if (together.length >= policy.freeze_nodes && together.length > policy.freeze_share * nodes.length) {
      return { nodes: together.map((node) => node.id), since_ms: first.heard_ms };
    }
  }
  return null;
}

/** Tells which replicas are lost with their nodes, for one decision. */
export function strandedBy(world: World, nodes: ReadonlyMap<NodeId, NodeSeen>): (replica: Replica) => boolean {
  const frozen = freezeOf(world) !== null;
  return (replica) => {
    if (!runs(replica)) return false;
    // A node that an operator removed does not come back.
    if (replica.placements.some(({ node }) => !nodes.has(node))) return true;
    if (frozen || replica.placements.every(({ node }) => nodes.get(node)?.state !== "lost")) return false;
    if (replica.state !== "ready") return true;
    // Its agent is silent, but who asks it may still be answered: then nothing is lost.
    const door = replica.placements[0]?.launch.attempt;
    return door !== undefined && (world.unreachable?.has(door) ?? false);
  };
}
