import { pause } from "../os/wakeup.ts";
import { DOOR_CHECK_INTERVAL_MS } from "../protocol/limits.ts";
import { ALIVE_PATH } from "../protocol/shim-api.ts";
import type { Target } from "../protocol/gateway-api.ts";
import type { Loads } from "./loads.ts";
import type { Routes } from "./snapshot.ts";
import type { Upstream } from "./upstream.ts";

interface DoorCheckParts {
  readonly routes: Routes;
  readonly loads: Loads;
  readonly upstream: Upstream;
  readonly signal: AbortSignal;
  readonly interval_ms?: number;
}

/**
 * Tries the door of every replica that has said nothing for a while, so that one that came back is used again without
 * anybody's request being the trial, and the server knows which doors answer when it hears nothing from their nodes.
 */
export async function checkDoors({ routes, loads, upstream, signal, interval_ms = DOOR_CHECK_INTERVAL_MS }: DoorCheckParts): Promise<void> {
  const check = async (target: Target) => {
    const limit = AbortSignal.any([signal, AbortSignal.timeout(interval_ms)]);
    const request = { method: "GET", path: ALIVE_PATH, headers: new Headers(), body: new Uint8Array(), signal: limit };
    const outcome = await upstream.send(target, request).catch((error: unknown) => ({ kind: "failed" as const, why: String(error) }));
    if (signal.aborted) return;
    if (outcome.kind === "failed") {
      loads.failed(target, outcome.why, Date.now());
      return;
    }
    while ((await outcome.answer.body.read().catch(() => null)) !== null);
    loads.reached(target, Date.now());
  };
  while (!signal.aborted) {
    const silent = routes.models.flatMap((route) => route.targets).filter((target) => Date.now() - loads.heard_ms(target) >= interval_ms);
    await Promise.all(silent.map(check));
    await pause(interval_ms, signal);
  }
}
