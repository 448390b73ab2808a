import { randomBytes } from "node:crypto";
import { plan } from "../core/planner.ts";
import type { Ids } from "../core/world.ts";
import type { Log } from "../os/log.ts";
import { Wakeup } from "../os/wakeup.ts";
import { explain } from "../protocol/errors.ts";
import { RECONCILE_INTERVAL_MS } from "../protocol/limits.ts";
import type { Fleet } from "./fleet.ts";
import type { Store } from "./store.ts";
import { worldOf, type GatewayCounts } from "./world.ts";

const LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789";

/** Names by chance. */
export const IDS: Ids = {
  suffix: () => Array.from(randomBytes(5), (byte) => LETTERS[byte % LETTERS.length]).join(""),
  attempt: () => randomBytes(8).toString("hex"),
};

interface ReconcileParts {
  readonly fleet: Fleet;
  readonly store: Store;
  readonly log: Log;
  readonly now: () => number;
  readonly counts: () => GatewayCounts;
  /** A decision counts: the gateway may need a new snapshot. */
  readonly decided: () => void;
}

/**
 * The loop that makes decisions count: observe, decide, keep, give out. One turn at a time; a fault in one is logged and
 * the next comes all the same. Nothing is given out that the store does not have.
 */
export class Reconciler {
  readonly #parts: ReconcileParts;
  readonly #wakeup = new Wakeup();

  constructor(parts: ReconcileParts) {
    this.#parts = parts;
  }

  /** Asks for a turn soon. */
  poke(): void {
    this.#wakeup.raise();
  }

  async run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      this.#wakeup.clear();
      try {
        await this.turn();
        this.#went(null);
      } catch (error) {
        this.#went(error);
      }
      await this.#wakeup.wait(RECONCILE_INTERVAL_MS, signal);
    }
  }

  /** Says once what a turn failed of, and once that turns go well again. */
  #went(error: unknown): void {
    const { fleet, log } = this.#parts;
    const fault = error === null ? null : explain(error);
    if (fault !== null && fault !== fleet.decision_fault) log.error("a decision failed; the fleet stays as it is", { why: fault });
    if (error instanceof Error) log.debug("a decision failed", { stack: error.stack });
    if (fault === null && fleet.decision_fault !== null) log.info("decisions count again");
    fleet.decision_fault = fault;
  }

  /** One turn. */
  async turn(): Promise<void> {
    const { fleet, store, log, now, counts, decided } = this.#parts;
    const now_ms = now();
    fleet.look(now_ms);
    const sessions = [...fleet.nodes.values()].flatMap(({ session }) => session ?? []);
    const before = new Map(fleet.replicas.map((replica) => [replica.id, replica]));
    const world = worldOf(fleet, counts(), now_ms);
    const asked_for = [...fleet.to_replace.keys()];
    const decision = plan(world, now_ms, IDS);
    const changed = decision.replicas.filter((replica) => before.get(replica.id) !== replica);
    const staying = new Set(decision.replicas.map((replica) => replica.id));
    const gone = [...before.keys()].filter((id) => !staying.has(id));
    const { parts, changed: nodes, version } = fleet.preview(decision.ranks);
    const events = [...fleet.transitions(now_ms), ...decision.events];
    const news = changed.length > 0 || gone.length > 0 || events.length > 0;
    if (news || nodes.length > 0) await store.commit({ version, changed, gone, events }, now_ms);
    for (const { level, kind, subject, text } of events) log[level](`${subject}: ${text}`, { kind });
    fleet.replicas = decision.replicas;
    for (const id of asked_for) fleet.to_replace.delete(id);
    fleet.refusals = decision.refusals;
    fleet.publish(parts, version, sessions);
    decided();
  }
}
