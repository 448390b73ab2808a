import { expect, test } from "bun:test";
import { duration } from "../../../src/cli/duration.ts";

test.each([
  ["250ms", 250],
  ["90s", 90_000],
  ["1.5m", 90_000],
  ["2h", 7_200_000],
  ["7", 7_000],
  ["0", 0],
])("%s is %d ms", (text, length_ms) => {
  expect(duration("timeout", text)).toBe(length_ms);
});

test.each(["", "-1s", "5 m", "5d", "abc", "1e3", "999h", "s"])("%p is refused", (text) => {
  expect(() => duration("timeout", text)).toThrow(`--timeout cannot be "${text}"`);
});
