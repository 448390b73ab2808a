/** Wakes a loop that waits between its turns; what is raised during a turn makes the next one come at once. */
export class Wakeup {
  #raised = false;
  #wake: (() => void) | null = null;

  raise(): void {
    this.#raised = true;
    this.#wake?.();
  }

  /** What was raised until now is being seen to. */
  clear(): void {
    this.#raised = false;
  }

  /** Resolves once it is raised, after `at_most_ms`, or when the signal aborts. One waiter at a time. */
  async wait(at_most_ms: number, signal: AbortSignal): Promise<void> {
    if (this.#raised || signal.aborted) return;
    await new Promise<void>((resolve) => {
      const done = () => {
        clearTimeout(timer);
        signal.removeEventListener("abort", done);
        resolve();
      };
      const timer = setTimeout(done, at_most_ms);
      this.#wake = done;
      signal.addEventListener("abort", done, { once: true });
    });
    this.#wake = null;
  }
}
