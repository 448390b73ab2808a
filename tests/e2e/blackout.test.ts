// All agents are cut off at once: nothing is replaced, engines serve on, and the operator is told.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { alive, Fleet } from "./fleet.ts";
import { streamChat } from "./stream.ts";

const TEST_MS = 180_000;
let fleet: Fleet;
let key = "";
beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 4, models: [{ name: "m", engine: "sim", replicas: 4 }] });
  await fleet.ready("m");
  key = await fleet.key();
}, TEST_MS);
afterAll(() => fleet?.stop());

test(
  "four agents killed at once: frozen, every engine serves on, and their return changes nothing",
  async () => {
    const pids = await fleet.enginePids("m");
    expect(pids).toHaveLength(4);
    await Promise.all(fleet.nodes.map((id) => fleet.signal(id, "SIGKILL")));
    // They fall silent one after the other, as each spoke last.
    const frozen = await fleet.waitFor(
      "the warning that four vanished",
      async () => (await fleet.status()).warnings.find(({ code, text }) => code === "frozen" && text.includes("4 nodes vanished together")),
      120_000,
    );
    expect(frozen.remedy).toContain("llmgw ctl thaw");
    for (let i = 0; i < 8; i++) expect((await streamChat(fleet, key, "m", 3).end).done).toBe(true);
    expect(await Promise.all(pids.map(alive))).toEqual([true, true, true, true]);
    expect((await fleet.replicas()).map(({ state }) => state)).toEqual(["ready", "ready", "ready", "ready"]);

    for (const id of fleet.nodes) fleet.startAgent(id);
    await fleet.waitFor("the nodes to be back", async () => (await fleet.status()).nodes.ready === 4);
    await fleet.waitFor("the freeze to end", async () => !(await fleet.status()).warnings.some(({ code }) => code === "frozen"));
    await fleet.ready("m");
    expect(await fleet.enginePids("m")).toEqual(pids);
    const kinds = (await fleet.events()).map(({ kind }) => kind);
    expect(kinds.filter((kind) => kind === "replica-created")).toHaveLength(4);
    expect(kinds).not.toContain("engine-died");
  },
  TEST_MS,
);
