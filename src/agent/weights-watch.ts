import { stat } from "node:fs/promises";
import type { WeightsSeen } from "../protocol/inventory.ts";
import { lookAt, type Found } from "../weights/shape.ts";
import type { WeightStore } from "../weights/store.ts";

/** Weights on this node: those it has fetched, and those the server asks about by their paths. */
export class WeightsWatch {
  readonly #store: WeightStore;
  #asked: readonly string[] = [];
  /** What was found before, by path, as long as the file or folder is as it was then. */
  readonly #known = new Map<string, { readonly mark: string; readonly found: Found }>();

  constructor(store: WeightStore) {
    this.#store = store;
  }

  /** @returns false when these paths were asked for before */
  ask(paths: readonly string[]): boolean {
    if (JSON.stringify(paths) === JSON.stringify(this.#asked)) return false;
    this.#asked = paths;
    return true;
  }

  /** Looks at all of them; a header is read again only when its file has changed. Never rejects. */
  async look(): Promise<WeightsSeen[]> {
    const kept = (await this.#store.kept()).map(({ key, path }) => ({ name: key, path }));
    const places = [...this.#asked.map((path) => ({ name: path, path })), ...kept];
    for (const path of this.#known.keys()) if (!places.some((place) => place.path === path)) this.#known.delete(path);
    return Promise.all(places.map(async ({ name, path }) => ({ name, ...(await this.#lookAt(path)) })));
  }

  async #lookAt(path: string): Promise<Found> {
    const about = await stat(path).catch(() => null);
    const mark = about === null ? "" : `${about.ino} ${about.size} ${about.mtimeMs}`;
    const known = this.#known.get(path);
    if (known && mark !== "" && known.mark === mark) return known.found;
    const found = await lookAt(path);
    this.#known.set(path, { mark, found });
    return found;
  }
}
