import type { NodeId } from "../protocol/ids.ts";
import { runs, type NodeSeen, type Replica } from "./world.ts";

/** Why a replica has to go from where it is, and whether it may go before another is ready in its place. */
export interface Displaced {
  readonly reason: string;
  readonly at_once: boolean;
}

/** Whether a replica is to be replaced by one elsewhere although nothing is wrong with it; null when it may stay. */
export function displacedBy(nodes: ReadonlyMap<NodeId, NodeSeen>, now_ms: number): (replica: Replica) => Displaced | null {
  return (replica) => {
    if (!runs(replica)) return null;
    for (const { node } of replica.placements) {
      const drain = nodes.get(node)?.drain;
      if (!drain) continue;
      const late = drain.deadline_ms !== null && now_ms >= drain.deadline_ms;
      return { reason: `node ${node} is being drained`, at_once: drain.stop_first || late };
    }
    if (replica.replace === null) return null;
    return { reason: `an operator asked to ${replica.replace} it`, at_once: false };
  };
}
