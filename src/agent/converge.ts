import type { AttemptId } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";

/** What an agent knows of one attempt when it decides. */
export interface Observed {
  readonly attempt: AttemptId;
  readonly phase: "fetching" | "starting" | "ready" | "stopping" | "exited";
}

/** One thing to do so that the node becomes what the plan says. */
export type Action =
  | { readonly kind: "start"; readonly launch: RankLaunch }
  | { readonly kind: "stop"; readonly attempt: AttemptId; readonly reason: string }
  | { readonly kind: "forget"; readonly attempt: AttemptId };

/**
 * The difference between a node's part of the plan and what is there. An attempt is started at most once: one that has
 * ended stays as it is until the plan drops it, and the server answers with a new attempt or none.
 */
export function converge(planned: readonly RankLaunch[], observed: readonly Observed[]): Action[] {
  const wanted = new Set(planned.map((launch) => launch.attempt));
  const there = new Set(observed.map((rank) => rank.attempt));
  const actions: Action[] = [];
  // Stops come first: what they free may be what the starts need.
  for (const { attempt, phase } of observed) {
    if (wanted.has(attempt)) continue;
    if (phase === "exited") actions.push({ kind: "forget", attempt });
    else if (phase !== "stopping") actions.push({ kind: "stop", attempt, reason: "the plan no longer has it" });
  }
  for (const launch of planned) if (!there.has(launch.attempt)) actions.push({ kind: "start", launch });
  return actions;
}
