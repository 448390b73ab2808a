import { Waiters } from "../os/wakeup.ts";
import type { RankExit } from "../protocol/agent-api.ts";
import { BLOCKING_QUERY_MS } from "../protocol/limits.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import type { ShimStatus } from "../protocol/shim-api.ts";

type Change = Partial<Pick<ShimStatus, "phase" | "detail" | "engine_pid" | "progress">> & { readonly exit?: RankExit };

/** What a shim says of its rank. Each change raises the revision and wakes who waits for it. */
export class RankState {
  #status: ShimStatus;
  readonly #waiting = new Waiters();
  readonly #now: () => number;

  constructor(attempt: string, now: () => number) {
    this.#now = now;
    this.#status = {
      protocol: PROTOCOL,
      attempt,
      revision: 1,
      pid: process.pid,
      phase: "starting",
      since_ms: now(),
      detail: "starting",
      engine_pid: null,
      progress: null,
      exit: null,
    };
  }

  get status(): ShimStatus {
    return this.#status;
  }

  change(change: Change): void {
    const { phase = this.#status.phase } = change;
    const since_ms = phase === this.#status.phase ? this.#status.since_ms : this.#now();
    this.#status = { ...this.#status, ...change, phase, since_ms, revision: this.#status.revision + 1 };
    this.#waiting.wake();
  }

  /** The status once its revision is not `after`, or as it is when the wait is over. */
  async next(after: number): Promise<ShimStatus> {
    if (this.#status.revision !== after) return this.#status;
    await this.#waiting.wait(BLOCKING_QUERY_MS);
    return this.#status;
  }
}
