// The gateway answers on while the server is stalled, killed and started again: a stream through all of it is whole.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { isAlive } from "../../src/os/process.ts";
import { Fleet } from "./fleet.ts";
import { SLOW_SIM, SLOW_TOKENS, wholeText } from "./sim.ts";
import { streamChat } from "./stream.ts";

const TEST_MS = 90_000;
let fleet: Fleet;
let key = "";
beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 1, models: [{ ...SLOW_SIM, name: "slow" }] });
  await fleet.ready("slow");
  key = await fleet.key();
}, TEST_MS);
afterAll(() => fleet?.stop());

test(
  "a stream is whole while the server is stalled, killed and restarted",
  async () => {
    const gateway_pid = (await fleet.gatewayStatus()).pid;
    // A whole answer runs beside the stream: it has to come through as well, with the same text.
    const whole = wholeText(fleet, key, "slow");
    const stream = streamChat(fleet, key, "slow", SLOW_TOKENS);
    await fleet.waitFor("the stream to run", () => stream.deltas() > 2);

    await fleet.signal("server", "SIGSTOP");
    const before_stall = stream.deltas();
    await fleet.waitFor("tokens during the stall", () => stream.deltas() > before_stall + 3);
    await fleet.signal("server", "SIGKILL");

    const before_death = stream.deltas();
    await fleet.waitFor("tokens without a server", () => stream.deltas() > before_death + 3);
    const alone = streamChat(fleet, key, "slow", 3);
    expect((await alone.end).done).toBe(true);

    fleet.startServer();
    await fleet.waitFor("the server to be back", () => fleet.status());
    await fleet.waitFor("the gateway to serve", async () => (await fleet.status()).gateway.state === "serving");

    const { status, done, broken, events, text } = await stream.end;
    expect({ status, done, broken, errors: events.filter((event) => event.error) }).toEqual({
      status: 200,
      done: true,
      broken: null,
      errors: [],
    });
    expect(text).toBe(await whole);
    expect((await fleet.gatewayStatus()).pid).toBe(gateway_pid);
  },
  TEST_MS,
);

test(
  "a gateway that stands still for a while is waited for, and has the newest routes once it goes on",
  async () => {
    const { pid } = await fleet.gatewayStatus();
    const [before] = await fleet.ready("slow");
    process.kill(pid, "SIGSTOP");
    try {
      await fleet.waitFor("the server to miss it", async () => (await fleet.status()).gateway.state !== "serving");
      await fleet.must("ctl", "restart", before?.id ?? "");
      // The one before is kept while nobody says whether it still has requests.
      await fleet.waitFor("another", async () => (await fleet.replicas()).some(({ id, state }) => id !== before?.id && state === "ready"));
    } finally {
      process.kill(pid, "SIGCONT");
    }
    await fleet.waitFor("the one before to go", async () => !(await fleet.replicas()).some(({ id }) => id === before?.id));
    const after = streamChat(fleet, key, "slow", 3);
    expect(await after.end).toMatchObject({ status: 200, done: true });
    expect((await fleet.gatewayStatus()).pid).toBe(pid);
  },
  TEST_MS,
);

test(
  "llmgw gateway stop ends it once its requests are answered, when no server would start another",
  async () => {
    const config = join(fleet.folder, "server.yaml");
    const { pid } = await fleet.gatewayStatus();
    await fleet.signal("server", "SIGKILL");
    const stream = streamChat(fleet, key, "slow", 10);
    await fleet.waitFor("the stream to run", () => stream.deltas() > 1);
    const { err } = await fleet.must("gateway", "stop", "--config", config);
    expect(err).toContain("1 requests in flight");
    expect(err).toContain(`has ended (process ${pid})`);
    expect((await stream.end).done).toBe(true);
    expect(isAlive(pid)).toBe(false);
    expect((await fleet.must("gateway", "stop", "--config", config)).err).toContain("no gateway answers");
  },
  TEST_MS,
);
