import { expect, test } from "bun:test";
import { DUPLICATE_NODE_WINDOW_MS } from "../../../src/protocol/limits.ts";
import { decideJoin, refuseOlderJoin, type Session } from "../../../src/server/sessions.ts";

const NOW_MS = 1_000_000;
const holder = (silent_ms: number) => ({ machine_id: "m1", address: "10.0.0.1", last_seen_ms: NOW_MS - silent_ms });
const from = (machine_id: string) => ({ key: { machine_id, boot_id: "b", agent_start_id: "s" }, address: "10.0.0.2" });

test.each([
  ["a new node", null, "m1", true],
  ["the same machine at once", holder(0), "m1", true],
  ["another machine while the first is heard", holder(0), "m2", false],
  ["another machine just before the first has been silent for long", holder(DUPLICATE_NODE_WINDOW_MS - 1), "m2", false],
  ["another machine once the first has been silent for long", holder(DUPLICATE_NODE_WINDOW_MS), "m2", true],
] as const)("%s", (_name, before, machine, admitted) => {
  const join = () => decideJoin("a", before, from(machine), NOW_MS);
  if (admitted) return expect(join).not.toThrow();
  expect(join).toThrow(expect.objectContaining({ code: "E_DUPLICATE_NODE", why: expect.stringMatching(/10\.0\.0\.1.*10\.0\.0\.2/) }));
});

const session = (joins: number, silent_ms: number): Session => ({
  id: "s",
  key: from("m1").key,
  serial: "",
  address: "",
  seq: 0,
  planned: true,
  notices: 0,
  joins,
  last_seen_ms: NOW_MS - silent_ms,
});

test.each([
  ["the next join", session(3, 0), 4, true],
  ["the first of a node", null, 1, true],
  ["the same one once more", session(3, 0), 3, false],
  ["one that was sent before and comes late", session(3, 5_000), 2, false],
  ["one that counts anew, once the session has been silent for long", session(3, DUPLICATE_NODE_WINDOW_MS), 1, true],
  ["one of an agent that does not count", session(3, 0), 0, true],
] as const)("%s", (_name, before, joins, admitted) => {
  const join = () => refuseOlderJoin("a", before, joins, NOW_MS);
  if (admitted) expect(join).not.toThrow();
  else expect(join).toThrow(expect.objectContaining({ code: "E_STALE_SESSION" }));
});
