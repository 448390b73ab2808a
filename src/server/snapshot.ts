import { runs, type Replica } from "../core/world.ts";
import type { ModelRoute, Snapshot, Target } from "../protocol/gateway-api.ts";
import { STARTING_WAIT_MS } from "../protocol/limits.ts";
import type { Fleet } from "./fleet.ts";
import type { KeyRow } from "./store.ts";

/** Whether a replica is so near to being ready that a request may wait for it. */
function isComing(replica: Replica, now_ms: number): boolean {
  if (replica.state === "fetching" || replica.state === "starting") return true;
  return replica.state === "failed" && replica.next_try_ms !== null && replica.next_try_ms - now_ms < STARTING_WAIT_MS;
}

function targetOf(replica: Replica): Target[] {
  const first = replica.placements[0];
  if (!first || (replica.state !== "ready" && replica.state !== "draining")) return [];
  const { address, port } = first.launch.door;
  return [{ replica: replica.id, attempt: first.launch.attempt, node: first.node, address, port, state: replica.state }];
}

/** What the gateway needs to know, but for its version: where each model is served, and who may ask. */
export function snapshotOf(fleet: Fleet, keys: readonly KeyRow[], auth: Snapshot["auth"], now_ms: number): Omit<Snapshot, "version"> {
  const names = new Set([...fleet.models.map((model) => model.name), ...fleet.replicas.filter(runs).map((replica) => replica.model)]);
  const routes: ModelRoute[] = [...names].sort().map((model) => {
    const group = fleet.replicas.filter((replica) => replica.model === model);
    const created_ms = Math.min(fleet.started_ms, ...group.map((replica) => replica.created_ms));
    return { model, created_ms, targets: group.flatMap(targetOf), starting: group.some((replica) => isComing(replica, now_ms)) };
  });
  const active = keys.filter((key) => key.revoked_ms === null).map(({ id, name, sha256 }) => ({ id, name, sha256 }));
  return { auth, routes, keys: active, revocations: [...fleet.revocations] };
}
