import { fetchUnix } from "../os/unix-http.ts";
import { parseAs } from "../protocol/errors.ts";
import { BLOCKING_QUERY_MS } from "../protocol/limits.ts";
import type { Revocation } from "../protocol/plan.ts";
import { ShimStatus } from "../protocol/shim-api.ts";

/** Time a shim has beyond the wait it was asked for, in ms. */
const PATIENCE_MS = 10_000;

/** The agent's side of one shim's control socket. Every call rejects when nobody answers. */
export class ShimClient {
  readonly #socket: string;

  constructor(socket: string) {
    this.#socket = socket;
  }

  /** The status once it is no longer of revision `after` (at once with 0), or after BLOCKING_QUERY_MS. */
  async status(after: number, signal?: AbortSignal): Promise<ShimStatus> {
    const limit = AbortSignal.timeout(BLOCKING_QUERY_MS + PATIENCE_MS);
    const answer = await fetchUnix(this.#socket, `/status?after=${after}`, { signal: signal ? AbortSignal.any([signal, limit]) : limit });
    return parseAs(ShimStatus, await answer.json(), "the shim's status");
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
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (!answer.ok) throw new Error(`the shim answered ${answer.status}: ${await answer.text()}`);
  }
}
