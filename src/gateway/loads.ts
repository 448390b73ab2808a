import { afterAnswer, afterFailure, FRESH_TARGET } from "../core/routing.ts";
import type { TargetState } from "../core/routing.ts";
import type { GatewayStatus, ModelRoute, Target } from "../protocol/gateway-api.ts";

type Load = GatewayStatus["loads"][number];
interface Entry {
  readonly target: Target;
  state: TargetState;
  unreachable: Load["unreachable"];
  /** When it last answered anything. */
  heard_ms: number;
}

/** What this gateway has in flight at each target and how they fared. The only source of its choices. */
export class Loads {
  readonly #entries = new Map<string, Entry>();

  #entry(target: Target): Entry {
    let entry = this.#entries.get(target.attempt);
    if (!entry) this.#entries.set(target.attempt, (entry = { target, state: FRESH_TARGET, unreachable: null, heard_ms: 0 }));
    return entry;
  }

  stateOf(target: Target): TargetState {
    return this.#entries.get(target.attempt)?.state ?? FRESH_TARGET;
  }

  /** Counts a request until the returned function is called, which may be called more than once. */
  begin(target: Target): () => void {
    const entry = this.#entry(target);
    entry.state = { ...entry.state, in_flight: entry.state.in_flight + 1 };
    let over = false;
    return () => {
      if (over) return;
      over = true;
      entry.state = { ...entry.state, in_flight: entry.state.in_flight - 1 };
    };
  }

  answered(target: Target, now_ms: number): void {
    const entry = this.#entry(target);
    entry.state = afterAnswer(entry.state);
    entry.unreachable = null;
    entry.heard_ms = now_ms;
  }

  /** Its door is there. That forgives not having been reached, but not what its engine did wrong. */
  reached(target: Target, now_ms: number): void {
    if (this.#entry(target).unreachable) this.answered(target, now_ms);
    this.#entry(target).heard_ms = now_ms;
  }

  heard_ms(target: Target): number {
    return this.#entries.get(target.attempt)?.heard_ms ?? 0;
  }

  /** @param reason why it could not be reached; null when it was reached and failed all the same */
  failed(target: Target, reason: string | null, now_ms: number): void {
    const entry = this.#entry(target);
    entry.state = afterFailure(entry.state, now_ms);
    entry.unreachable = reason === null ? null : (entry.unreachable ?? { since_ms: now_ms, reason });
  }

  /** Forgets targets that no route has and no request is at. */
  keepOnly(routes: readonly ModelRoute[]): void {
    const known = new Set(routes.flatMap((route) => route.targets.map((target) => target.attempt)));
    for (const [attempt, entry] of this.#entries) if (!known.has(attempt) && entry.state.in_flight === 0) this.#entries.delete(attempt);
  }

  get in_flight(): number {
    return [...this.#entries.values()].reduce((sum, entry) => sum + entry.state.in_flight, 0);
  }

  list(): Load[] {
    return [...this.#entries.values()].map(({ target, state, unreachable }) => ({
      replica: target.replica,
      attempt: target.attempt,
      in_flight: state.in_flight,
      unreachable,
    }));
  }
}
