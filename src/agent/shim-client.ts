import { existsSync } from "node:fs";
import { fetchUnix } from "../os/unix-http.ts";
import { parseAs } from "../protocol/errors.ts";
import { BLOCKING_QUERY_MS, SHIM_ANSWER_MS } from "../protocol/limits.ts";
import type { Revocation } from "../protocol/plan.ts";
import { ShimSpec, ShimStatus } from "../protocol/shim-api.ts";

/** How long an agent waits for its shims, in ms. */
export interface ShimPatience {
  /** For an answer that may be held until there is news. */
  readonly news_ms: number;
  /** For an answer that is due at once. */
  readonly answer_ms: number;
  /** For any sign of a shim that lives. */
  readonly frozen_ms: number;
}

/** The agent's side of one shim's control socket. Every call rejects when nobody answers. */
export class ShimClient {
  readonly #socket: string;
  readonly #patience: Omit<ShimPatience, "frozen_ms">;

  constructor(socket: string, patience = { news_ms: BLOCKING_QUERY_MS + SHIM_ANSWER_MS, answer_ms: SHIM_ANSWER_MS }) {
    this.#socket = socket;
    this.#patience = patience;
  }

  /** Whether its socket is in its place. */
  isThere(): boolean {
    return existsSync(this.#socket);
  }

  /** The status once it is no longer of revision `after` (at once with 0), or after BLOCKING_QUERY_MS. */
  async status(after: number, signal?: AbortSignal): Promise<ShimStatus> {
    const limit = AbortSignal.timeout(after === 0 ? this.#patience.answer_ms : this.#patience.news_ms);
    const answer = await fetchUnix(this.#socket, `/status?after=${after}`, { signal: signal ? AbortSignal.any([signal, limit]) : limit });
    return parseAs(ShimStatus, await answer.json(), "the shim's status");
  }

  /** What it was started with. */
  async spec(): Promise<ShimSpec> {
    const answer = await fetchUnix(this.#socket, "/spec", { signal: AbortSignal.timeout(this.#patience.answer_ms) });
    if (!answer.ok) throw new Error(`the shim answered ${answer.status}`);
    return parseAs(ShimSpec, await answer.json(), "what a shim was started with");
  }

  async stop(reason: string): Promise<void> {
    await this.#post("/stop", { reason });
  }

  /** Makes the shim read its certificate again and takes over the revocations. */
  async trust(revocations: readonly Revocation[]): Promise<void> {
    await this.#post("/trust", { revocations });
  }

  async #post(path: string, body: unknown): Promise<void> {
    const answer = await fetchUnix(this.#socket, path, {
      method: "POST",
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(this.#patience.answer_ms),
    });
    if (!answer.ok) throw new Error(`the shim answered ${answer.status}: ${await answer.text()}`);
  }
}
