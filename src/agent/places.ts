import type { AttemptId, NodeId } from "../protocol/ids.ts";
import { placesOf, type RankLaunch } from "../protocol/plan.ts";

/**
 * Which attempt holds which GPU and port of this node. The server does not plan two for one place, but a node may be told to
 * start the next attempt while it still stops the last: here is where it waits.
 */
export class Places {
  readonly #node: NodeId;
  readonly #held = new Map<string, AttemptId>();

  constructor(node: NodeId) {
    this.#node = node;
  }

  /**
   * Takes all that an attempt needs, or nothing.
   * @returns null when it has them now, else what is missing, in words
   */
  take(launch: RankLaunch): string | null {
    const places = placesOf(this.#node, launch);
    for (const place of places) {
      const holder = this.#held.get(place);
      if (holder !== undefined && holder !== launch.attempt) return `${place} is still held by ${holder}`;
    }
    for (const place of places) this.#held.set(place, launch.attempt);
    return null;
  }

  /** Gives back what an attempt that has ended held. */
  release(launch: RankLaunch): void {
    for (const place of placesOf(this.#node, launch)) if (this.#held.get(place) === launch.attempt) this.#held.delete(place);
  }
}
