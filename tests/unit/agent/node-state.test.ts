import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import fc from "fast-check";
import { foldersToDrop } from "../../../src/agent/kept-folders.ts";
import { NodeState } from "../../../src/agent/node-state.ts";
import { makeLog } from "../../../src/os/log.ts";

let folder: string;
const lines: string[] = [];
const log = makeLog({ level: "warn", format: "text", write: (line) => lines.push(line) });
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-state-"));
  lines.length = 0;
});
afterEach(() => rm(folder, { recursive: true, force: true }));

describe("what a node remembers", () => {
  test("the newest plan and who is revoked, across restarts; a plan that is older is not accepted", async () => {
    const first = await NodeState.open(folder, log);
    expect(await first.accept({ epoch: 1, generation: 7 })).toBe(true);
    expect(await first.revoke([{ name: "b", until_ms: 5 }])).toBe(true);
    expect(await first.revoke([{ name: "b", until_ms: 5 }])).toBe(false);
    const second = await NodeState.open(folder, log);
    expect(second.revocations).toEqual([{ name: "b", until_ms: 5 }]);
    expect(second.seen).toEqual({ epoch: 1, generation: 7 });
    const accepted = [];
    for (const [epoch, generation] of [
      [1, 6],
      [1, 7],
      [0, 99],
      [2, 1],
      [1, 8],
    ] as const)
      accepted.push(await second.accept({ epoch, generation }));
    expect(accepted).toEqual([false, true, false, true, false]);
    expect(second.seen).toEqual({ epoch: 2, generation: 1 });
    expect(second.revocations).toEqual([{ name: "b", until_ms: 5 }]);
  });

  test("its own id; another folder is another machine, another start another session", async () => {
    const [one, again] = [await NodeState.open(folder, log), await NodeState.open(folder, log)];
    const other = await NodeState.open(join(folder, "other"), log);
    expect(again.session_key.machine_id).toBe(one.session_key.machine_id);
    expect(other.session_key.machine_id).not.toBe(one.session_key.machine_id);
    expect(again.session_key.agent_start_id).not.toBe(one.session_key.agent_start_id);
  });

  test("a spoiled file is told and does not keep the node out", async () => {
    await NodeState.open(folder, log);
    await writeFile(join(folder, "agent", "seen.json"), "{");
    expect((await NodeState.open(folder, log)).seen).toEqual({ epoch: 0, generation: 0 });
    expect(lines).toHaveLength(1);
  });
});

describe("folders of ended attempts", () => {
  const ended = (replica: string, ...times: number[]) => times.map((at_ms) => ({ folder: `${replica}${at_ms}`, replica, at_ms }));

  test.each<[string, ReturnType<typeof ended>, string[]]>([
    ["few stay", ended("a", 1, 2, 3), []],
    ["the first and the newest of a replica stay", ended("a", 5, 1, 4, 2, 3), ["a2", "a3"]],
    ["each replica for itself", [...ended("a", 1), ...ended("b", 1, 2, 3, 4)], ["b2"]],
    ["and not too many in all", "abcdef".split("").flatMap((replica, n) => ended(replica, n)), ["a0"]],
  ])("%s", (_what, all, dropped) => {
    expect(foldersToDrop(all, 3, 5)).toEqual(dropped);
  });

  test("whatever there is: bounded, and the first failure of a replica goes last", () => {
    const entry = fc.record({ folder: fc.uuid(), replica: fc.constantFrom("a", "b", "c"), at_ms: fc.nat(50) });
    fc.assert(
      fc.property(fc.uniqueArray(entry, { selector: (each) => each.folder }), (all) => {
        const dropped = foldersToDrop(all, 3, 100);
        const kept = all.filter((each) => !dropped.includes(each.folder));
        for (const replica of ["a", "b", "c"]) {
          const of = (list: typeof all) => list.filter((each) => each.replica === replica).map((each) => each.at_ms);
          expect(of(kept).length).toBe(Math.min(3, of(all).length));
          expect(Math.min(...of(kept))).toBe(Math.min(...of(all)));
        }
        expect(all.length - foldersToDrop(all, 3, 2).length).toBeLessThanOrEqual(2);
      }),
    );
  });
});
