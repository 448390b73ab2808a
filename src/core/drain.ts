import type { NodeId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { specKey } from "./spec.ts";
import { runs, type NodeSeen, type Replica, type World } from "./world.ts";

type Nodes = ReadonlyMap<NodeId, NodeSeen>;

/** Why a replica has to give way to another, and whether it may go before that one is ready in its place. */
export interface Displaced {
  readonly reason: string;
  readonly at_once: boolean;
}

/**
 * Whether a replica is to be replaced although nothing is wrong with it: its node drains, its engine was upgraded there, an
 * operator asked for it, or its catalog entry changed. Null when it may stay.
 */
export function displacedBy({ models }: World, nodes: Nodes, now_ms: number): (replica: Replica) => Displaced | null {
  const wanted = new Map(models.map((spec) => [spec.name, spec]));
  return (replica) => {
    const reason = runs(replica) ? (drained(replica, nodes, now_ms) ?? upgraded(replica, nodes) ?? asked(replica)) : null;
    if (reason) return reason;
    const spec = wanted.get(replica.model);
    if (!spec || specKey(spec) === specKey(replica.spec)) return null;
    return { reason: `the catalog entry of ${spec.name} changed`, at_once: false };
  };
}

function drained({ placements }: Replica, nodes: Nodes, now_ms: number): Displaced | null {
  for (const { node } of placements) {
    const drain = nodes.get(node)?.drain;
    if (!drain) continue;
    const late = drain.deadline_ms !== null && now_ms >= drain.deadline_ms;
    return { reason: `node ${node} is being drained`, at_once: drain.stop_first || late };
  }
  return null;
}

function upgraded({ placements }: Replica, nodes: Nodes): Displaced | null {
  const reason = placements.map(({ node, launch }) => upgradeOf(nodes.get(node), launch)).find((each) => each !== null);
  return reason === undefined ? null : { reason, at_once: false };
}

/** What a node says of an engine that a running rank was not started with; null when there is nothing to say. */
function upgradeOf(node: NodeSeen | undefined, { attempt, engine }: RankLaunch): string | null {
  const started = node?.ranks?.find((rank) => rank.attempt === attempt && rank.phase === "ready")?.engine_version;
  const offer = node?.inventory.engines.find(({ kind, offered }) => kind === engine && offered);
  if (!node || started === undefined || !offer || offer.origin !== "installed" || offer.version === started) return null;
  return `${engine} of ${node.id} is ${offer.version} now, and it was started with ${started}`;
}

function asked({ replace }: Replica): Displaced | null {
  return replace === null ? null : { reason: `an operator asked to ${replace} it`, at_once: false };
}
