// A node is emptied under load: nothing fails, nothing is ever missing, also when the server dies half-way.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { Fleet, runBinary } from "./fleet.ts";

const TEST_MS = 120_000;
let fleet: Fleet;
let key = "";

beforeAll(async () => {
  fleet = await Fleet.start({
    nodes: 3,
    models: [{ name: "m", engine: "sim", replicas: 2, args: { "tokens-per-second": 100, tokens: 20 } }],
  });
  await fleet.ready("m");
  key = await fleet.key();
}, TEST_MS);
afterAll(() => fleet?.stop());

/** Asks without pause, four at once, until told to stop; how many were answered, and what went wrong. */
function load(): { stop: () => Promise<{ answered: number; failed: string[] }> } {
  let going = true;
  let answered = 0;
  const failed: string[] = [];
  const body = (stream: boolean) => JSON.stringify({ model: "m", stream, messages: [{ role: "user", content: "hello" }] });
  const worker = async (stream: boolean) => {
    const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
    while (going) {
      try {
        const answer = await fetch(`${fleet.gateway}/v1/chat/completions`, { method: "POST", headers, body: body(stream) });
        const text = await answer.text();
        if (answer.status !== 200 || text.includes('"error"')) failed.push(`${answer.status} ${text.slice(-200)}`);
        else answered++;
      } catch (error) {
        failed.push(String(error));
      }
    }
  };
  const workers = [true, false, true, false].map(worker);
  return {
    stop: async () => {
      going = false;
      await Promise.all(workers);
      return { answered, failed };
    },
  };
}

const readyCount = async () => (await fleet.modelViews()).find(({ name }) => name === "m")?.ready ?? 0;
const nodesOf = async () =>
  (await fleet.replicas())
    .filter(({ state }) => state === "ready")
    .map(({ ranks }) => ranks[0]?.node ?? "")
    .toSorted((a, b) => a.localeCompare(b));

test(
  "a drain under load fails no request and never lowers the number of ready replicas",
  async () => {
    const [node = ""] = await nodesOf();
    const { out } = await fleet.must("ctl", "drain", node, "--plan");
    expect(out).toContain("to n");
    const asking = load();
    let least = 2;
    let going = true;
    const watch = (async () => {
      while (going) least = Math.min(least, await readyCount());
    })();
    const ran = await fleet.must("ctl", "drain", node);
    expect(ran.err).toContain(`${node} is empty`);
    going = false;
    await watch;
    const { answered, failed } = await asking.stop();
    expect(failed).toEqual([]);
    expect(answered).toBeGreaterThan(20);
    expect(least).toBe(2);
    expect(await nodesOf()).not.toContain(node);
    const views = await fleet.nodeViews();
    expect(views.find(({ id }) => id === node)).toMatchObject({ replicas: [], state: "ready" });
    await fleet.must("ctl", "uncordon", node);
  },
  TEST_MS,
);

test(
  "a drain that the server's death interrupts goes on when it is back",
  async () => {
    const [node = ""] = await nodesOf();
    const drained = fleet.must("ctl", "drain", node);
    await fleet.waitFor("the drain", async () => (await fleet.nodeViews()).find(({ id }) => id === node)?.drain);
    await fleet.signal("server", "SIGKILL");
    fleet.startServer();
    await fleet.waitFor("the server to be back", () => fleet.status());
    expect((await fleet.nodeViews()).find(({ id }) => id === node)?.drain).not.toBeNull();
    // Who watches the drain goes on watching.
    expect((await drained).err).toContain(`${node} is empty`);
    await fleet.waitFor(
      "the node to be empty",
      async () => (await fleet.nodeViews()).find(({ id }) => id === node)?.replicas.length === 0,
      60_000,
    );
    await fleet.ready("m");
    await fleet.must("ctl", "uncordon", node);
    expect((await fleet.nodeViews()).find(({ id }) => id === node)?.drain).toBeNull();
  },
  TEST_MS,
);

