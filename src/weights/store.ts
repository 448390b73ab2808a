/**
 * weights/ brings weights to a node and knows them again: one copy per digest, one download however many ask. It does
 * not know what they are weights of.
 */
import { access, constants, mkdir, readdir, stat, statfs } from "node:fs/promises";
import { join } from "node:path";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { WeightsRef } from "../protocol/plan.ts";
import { fetchFile, sha256Of, sizeOf } from "./fetch.ts";
import type { Progress } from "./fetch.ts";
import { sourceOf } from "./source.ts";
import type { Source } from "./source.ts";

interface Download {
  readonly whole: Promise<string>;
  readonly watchers: Set<Progress>;
  readonly stop: AbortController;
}

/** The weights of one node. */
export class WeightStore {
  readonly #folder: string;
  readonly #downloads = new Map<string, Download>();
  /** Digests of local files already checked, by path, size and time of change. */
  readonly #checked = new Map<string, string>();

  /** @param folder where fetched weights are kept; made when missing */
  constructor(folder: string) {
    this.#folder = folder;
  }

  /**
   * The path of the weights once they are here and are what was named. Askers of the same thing share one download,
   * which ends when the last of them aborts.
   * @throws OperatorError E_WEIGHTS, E_NO_ROOM; the signal's reason when aborted
   */
  async obtain(ref: WeightsRef, progress: Progress, signal: AbortSignal): Promise<string> {
    const source = sourceOf(ref);
    if (source.kind === "path") return this.#local(source.path, ref, progress, signal);
    const download = this.#downloads.get(source.key) ?? this.#begin(source, ref);
    download.watchers.add(progress);
    const left = new Promise<never>((_resolve, reject) => {
      const leave = () => reject(signal.reason as Error);
      if (signal.aborted) leave();
      else signal.addEventListener("abort", leave, { once: true });
    });
    try {
      return await Promise.race([download.whole, left]);
    } finally {
      download.watchers.delete(progress);
      if (download.watchers.size === 0) {
        // Whoever asks from now on must not join a download that is ending.
        this.#forget(source.key, download);
        download.stop.abort();
      }
    }
  }

  /** What has been fetched whole, by what it is called here ({@link sourceOf}). */
  async kept(): Promise<readonly { readonly key: string; readonly path: string }[]> {
    const keys = await readdir(this.#folder).catch(() => []);
    const found = keys.map(async (key) => {
      const names = await readdir(join(this.#folder, key)).catch(() => []);
      const whole = names.find((name) => !name.includes(".part"));
      return whole === undefined ? [] : [{ key, path: join(this.#folder, key, whole) }];
    });
    return (await Promise.all(found)).flat();
  }

  #begin(source: Extract<Source, { kind: "url" }>, ref: WeightsRef): Download {
    const watchers = new Set<Progress>();
    const stop = new AbortController();
    const tell: Progress = (...how) => watchers.forEach((watcher) => watcher(...how));
    const whole = this.#fetch(source, ref, tell, stop.signal);
    const download = { whole, watchers, stop };
    this.#downloads.set(source.key, download);
    const over = () => this.#forget(source.key, download);
    whole.then(over, over);
    return download;
  }

  #forget(key: string, download: Download): void {
    if (this.#downloads.get(key) === download) this.#downloads.delete(key);
  }

  async #fetch(source: Extract<Source, { kind: "url" }>, ref: WeightsRef, progress: Progress, signal: AbortSignal): Promise<string> {
    const folder = join(this.#folder, source.key);
    await mkdir(folder, { recursive: true });
    // Only whole and checked files get their final name; another URL of the same digest may have given it.
    for (const name of await readdir(folder)) {
      const size = name.includes(".part") ? 0 : await sizeOf(join(folder, name));
      if (size > 0 && (ref.size === undefined || ref.size === size)) return join(folder, name);
    }
    const path = join(folder, source.file_name);
    const free = async () => {
      const disk = await statfs(folder);
      return disk.bavail * disk.bsize;
    };
    await fetchFile({ url: source.url, path, sha256: ref.sha256, size: ref.size, signal, progress, free });
    return path;
  }

  async #local(path: string, ref: WeightsRef, progress: Progress, signal: AbortSignal): Promise<string> {
    const wrong = (why: string, remedy: string) => new OperatorError("E_WEIGHTS", `the weights ${path} are not usable`, why, remedy);
    try {
      await access(path, constants.R_OK);
    } catch (error) {
      throw wrong(messageOf(error), "put them there on this node, or correct source in the catalog");
    }
    const about = await stat(path);
    if (about.isDirectory()) {
      if (ref.sha256 === undefined && ref.size === undefined) return path;
      throw wrong("it is a folder, and size and sha256 are those of one file", "leave them out of the catalog for a folder");
    }
    if (!about.isFile()) throw wrong("it is neither a file nor a folder", "correct source in the catalog");
    if (ref.size !== undefined && about.size !== ref.size)
      throw wrong(`${about.size} bytes, the catalog says ${ref.size}`, "correct size in the catalog");
    if (ref.sha256 === undefined) return path;
    const key = `${path}\n${about.size}\n${about.mtimeMs}`;
    const digest = this.#checked.get(key) ?? (await sha256Of(path, signal, (done) => progress(done, about.size, "checking")));
    this.#checked.set(key, digest);
    if (digest === ref.sha256) return path;
    throw wrong(`its sha256 is ${digest}, the catalog says ${ref.sha256}`, "correct sha256 in the catalog, or the file");
  }
}
