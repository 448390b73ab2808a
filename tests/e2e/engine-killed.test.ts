// An engine killed with -9: its requests end in an error they can understand, it comes back, and others serve on.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { Fleet } from "./fleet.ts";
import { SLOW_SIM, SLOW_TOKENS } from "./sim.ts";
import { streamChat } from "./stream.ts";

const TEST_MS = 90_000;
let fleet: Fleet;
let key = "";
beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 2, models: [{ ...SLOW_SIM, name: "slow", replicas: 2 }] });
  await fleet.ready("slow");
  key = await fleet.key();
}, TEST_MS);
afterAll(() => fleet?.stop());

interface Whole {
  readonly status: number;
  readonly body: { error?: { message?: string; type?: string }; choices?: unknown[] };
}

async function askWhole(): Promise<Whole> {
  const response = await fetch(`${fleet.gateway}/v1/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify({ model: "slow", max_tokens: SLOW_TOKENS, messages: [{ role: "user", content: "hello" }] }),
  });
  return { status: response.status, body: (await response.json()) as Whole["body"] };
}

test(
  "requests in flight are told, the engine is back, and the other replica served on",
  async () => {
    const streams = Array.from({ length: 6 }, () => streamChat(fleet, key, "slow", SLOW_TOKENS));
    const wholes = Array.from({ length: 6 }, askWhole);
    await fleet.waitFor("all streams to run", () => streams.every((stream) => stream.deltas() > 2));
    const before = await fleet.enginePids("slow");
    expect(before).toHaveLength(2);
    // Streams run before the gateway's count of them reaches the server.
    const victim = await fleet.waitFor("a replica's requests to be counted", async () =>
      (await fleet.replicas()).find(({ in_flight }) => in_flight > 0),
    );
    const pid = victim.ranks[0]?.engine_pid ?? 0;
    expect(before).toContain(pid);
    process.kill(pid, "SIGKILL");

    const ends = await Promise.all(streams.map((stream) => stream.end));
    const whole = ends.filter(
      ({ status, done, broken, events }) => status === 200 && done && broken === null && !events.some(({ error }) => error),
    );
    const told = ends.filter(
      ({ status, broken, events }) => status === 200 && broken === null && events.some(({ error }) => error?.message),
    );
    expect(whole.length + told.length).toBe(6);
    expect(whole.length).toBeGreaterThan(0);
    expect(told.length).toBeGreaterThan(0);

    const answers = await Promise.all(wholes);
    for (const { status, body } of answers) {
      if (status === 200) expect(body.choices).toHaveLength(1);
      else expect({ status, typed: typeof body.error?.message }).toEqual({ status: 502, typed: "string" });
    }
    expect(answers.some(({ status }) => status === 200)).toBe(true);

    await fleet.waitFor("the engine to be back", async () => {
      const pids = await fleet.enginePids("slow");
      return pids.length === 2 && !pids.includes(pid) && (await fleet.status()).replicas.ready === 2;
    });
    const died = (await fleet.events()).filter(({ subject, kind }) => subject === `replica/${victim.id}` && kind === "engine-died");
    expect(died).toHaveLength(1);
    expect(died[0]?.text).toMatch(/SIGKILL|killed|signal 9/i);
    expect((await streamChat(fleet, key, "slow", 3).end).done).toBe(true);
  },
  TEST_MS,
);
