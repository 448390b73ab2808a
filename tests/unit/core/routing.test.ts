import { describe, expect, test } from "bun:test";
import { afterAnswer, afterFailure, chooseTarget, FRESH_TARGET, type TargetState } from "../../../src/core/routing.ts";
import type { Target } from "../../../src/protocol/gateway-api.ts";

const target = (name: string, state: Target["state"] = "ready"): Target => ({
  replica: `demo-${name}`,
  attempt: name,
  node: name,
  address: "127.0.0.1",
  port: 20_000,
  state,
});
const [a, b, c] = [target("a"), target("b"), target("c")];
const state = (more: Partial<TargetState>): TargetState => ({ ...FRESH_TARGET, ...more });

function choose(
  states: Record<string, TargetState>,
  tick = 0,
  more: { targets?: readonly Target[]; tried?: string[]; now_ms?: number } = {},
) {
  const { targets = [a, b, c], tried = [], now_ms = 1_000 } = more;
  return chooseTarget(targets, (it) => states[it.attempt] ?? FRESH_TARGET, new Set(tried), tick, now_ms)?.attempt ?? null;
}

describe("the choice of a target", () => {
  test("is the one with the fewest requests in flight", () => {
    expect(choose({ a: state({ in_flight: 3 }), b: state({ in_flight: 1 }), c: state({ in_flight: 2 }) })).toBe("b");
  });

  test("goes round among equals", () => {
    const rounds = Array.from({ length: 6 }, (_, tick) => choose({ b: state({ in_flight: 1 }) }, tick));
    expect(rounds).toEqual(["a", "c", "a", "c", "a", "c"]);
  });

  test("spares a target that drains, and one this request has been to", () => {
    expect(choose({}, 0, { targets: [target("a", "draining"), b] })).toBe("b");
    expect(choose({}, 0, { tried: ["a", "b"] })).toBe("c");
    expect(choose({}, 0, { targets: [target("a", "draining")] })).toBeNull();
    expect(choose({}, 0, { tried: ["a", "b", "c"] })).toBeNull();
    expect(choose({}, 0, { targets: [] })).toBeNull();
  });

  test("leaves out a target that failed lately, however empty, until its time is over", () => {
    const failed = { a: state({ ejected_until_ms: 1_500 }), b: state({ in_flight: 9 }), c: state({ in_flight: 9 }) };
    expect(choose(failed, 0, { now_ms: 1_499 })).toBe("b");
    expect(choose(failed, 0, { now_ms: 1_500 })).toBe("a");
  });

  test("takes the emptiest when all failed: what fails everywhere is no replica's fault", () => {
    const out = { ejected_until_ms: 9_000 };
    const failed = {
      a: state({ ...out, in_flight: 2 }),
      b: state({ ...out, in_flight: 1 }),
      c: state({ ejected_until_ms: 2_000, in_flight: 2 }),
    };
    expect(choose(failed)).toBe("b");
  });
});

test("a target is out longer with each failure in a row, up to a limit, and an answer forgives all", () => {
  let now = state({});
  const out: number[] = [];
  for (let failure = 0; failure < 40; failure++) {
    now = afterFailure(now, 0);
    out.push(now.ejected_until_ms);
  }
  expect(out.slice(0, 4)).toEqual([500, 1_000, 2_000, 4_000]);
  expect(out.every((ms, at) => at === 0 || ms >= (out[at - 1] ?? 0))).toBe(true);
  expect(out.at(-1)).toBe(30_000);
  expect(afterAnswer(now)).toEqual({ ...now, failures: 0, ejected_until_ms: 0 });
});
