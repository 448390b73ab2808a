import { createHash } from "node:crypto";
import { join } from "node:path";
import { makeFolderOnce, readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { Waiters } from "../os/wakeup.ts";
import { messageOf, parseAs } from "../protocol/errors.ts";
import { Snapshot } from "../protocol/gateway-api.ts";
import type { KeyRecord, ModelRoute } from "../protocol/gateway-api.ts";
import { comparePlanVersions } from "../protocol/plan.ts";

const fileIn = (state: string): string => join(state, "gateway", "snapshot.json");

/** The snapshot that a gateway of this state folder kept last; null when there is none that can be read. */
export async function lastSnapshot(state: string, log: Log): Promise<Snapshot | null> {
  const file = fileIn(state);
  try {
    const text = await readIfThere(file);
    return text === null ? null : parseAs(Snapshot, JSON.parse(text), file);
  } catch (error) {
    log.warn("cannot read the gateway's last snapshot", { why: messageOf(error) });
    return null;
  }
}

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
    await makeFolderOnce(join(state, "gateway"), 0o700);
    const routes = new Routes(fileIn(state), log);
    const last = await lastSnapshot(state, log);
    if (last === null) return routes;
    routes.#use(last);
    log.info("serving from the last snapshot until a server sends a new one", { ...last.version });
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
