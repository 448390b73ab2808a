import { describe, expect, test } from "bun:test";
import { afterLook, alive, type Look } from "../../../src/shim/liveness.ts";

/** How long an engine stood still in the end, in seconds. Looks are five seconds apart: `owed mark`, and `busy` for one at work. */
function stillAfter(...looks: readonly string[]): number {
  let state = alive(0);
  for (const [index, text] of looks.entries()) {
    const [owed = "", mark = "", busy] = text.split(" ");
    const look: Look = { at_ms: 5_000 * (index + 1), owed: Number(owed), mark: mark === "-" ? null : mark, busy: busy === "busy" };
    state = afterLook(state, look);
  }
  return state.still_ms / 1_000;
}

describe("what counts as getting on", () => {
  test.each<[string, string[], number]>([
    ["nothing asked, nothing owed", ["0 -", "0 -", "0 -"], 0],
    ["tokens move", ["1 a", "1 b", "1 c", "1 d"], 0],
    ["a request and no token", ["1 a", "1 a", "1 a"], 10],
    ["a request and no answer about it", ["1 -", "1 -", "1 -"], 15],
    ["an answer about it comes late", ["1 -", "1 -", "1 a"], 0],
    ["clients that give up do not make it new", ["1 a", "1 a", "0 -", "1 a", "0 -", "1 a"], 15],
    ["idle time does not count", ["1 a", "0 -", "0 -", "0 -", "1 a"], 5],
    ["what was made while nobody looked counts", ["1 a", "1 a", "0 -", "1 b"], 0],
    ["the processor works for a rank without GPUs", ["1 a", "1 a busy", "1 a busy"], 0],
  ])("%s", (_what, looks, seconds) => {
    expect(stillAfter(...looks)).toBe(seconds);
  });

  test("time in which the whole machine stood still is not the engine's", () => {
    const before = afterLook(alive(0), { at_ms: 5_000, owed: 1, mark: "a", busy: false });
    const woken = afterLook(before, { at_ms: 3_600_000, owed: 1, mark: "a", busy: false });
    expect(woken.still_ms).toBeLessThan(60_000);
  });
});
