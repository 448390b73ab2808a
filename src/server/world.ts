import { DEFAULT_POLICY, type Replica, type World } from "../core/world.ts";
import type { Fleet } from "./fleet.ts";

/** What the gateway counts, by attempt, as {@link World} has it; null while it does not say. */
export interface GatewayCounts {
  readonly in_flight: ReadonlyMap<string, number> | null;
  readonly unreachable: ReadonlySet<string> | null;
}

/** The world a decision is made from, as the server knows it now. */
export function worldOf(fleet: Fleet, { in_flight, unreachable }: GatewayCounts, now_ms: number): World {
  return {
    models: fleet.models,
    nodes: fleet.seen(now_ms),
    replicas: fleet.replicas.map((replica) => asked(replica, fleet.to_replace.get(replica.id))),
    in_flight,
    unreachable,
    thawed_ms: fleet.thawed_ms,
    policy: DEFAULT_POLICY,
    fabrics: fleet.fabrics(now_ms),
    measuring: fleet.measuring,
    gathering: fleet.isGathering(now_ms),
  };
}

/** The replica with an operator's wish on it. */
function asked(replica: Replica, replace: Replica["replace"] | undefined): Replica {
  return replace ? { ...replica, replace } : replica;
}
