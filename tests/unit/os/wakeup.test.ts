import { expect, test } from "bun:test";
import { getEventListeners } from "node:events";
import { pause, Waiters, Wakeup } from "../../../src/os/wakeup.ts";

const LONG_MS = 60_000;
const never = new AbortController().signal;

test("wakes who waits, and who comes later until it is cleared", async () => {
  const wakeup = new Wakeup();
  const woken = wakeup.wait(LONG_MS, never);
  wakeup.raise();
  await woken;
  await wakeup.wait(LONG_MS, never);
  wakeup.clear();
  const again = wakeup.wait(LONG_MS, never);
  wakeup.raise();
  await again;
});

test("a wait ends when its time is over", async () => {
  const start_ms = performance.now();
  await new Wakeup().wait(20, never);
  expect(performance.now() - start_ms).toBeGreaterThanOrEqual(15);
});

test("a wait ends with its signal, and does not begin after it", async () => {
  const wakeup = new Wakeup();
  const over = new AbortController();
  const waiting = wakeup.wait(LONG_MS, over.signal);
  over.abort();
  await waiting;
  await wakeup.wait(LONG_MS, over.signal);
});

test("one wake is for all who wait, and not for who comes later", async () => {
  const waiters = new Waiters();
  const all = Promise.all([waiters.wait(LONG_MS), waiters.wait(LONG_MS, never)]);
  waiters.wake();
  await all;
  const later = waiters.wait(20).then(() => "time over");
  expect(await Promise.race([later, waiters.wait(LONG_MS)])).toBe("time over");
  waiters.wake();
});

test("a pause ends with its time or its signal, and leaves nothing on the signal", async () => {
  const over = new AbortController();
  const paused = pause(20, over.signal);
  expect(getEventListeners(over.signal, "abort")).toHaveLength(1);
  await paused;
  expect(getEventListeners(over.signal, "abort")).toHaveLength(0);
  const cut = pause(LONG_MS, over.signal);
  over.abort();
  await cut;
  await pause(LONG_MS, over.signal);
});
