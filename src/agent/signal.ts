/** Says that something changed to the one who waits for it; a change while nobody waits is not lost. */
export class Signal {
  #raised = false;
  #wake: (() => void) | null = null;

  raise(): void {
    this.#raised = true;
    this.#wake?.();
  }

  clear(): void {
    this.#raised = false;
  }

  /** Resolves at the next change, or after `at_most_ms`. @throws the signal's reason when it aborts */
  async wait(at_most_ms: number, signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    if (this.#raised) return;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, at_most_ms);
      const done = () => {
        clearTimeout(timer);
        signal.removeEventListener("abort", done);
        resolve();
      };
      this.#wake = done;
      signal.addEventListener("abort", done, { once: true });
    });
    this.#wake = null;
    signal.throwIfAborted();
  }
}
