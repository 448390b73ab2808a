import { expect, test } from "bun:test";
import { NODE_LOST_AFTER_MS, NODE_SUSPECT_AFTER_MS, RECONCILE_INTERVAL_MS } from "../../../src/protocol/limits.ts";
import { Fleet, stateOf, type FleetNode } from "../../../src/server/fleet.ts";

const START_MS = 1_000_000_000;
const HOUR_MS = 3_600_000;
const node = (last_seen_ms: number) => ({ kept: { last_seen_ms }, ranks: [] }) as unknown as FleetNode;

/** A fleet that was looked at each second for this long. */
function watched(for_ms: number, from_ms = START_MS, fleet = new Fleet({ epoch: 1, generation: 0 }, START_MS)): Fleet {
  for (let now_ms = from_ms; now_ms <= from_ms + for_ms; now_ms += RECONCILE_INTERVAL_MS) fleet.look(now_ms);
  return fleet;
}

test("a node that is silent while the server listens is suspect, then lost", () => {
  const fleet = watched(NODE_LOST_AFTER_MS);
  const at = (silent_ms: number) => stateOf(node(START_MS), fleet.listening_ms, START_MS + silent_ms).state;
  expect([0, NODE_SUSPECT_AFTER_MS - 1, NODE_SUSPECT_AFTER_MS, NODE_LOST_AFTER_MS].map(at)).toEqual(["ready", "ready", "suspect", "lost"]);
});

test.each([
  ["stood still", HOUR_MS],
  ["had its clock set forward", 24 * HOUR_MS],
  ["had its clock set back", -HOUR_MS],
])("a server that %s gives every node its grace time again, and no more than that", (_name, jump_ms) => {
  const before_ms = START_MS + HOUR_MS;
  const fleet = watched(HOUR_MS);
  const after_ms = before_ms + jump_ms;
  watched(NODE_LOST_AFTER_MS, after_ms, fleet);
  const at = (silent_ms: number) => stateOf(node(before_ms), fleet.listening_ms, after_ms + silent_ms).state;
  expect([0, NODE_SUSPECT_AFTER_MS - 1, NODE_LOST_AFTER_MS].map(at)).toEqual(["ready", "ready", "lost"]);
});
