import type { RankExit, RankStatus } from "../protocol/agent-api.ts";
import type { SizedModel } from "../protocol/catalog.ts";
import type { ReplicaId } from "../protocol/ids.ts";
import type { NodeSeen, Happening, Policy, Replica } from "./world.ts";

/** What one step of a replica's life gives. */
export interface Step {
  readonly replica: Replica;
  readonly events: readonly Happening[];
}

/** What is known of the replica's present attempt. */
interface Observation {
  /** Per placement, in order: its node, or null when the node is no longer known. */
  readonly nodes: readonly (NodeSeen | null)[];
  /** Requests in flight at rank 0; null when not known. */
  readonly in_flight: number | null;
}

/** A replica at the beginning of its life. */
export function newReplica(id: ReplicaId, spec: SizedModel, now_ms: number): Replica {
  return {
    id,
    model: spec.name,
    spec,
    created_ms: now_ms,
    state: "pending",
    since_ms: now_ms,
    reason: "waiting for a place",
    placements: [],
    taken_up: false,
    progress: null,
    ready_since_ms: null,
    failures: 0,
    next_try_ms: null,
    avoid: null,
    last_lines: [],
    replace: null,
  };
}

/** Wait before the next start after so many failures, in ms: doubles up to the policy's longest. */
export function backoff_ms(failures: number, policy: Policy): number {
  return Math.min(policy.backoff_max_ms, policy.backoff_first_ms * 2 ** Math.min(failures - 1, 30));
}

/**
 * When a state that is to pass is given up, unless the replica gets on before; null for a state that may last. In `stopping`
 * it waits for its nodes however long that takes: what it holds is not free before.
 */
export function deadlineOf({ state, since_ms, progress, taken_up }: Replica, policy: Policy): number | null {
  const moved_ms = progress?.at_ms ?? since_ms;
  if (state === "draining") return since_ms + policy.drain_requests_ms;
  if (state !== "fetching" && state !== "starting") return null;
  if (!taken_up) return since_ms + policy.take_up_ms;
  return moved_ms + (state === "fetching" ? policy.fetch_stall_ms : policy.start_ms) + policy.margin_ms;
}

const still = (replica: Replica): Step => ({ replica, events: [] });

function event(level: Happening["level"], kind: string, replica: Replica, text: string): Happening {
  return { level, kind, subject: `replica/${replica.id}`, text };
}

/** The replica in another state, with the reason. */
export function enter(replica: Replica, state: Replica["state"], reason: string, now_ms: number): Replica {
  return { ...replica, state, reason, since_ms: now_ms, progress: null, ready_since_ms: state === "ready" ? now_ms : null };
}

/**
 * The replica taken out of service: a ready one drains first, one that serves nobody stops at once, one that
 * holds nothing is gone.
 */
export function release(replica: Replica, reason: string, now_ms: number): Step {
  if (replica.state === "draining" || replica.state === "stopping" || replica.state === "gone") return still(replica);
  if (replica.state === "ready") {
    const next = { ...enter(replica, "draining", reason, now_ms), next_try_ms: null };
    return { replica: next, events: [event("info", "replica-draining", replica, reason)] };
  }
  const holds = replica.state === "fetching" || replica.state === "starting";
  const next = { ...enter(replica, holds ? "stopping" : "gone", reason, now_ms), next_try_ms: null };
  return { replica: next, events: [event("info", holds ? "replica-stopping" : "replica-gone", replica, reason)] };
}

/** One step of a replica from what is observed of it. Where nothing is known, nothing changes. */
export function step(replica: Replica, seen: Observation, policy: Policy, now_ms: number): Step {
  switch (replica.state) {
    case "pending":
    case "failed":
    case "gone":
      return still(replica);
    case "stopping":
      return stepStopping(replica, seen, policy, now_ms);
    case "draining":
      return stepDraining(replica, seen, policy, now_ms);
    case "fetching":
    case "starting":
    case "ready":
      return stepRunning(replica, seen, policy, now_ms);
  }
}

/** The status of each placement's present attempt: `null` = node not heard or gone, `undefined` = heard, not listed. */
function statuses(replica: Replica, seen: Observation): (RankStatus | null | undefined)[] {
  return replica.placements.map(({ launch }, index) => {
    const ranks = seen.nodes[index]?.ranks ?? null;
    return ranks && ranks.find((rank) => rank.attempt === launch.attempt);
  });
}

/** True when no rank runs any more, as far as its nodes say. */
function ended(replica: Replica, seen: Observation, policy: Policy): boolean {
  return statuses(replica, seen).every((status, index) => {
    const node = seen.nodes[index] ?? null;
    if (node === null || status?.phase === "exited") return true;
    // A rank its node never spoke of may have been started just before the plan dropped it: a later report must lack it.
    return status === undefined && (replica.taken_up || node.heard_ms >= replica.since_ms + policy.report_ms);
  });
}

function stepStopping(replica: Replica, seen: Observation, policy: Policy, now_ms: number): Step {
  if (ended(replica, seen, policy)) return gone(replica, now_ms);
  const found = !replica.taken_up && statuses(replica, seen).some((status) => status !== null && status !== undefined);
  return still(found ? { ...replica, taken_up: true } : replica);
}

function gone(replica: Replica, now_ms: number): Step {
  return { replica: enter(replica, "gone", replica.reason, now_ms), events: [event("info", "replica-gone", replica, replica.reason)] };
}

