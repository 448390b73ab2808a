// An agent that dies takes nothing with it; a server that dies changes nothing.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { alive, Fleet } from "./fleet.ts";
import { SLOW_SIM, SLOW_TOKENS, wholeText } from "./sim.ts";
import { streamChat } from "./stream.ts";

const TEST_MS = 90_000;
let fleet: Fleet;
let key = "";
beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 2, models: [{ ...SLOW_SIM, name: "slow" }] });
  await fleet.ready("slow");
  key = await fleet.key();
}, TEST_MS);
afterAll(() => fleet?.stop());

test(
  "killed with -9 while a stream runs: the stream is whole and the engine the same",
  async () => {
    const [replica] = await fleet.ready("slow");
    const node = replica?.ranks[0]?.node ?? "";
    const pids = await fleet.enginePids("slow");
    expect(pids).toHaveLength(1);
    // A whole answer runs beside the stream: it has to come through as well, with the same text.
    const whole = wholeText(fleet, key, "slow");
    const stream = streamChat(fleet, key, "slow", SLOW_TOKENS);
    await fleet.waitFor("the stream to run", () => stream.deltas() > 2);

    const states = new Set<string>();
    const watch = async () => {
      const view = (await fleet.nodeViews()).find(({ id }) => id === node);
      states.add(view?.state ?? "gone");
      return view;
    };
    await fleet.signal(node, "SIGKILL");
    await watch();
    const at_death = stream.deltas();
    await fleet.waitFor("tokens without an agent", async () => (await watch()) && stream.deltas() > at_death + 5);
    fleet.startAgent(node);
    const joins = async () => (await fleet.log(node)).split("\n").filter((line) => line.includes(" joined ")).length;
    await fleet.waitFor("the agent to be back", async () => (await watch()) && (await joins()) === 2);
    await fleet.waitFor("the replica to be ready", async () => (await watch()) && (await fleet.enginePids("slow")).length === 1);

    const { status, done, broken, events, text } = await stream.end;
    expect({ status, done, broken, errors: events.filter((event) => event.error) }).toEqual({
      status: 200,
      done: true,
      broken: null,
      errors: [],
    });
    expect(text).toBe(await whole);
    await watch();
    expect(await fleet.enginePids("slow")).toEqual(pids);
    expect(states.has("lost") || states.has("gone")).toBe(false);
    expect((await fleet.events()).filter(({ kind }) => kind === "engine-died" || kind === "node-lost")).toEqual([]);
  },
  TEST_MS,
);

test(
  "a server killed with -9 and started again restarts no engine, knows its keys and its catalog",
  async () => {
    const pids = await fleet.enginePids("slow");
    const models = await fleet.modelViews();
    const keys = await fleet.ctl("keys");
    await fleet.signal("server", "SIGKILL");
    fleet.startServer();
    await fleet.waitFor("the server to be back", () => fleet.status());
    await fleet.waitFor("the nodes to be back", async () => (await fleet.status()).nodes.ready === 2);
    await fleet.waitFor("the replica to be ready", async () => (await fleet.status()).replicas.ready === 1);

    expect(await fleet.enginePids("slow")).toEqual(pids);
    expect(await Promise.all(pids.map(alive))).toEqual([true]);
    expect(await fleet.modelViews()).toEqual(models);
    expect(await fleet.ctl("keys")).toEqual(keys);
    expect((await streamChat(fleet, key, "slow", 3).end).done).toBe(true);
    const fresh = await fleet.key("after");
    expect((await streamChat(fleet, fresh, "slow", 3).end).done).toBe(true);
  },
  TEST_MS,
);
