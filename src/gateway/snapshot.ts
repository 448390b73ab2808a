import { createHash } from "node:crypto";
import { join } from "node:path";
import { makeFolderOnce, readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { Waiters } from "../os/wakeup.ts";
import { messageOf, parseAs } from "../protocol/errors.ts";
import { Snapshot } from "../protocol/gateway-api.ts";
import type { KeyRecord, ModelRoute } from "../protocol/gateway-api.ts";
import { comparePlanVersions } from "../protocol/plan.ts";

/** What the gateway goes by: the newest snapshot, in memory and on disk, indexed for the request path. */
export class Routes {
  readonly #file: string;
  readonly #log: Log;
  #snapshot: Snapshot | null = null;
  #models = new Map<string, ModelRoute>();
  #keys = new Map<string, KeyRecord>();
  readonly #waiting = new Waiters();
  #writing: Promise<void> = Promise.resolve();

  private constructor(file: string, log: Log) {
    this.#file = file;
    this.#log = log;
  }

  /** Starts from the snapshot an earlier gateway left, if there is one. */
  static async open(state: string, log: Log): Promise<Routes> {
    const folder = join(state, "gateway");
    await makeFolderOnce(folder, 0o700);
    const routes = new Routes(join(folder, "snapshot.json"), log);
    const text = await readIfThere(routes.#file);
    if (text === null) return routes;
    try {
      routes.#use(parseAs(Snapshot, JSON.parse(text), routes.#file));
      log.info("serving from the last snapshot until a server sends a new one", { ...routes.#snapshot?.version });
    } catch (error) {
      log.warn("cannot read the last snapshot; waiting for a server", { why: messageOf(error) });
    }
    return routes;
  }

  get snapshot(): Snapshot | null {
    return this.#snapshot;
  }

  /** Takes a snapshot unless it is older than what is there; it counts at once and is kept on disk. */
  async accept(snapshot: Snapshot): Promise<boolean> {
    if (this.#snapshot && comparePlanVersions(snapshot.version, this.#snapshot.version) < 0) return false;
    this.#use(snapshot);
    // One after the other, so that the newest is the one that stays.
    this.#writing = this.#writing.then(() => this.#write(snapshot));
    await this.#writing;
    return true;
  }

  async #write(snapshot: Snapshot): Promise<void> {
    try {
      await writeAtomic(this.#file, JSON.stringify(snapshot), 0o600);
    } catch (error) {
      this.#log.error("cannot keep the snapshot; a restarted gateway would start from an older one", { why: messageOf(error) });
    }
  }

  #use(snapshot: Snapshot): void {
    this.#snapshot = snapshot;
    this.#models = new Map(snapshot.routes.map((route) => [route.model, route]));
    this.#keys = new Map(snapshot.keys.map((key) => [key.sha256, key]));
    this.#waiting.wake();
  }

  route(model: string): ModelRoute | null {
    return this.#models.get(model) ?? null;
  }

  get models(): readonly ModelRoute[] {
    return this.#snapshot?.routes ?? [];
  }

  /** The record of a key, by its digest: no key is kept or compared as text. */
  keyOf(secret: string): KeyRecord | null {
    return this.#keys.get(createHash("sha256").update(secret).digest("hex")) ?? null;
  }

  /** Resolves at the next snapshot, or after `at_most_ms`, or when the signal aborts. */
  changed(at_most_ms: number, signal: AbortSignal): Promise<void> {
    return this.#waiting.wait(at_most_ms, signal);
  }
}
