/** Who waits for the next change of something; each waits no longer than it says. */
export class Waiters {
  readonly #wakes = new Set<() => void>();

  wake(): void {
    for (const wake of this.#wakes) wake();
  }

  /** Resolves at the next `wake`, after `at_most_ms`, or when the signal aborts. */
  async wait(at_most_ms: number, signal?: AbortSignal): Promise<void> {
    if (signal?.aborted) return;
    await new Promise<void>((resolve) => {
      const done = () => {
        clearTimeout(timer);
        this.#wakes.delete(done);
        signal?.removeEventListener("abort", done);
        resolve();
      };
      const timer = setTimeout(done, at_most_ms);
      this.#wakes.add(done);
      signal?.addEventListener("abort", done, { once: true });
    });
  }
}

/** Resolves after a time, in ms, or at once when the signal aborts; it leaves nothing on the signal. */
export const pause = (wait_ms: number, signal: AbortSignal): Promise<void> => new Waiters().wait(wait_ms, signal);

/** Wakes a loop that waits between its turns; what is raised during a turn makes the next one come at once. */
export class Wakeup {
  readonly #waiters = new Waiters();
  #raised = false;

  raise(): void {
    this.#raised = true;
    this.#waiters.wake();
  }

  /** What was raised until now is being seen to. */
  clear(): void {
    this.#raised = false;
  }

  /** Resolves once it is raised, after `at_most_ms`, or when the signal aborts. */
  async wait(at_most_ms: number, signal: AbortSignal): Promise<void> {
    if (!this.#raised) await this.#waiters.wait(at_most_ms, signal);
  }
}
