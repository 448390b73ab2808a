import type { NodeId } from "../protocol/ids.ts";
import type { NodePlan, PlanVersion, RankLaunch } from "../protocol/plan.ts";

/** Every node's part of the plan, each at the version at which it last changed. */
export type PlanParts = ReadonlyMap<NodeId, NodePlan>;

/** A part's ranks as text; launches never change, so the attempts tell. */
const attempts = (ranks: readonly RankLaunch[]): string => ranks.map((rank) => rank.attempt).join(" ");

/**
 * The parts for a new decision. A part whose ranks are the same stays the same object at its old version; one
 * that changed, or is new, gets `next`.
 * @param next a version newer than any given out before
 */
export function nextParts(
  before: PlanParts,
  ranks: ReadonlyMap<NodeId, readonly RankLaunch[]>,
  next: PlanVersion,
): { parts: PlanParts; changed: NodeId[] } {
  const parts = new Map<NodeId, NodePlan>();
  const changed: NodeId[] = [];
  for (const [node, launches] of ranks) {
    const old = before.get(node);
    if (old && attempts(old.ranks) === attempts(launches)) {
      parts.set(node, old);
      continue;
    }
    parts.set(node, { version: next, node, ranks: [...launches] });
    changed.push(node);
  }
  return { parts, changed };
}
