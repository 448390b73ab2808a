// What nodes have left: the ports of an address.
import { expect, test } from "bun:test";
import { freeRow, measure, takeRow, type Rooms } from "../../../src/core/room.ts";
import { FIRST_LEASED_PORT as FIRST, LAST_LEASED_PORT as LAST } from "../../../src/protocol/ids.ts";
import { TestFleet } from "./fleet-for-tests.ts";

const ADDRESS = "10.0.0.1";

function roomsWithPortsTaken(...rows: readonly (readonly [first: number, last: number])[]): Rooms {
  const fleet = new TestFleet([], []);
  const rooms = measure(fleet.world(), [], fleet.now_ms);
  for (const [first, last] of rows) takeRow(rooms, ADDRESS, first, last - first + 1);
  return rooms;
}

test.each<[string, [number, number][], number, number, number | null]>([
  ["the first of an unused address", [], FIRST - 1, 1, FIRST],
  ["the next after the one before", [[FIRST, FIRST]], FIRST, 1, FIRST + 1],
  ["the first again after the last", [], LAST, 1, FIRST],
  ["none when all are taken", [[FIRST, LAST]], FIRST - 1, 1, null],
  ["a row past one that is too short", [[FIRST + 3, FIRST + 3]], FIRST - 1, 4, FIRST + 4],
  ["a row that ends with the last port", [[FIRST, LAST - 4]], FIRST - 1, 4, LAST - 3],
  [
    "the first row, from a short one at the end",
    [
      [FIRST + 16, LAST - 16],
      [LAST - 9, LAST],
    ],
    LAST - 16,
    16,
    FIRST,
  ],
  ["no row when none is long enough", [[FIRST + 3, LAST]], FIRST - 1, 4, null],
])("free ports: %s", (_name, taken, after, count, first) => {
  expect(freeRow(roomsWithPortsTaken(...taken), ADDRESS, after, count)).toBe(first);
});