function stepDraining(replica: Replica, seen: Observation, policy: Policy, now_ms: number): Step {
  if (ended(replica, seen, policy)) return gone(replica, now_ms);
  const for_ms = now_ms - replica.since_ms;
  const idle = for_ms >= policy.drain_settle_ms && seen.in_flight === 0;
  if (!idle && now_ms < (deadlineOf(replica, policy) ?? 0)) return still(replica);
  const text = idle
    ? replica.reason
    : `${replica.reason}; ${seen.in_flight ?? "unknown"} requests in flight were given ${seconds(for_ms)} to end`;
  return { replica: enter(replica, "stopping", text, now_ms), events: [event("info", "replica-stopping", replica, text)] };
}

const seconds = (ms: number): string => `${Math.round(ms / 1_000)} s`;

function stepRunning(replica: Replica, seen: Observation, policy: Policy, now_ms: number): Step {
  const observed = statuses(replica, seen);
  for (const [index, status] of observed.entries()) {
    const node = replica.placements[index]?.node ?? "";
    if (status?.phase === "exited") return fail(replica, node, status.exit, policy, now_ms);
    if (status === undefined && replica.taken_up) return fail(replica, node, null, policy, now_ms);
  }
  const known = observed.filter((status) => status !== null && status !== undefined);
  if (known.length < observed.length) return waiting(replica, seen, observed, policy, now_ms);
  const taken = replica.taken_up ? replica : { ...replica, taken_up: true };
  if (known.every((status) => status.phase === "ready")) return ready(taken, policy, now_ms);
  return loading(taken, known, policy, now_ms);
}

/** Not every node has spoken of its rank: nothing is decided, except that a node which is well takes its rank up in time. */
function waiting(replica: Replica, seen: Observation, observed: readonly unknown[], policy: Policy, now_ms: number): Step {
  const slow = observed.findIndex((status, index) => status === undefined && seen.nodes[index]?.state === "ready");
  const node = replica.placements[slow]?.node;
  if (node === undefined || now_ms - replica.since_ms < policy.take_up_ms) return still(replica);
  return failWith(replica, node, `node ${node} did not take it up within ${seconds(policy.take_up_ms)}`, [], policy, now_ms);
}

function ready(replica: Replica, policy: Policy, now_ms: number): Step {
  if (replica.state !== "ready") {
    const next = { ...enter(replica, "ready", "", now_ms), next_try_ms: null, avoid: null };
    const where = replica.placements.map(({ node }) => node).join(", ");
    return {
      replica: next,
      events: [event("info", "replica-ready", replica, `ready on ${where} after ${seconds(now_ms - replica.since_ms)}`)],
    };
  }
  const long = replica.ready_since_ms !== null && now_ms - replica.ready_since_ms >= policy.backoff_forget_ms;
  return still(long && replica.failures > 0 ? { ...replica, failures: 0, last_lines: [] } : replica);
}

/** Some rank fetches or starts: follow it, and give up when it neither ends nor shows progress in time. */
function loading(replica: Replica, known: readonly RankStatus[], policy: Policy, now_ms: number): Step {
  const state = known.some((status) => status.phase === "fetching") ? "fetching" : "starting";
  if (replica.state !== state) {
    const reason =
      replica.state === "ready" ? "its engine answers no longer" : state === "fetching" ? "fetching weights" : "the engine is loading";
    const lost = replica.state === "ready";
    const next = enter(replica, state, reason, now_ms);
    return { replica: next, events: lost ? [event("warn", "replica-not-ready", replica, reason)] : [] };
  }
  const done = known.reduce((sum, status) => sum + (status.progress?.done ?? 0), 0);
  const last = replica.progress?.at_ms ?? replica.since_ms;
  // Kept roughly: a reading a second is not worth a write a second.
  const rough = policy.margin_ms / 2;
  const next = done > (replica.progress?.done ?? 0) && now_ms - last >= rough ? { ...replica, progress: { done, at_ms: now_ms } } : replica;
  if (now_ms < (deadlineOf(next, policy) ?? 0)) return still(next);
  const still_ms = now_ms - (next.progress?.at_ms ?? next.since_ms);
  const node = replica.placements[known.findIndex((status) => status.phase !== "ready")]?.node ?? "";
  return failWith(replica, node, `${state} without progress for ${seconds(still_ms)} on ${node}`, [], policy, now_ms);
}

function fail(replica: Replica, node: string, exit: RankExit | null, policy: Policy, now_ms: number): Step {
  if (exit?.kind === "lease") {
    const port = replica.placements[0]?.launch.door.port;
    const next = { ...enter(replica, "pending", `port ${port} of ${node} is taken; trying another`, now_ms), taken_up: false };
    return { replica: next, events: [event("warn", "port-taken", replica, next.reason)] };
  }
  const why = exit === null ? `node ${node} no longer knows it` : exit.kind === "stopped" ? `it was stopped on ${node}` : exit.reason;
  // A rank that serves nothing counts as ready as soon as it runs: of a gang, only the whole tells that it had started.
  const started = replica.ready_since_ms !== null || (exit?.kind === "died" && replica.spec.nodes === 1);
  return failWith(replica, node, why, exit?.last_lines ?? [], policy, now_ms, started ? "engine-died" : "replica-failed");
}

function failWith(
  replica: Replica,
  node: string,
  reason: string,
  lines: readonly string[],
  policy: Policy,
  now_ms: number,
  kind = "replica-failed",
): Step {
  const failures = replica.failures + 1;
  const wait_ms = backoff_ms(failures, policy);
  const next: Replica = {
    ...enter(replica, "failed", reason, now_ms),
    failures,
    next_try_ms: now_ms + wait_ms,
    taken_up: false,
    avoid: kind === "engine-died" ? null : node,
    last_lines: replica.failures === 0 || replica.last_lines.length === 0 ? lines : replica.last_lines,
  };
  return { replica: next, events: [event("error", kind, replica, `on ${node}: ${reason}; next try in ${seconds(wait_ms)}`)] };
}