test(
  "without room a drain says so and waits; --stop-first goes on",
  async () => {
    const node = (await fleet.nodeViews()).find(({ replicas }) => replicas.length > 0)?.id ?? "";
    const others = fleet.nodes.filter((id) => id !== node);
    for (const id of others) await fleet.must("ctl", "cordon", id);
    const words = join(fleet.folder, "drain.words");
    const draining = Bun.spawn([binary, "ctl", "drain", node], {
      env: { LLMGW_CONFIG: fleet.ctlConfig },
      stdin: "ignore",
      stdout: "ignore",
      stderr: Bun.file(words),
    });
    const way = `; without it: llmgw ctl drain ${node} --stop-first`;
    await fleet.waitFor("the way on", async () => (await readFile(words, "utf8")).includes(way));
    const waiting = await fleet.waitFor("the reason", async () => (await fleet.replicas()).find(({ state }) => state === "pending"));
    expect(waiting.reason).toContain("keeps serving");
    expect((await fleet.must("ctl", "why", "replica", waiting.id)).out).toMatch(new RegExp(`${others[0]} +cordon`));
    expect(await readyCount()).toBe(2);
    await fleet.must("ctl", "drain", node, "--stop-first");
    expect(await draining.exited).toBe(0);
    expect((await fleet.nodeViews()).find(({ id }) => id === node)?.replicas).toEqual([]);
    for (const id of fleet.nodes) await fleet.must("ctl", "uncordon", id);
    await fleet.ready("m");
  },
  TEST_MS,
);

test(
  "a replica is restarted and moved without an outage",
  async () => {
    const asking = load();
    const [first] = await fleet.ready("m");
    await fleet.must("ctl", "restart", first?.id ?? "");
    await fleet.waitFor("another in its place", async () => !(await fleet.replicas()).some(({ id }) => id === first?.id));
    const [second] = await fleet.ready("m");
    await fleet.must("ctl", "replica", "move", second?.id ?? "");
    await fleet.waitFor("another in its place", async () => !(await fleet.replicas()).some(({ id }) => id === second?.id));
    const { failed } = await asking.stop();
    expect(failed).toEqual([]);
    expect(await readyCount()).toBe(2);
  },
  TEST_MS,
);

test("what cannot be is told with what can", async () => {
  const refused = (...words: string[]) => fleet.must("ctl", ...words).then(() => "", String);
  expect(await refused("drain", "nx")).toContain('there is no node "nx"');
  expect(await refused("restart", "m-zzzzz")).toContain("there is no replica");
  expect(await refused("why", "thing", "m")).toContain("it is replica, node or model");
  expect(await refused("drain", "n1", "--deadline", "soon")).toContain("--deadline");
  expect((await fleet.must("ctl", "plan")).err).toContain("nothing would change");
});

test(
  "a model is scaled without an outage; the number outlives the server and a reload, and is taken back",
  async () => {
    const wanted = async () => (await fleet.modelViews()).find(({ name }) => name === "m")?.wanted;
    expect((await fleet.must("ctl", "scale", "m", "3", "--dry-run")).err).toContain("would want 3 replicas of m instead of 2");
    const asking = load();
    expect((await fleet.must("ctl", "scale", "m", "3")).err).toContain("llmgw ctl scale m --catalog takes it back");
    await fleet.waitFor("three to be ready", async () => (await readyCount()) === 3);
    await fleet.signal("server", "SIGKILL");
    fleet.startServer();
    await fleet.waitFor("the server to be back", () => fleet.status());
    await fleet.must("ctl", "reload");
    expect(await wanted()).toBe(3);
    expect((await fleet.must("ctl", "models", "-o", "wide")).out).toContain("catalog 2");
    await fleet.must("ctl", "scale", "m", "--catalog");
    await fleet.waitFor("the third to be gone", async () => (await fleet.replicas()).filter(({ model }) => model === "m").length === 2);
    const { answered, failed } = await asking.stop();
    expect(failed).toEqual([]);
    expect(answered).toBeGreaterThan(20);
    const refused = (...words: string[]) => runBinary(["ctl", "scale", ...words], { LLMGW_CONFIG: fleet.ctlConfig }, fleet.folder);
    expect(await refused("m", "many")).toMatchObject({ code: 2, err: expect.stringContaining("a number from 0 to 1000 is needed") });
    expect(await refused("n", "1")).toMatchObject({ code: 1, err: expect.stringContaining('there is no model "n"') });
  },
  TEST_MS,
);
