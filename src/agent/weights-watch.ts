import { stat } from "node:fs/promises";
import { messageOf } from "../protocol/errors.ts";
import type { WeightsSeen } from "../protocol/inventory.ts";
import { WEIGHTS_LOOK_MS } from "../protocol/limits.ts";
import { lookAt, type Found } from "../weights/shape.ts";
import type { WeightStore } from "../weights/store.ts";

/** Weights on this node: those it has fetched, and those the server asks about by their paths. */
export class WeightsWatch {
  readonly #store: WeightStore;
  readonly #look: (path: string) => Promise<Found>;
  readonly #limit_ms: number;
  #asked: readonly string[] = [];
  /** What was found before, by path, as long as the file or folder is as it was then. */
  readonly #known = new Map<string, { readonly mark: string; readonly found: Found }>();
  /** The one path that is looked at now, and whether that ended in time. */
  #busy: { readonly path: string; readonly ended: Promise<boolean> } | null = null;

  constructor(store: WeightStore, look: (path: string) => Promise<Found> = lookAt, limit_ms = WEIGHTS_LOOK_MS) {
    this.#store = store;
    this.#look = look;
    this.#limit_ms = limit_ms;
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
    const seen: WeightsSeen[] = [];
    for (const { name, path } of places) seen.push({ name, ...(await this.#inTime(path)) });
    return seen;
  }

  /**
   * A look at a file system that hangs (a network's whose server is gone) never ends and keeps one of the few threads this
   * process has for files. So there is one look at a time, and none while one hangs.
   */
  async #inTime(path: string): Promise<Found> {
    while (this.#busy) if (!(await this.#busy.ended)) return this.#hangs(path, this.#busy.path);
    const look = this.#lookAt(path).catch((error: unknown): Found => ({ shape: null, fault: messageOf(error) }));
    const limit = Promise.withResolvers<boolean>();
    const timer = setTimeout(() => limit.resolve(false), this.#limit_ms);
    const busy = { path, ended: Promise.race([look.then(() => true), limit.promise]) };
    this.#busy = busy;
    const over = look.then((found) => {
      clearTimeout(timer);
      this.#busy = null;
      return found;
    });
    return (await busy.ended) ? over : this.#hangs(path, path);
  }

  #hangs(path: string, hanging: string): Found {
    const fault = `its file system does not answer: nothing was heard of ${hanging} for ${this.#limit_ms / 1_000} s`;
    if (path === hanging) return { shape: this.#known.get(path)?.found.shape ?? null, fault };
    // It may be well itself, and is as it was.
    return this.#known.get(path)?.found ?? { shape: null, fault };
  }

  async #lookAt(path: string): Promise<Found> {
    const about = await stat(path).catch(() => null);
    const mark = about === null ? "" : `${about.ino} ${about.size} ${about.mtimeMs}`;
    const known = this.#known.get(path);
    if (known && mark !== "" && known.mark === mark) return known.found;
    const found = await this.#look(path);
    this.#known.set(path, { mark, found });
    return found;
  }
}
