import type { Log } from "../os/log.ts";
import { pause } from "../os/wakeup.ts";
import type { ModelSpec } from "../protocol/catalog.ts";
import { messageOf } from "../protocol/errors.ts";
import { WEIGHTS_HEAD_AGAIN_MS } from "../protocol/limits.ts";
import type { ModelShape } from "../protocol/model-shape.ts";
import { shapeAtUrl } from "../weights/shape.ts";
import { shownUrl } from "../weights/source.ts";

/** Finds out what models at a URL need, before a node is chosen that has to fetch them. */
export class SourceHeads {
  /** By source. */
  readonly shapes = new Map<string, ModelShape>();
  /** Sources that are asked for the first time. */
  readonly measuring = new Set<string>();
  readonly #log: Log;
  readonly #changed: () => void;
  readonly #followed = new Map<string, AbortController>();

  constructor(log: Log, changed: () => void) {
    this.#log = log;
    this.#changed = changed;
  }

  /** Asks for the sources of these models and no longer for others. */
  follow(catalog: readonly ModelSpec[]): void {
    const asked = catalog.filter(({ engine, source, memory, gpus }) => {
      return engine !== "sim" && source !== undefined && /^https?:/.test(source) && (memory === undefined || gpus > 0);
    });
    const sources = new Set(asked.flatMap(({ source }) => source ?? []));
    for (const [source, stop] of this.#followed) {
      if (sources.has(source)) continue;
      stop.abort();
      this.#followed.delete(source);
      this.measuring.delete(source);
    }
    for (const source of sources) {
      if (this.#followed.has(source)) continue;
      const stop = new AbortController();
      this.#followed.set(source, stop);
      if (!this.shapes.has(source)) void this.#read(source, stop.signal);
    }
  }

  /** Ends all questions. */
  stop(): void {
    this.follow([]);
  }

  async #read(source: string, signal: AbortSignal): Promise<void> {
    this.measuring.add(source);
    while (!signal.aborted) {
      try {
        const shape = await shapeAtUrl(source, signal);
        if (shape) this.shapes.set(source, shape);
        else this.#log.info("the header of weights tells nothing of the memory they need", { source: shownUrl(source) });
        return;
      } catch (error) {
        if (signal.aborted) return;
        this.#log.warn("cannot read the header of weights; their size is not counted", { source: shownUrl(source), why: messageOf(error) });
      } finally {
        if (!signal.aborted && this.measuring.delete(source)) this.#changed();
      }
      await pause(WEIGHTS_HEAD_AGAIN_MS, signal);
    }
  }
}
