import type { NodeId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { runs, type NodeSeen, type Replica } from "./world.ts";

/** Why a replica has to go from where it is, and whether it may go before another is ready in its place. */
export interface Displaced {
  readonly reason: string;
  readonly at_once: boolean;
}

/** What a node says of an engine that a running rank was not started with; null when there is nothing to say. */
function upgradeOf(node: NodeSeen | undefined, { attempt, engine }: RankLaunch): string | null {
  const started = node?.ranks?.find((rank) => rank.attempt === attempt && rank.phase === "ready")?.engine_version;
  const offer = node?.inventory.engines.find(({ kind, offered }) => kind === engine && offered);
  if (!node || started === undefined || !offer || offer.origin !== "installed" || offer.version === started) return null;
  return `${engine} of ${node.id} is ${offer.version} now, and it was started with ${started}`;
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
    const upgraded = replica.placements.map(({ node, launch }) => upgradeOf(nodes.get(node), launch)).find((each) => each !== null);
    if (upgraded !== undefined) return { reason: upgraded, at_once: false };
    if (replica.replace === null) return null;
    return { reason: `an operator asked to ${replica.replace} it`, at_once: false };
  };
}
