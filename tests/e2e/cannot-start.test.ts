// Engines that cannot start: each says why in its own words, is tried again ever more rarely, and disturbs no other.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type Server } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { llamaServer } from "../fixtures/llama-server.ts";
import { tinyGguf, writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { Fleet } from "./fleet.ts";
import { streamChat } from "./stream.ts";

const SET_UP_MS = 240_000;
const TEST_MS = 90_000;
const program = await llamaServer();
// It needs a llama-server from Debian's archive.
const tested = test.skipIf(program === null);
let folder = "";
let fleet: Fleet;
let key = "";
const squatters: Server[] = [];

beforeAll(async () => {
  if (program === null) return;
  folder = await mkdtemp(join(tmpdir(), "lc-"));
  const good = join(folder, "good.gguf");
  const short = join(folder, "short.gguf");
  await writeTinyGguf(good);
  await writeFile(short, tinyGguf().subarray(0, 200_000));
  fleet = await Fleet.start({
    nodes: 1,
    llama_server: program,
    models: [{ name: "good", engine: "llamacpp", source: good, context: 512 }],
  });
  await fleet.ready("good", 60_000);
  key = await fleet.key();
  await fleet.serve([
    { name: "good", engine: "llamacpp", source: good, context: 512 },
    { name: "short", engine: "llamacpp", source: short, context: 512 },
    { name: "flag", engine: "llamacpp", source: good, context: 512, args: { "cache-type-k": "nonsense" } },
    { name: "crash", engine: "sim", args: { "crash-at-load": true } },
    { name: "refuses", engine: "sim", args: { "refuse-flag": "tokens" } },
    { name: "renamed", engine: "sim", args: { "answer-as": "other" } },
  ]);
}, SET_UP_MS);
afterAll(async () => {
  for (const squatter of squatters) squatter.close();
  await fleet?.stop();
  if (folder) await rm(folder, { recursive: true, force: true });
});

async function failedReplica(model: string) {
  return fleet.waitFor(
    `${model} to fail`,
    async () => (await fleet.replicas()).find((replica) => replica.model === model && replica.state === "failed" && replica.failures > 0),
    60_000,
  );
}

tested.each([
  ["short", /tensor|corrupt|file bounds|load/i],
  ["flag", /nonsense|cache|type/i],
  ["crash", /crash|fail|load/i],
  ["refuses", /invalid argument: --tokens/],
])(
  "%s is failed with the engine's own last lines and a next try",
  async (model, words) => {
    const replica = await failedReplica(model);
    expect(replica.last_lines.join("\n")).toMatch(words);
    expect(replica.reason).not.toBe("");
    expect(replica.next_try_ms).not.toBeNull();
    // The log is that of the newest try, which may only just have begun.
    await fleet.waitFor("the engine's words in its log", async () => words.test((await fleet.must("ctl", "logs", replica.id)).out));
    expect((await fleet.events()).some(({ subject, level }) => subject === `replica/${replica.id}` && level !== "info")).toBe(true);
    expect((await fleet.status()).warnings.some(({ subject }) => subject.includes(model))).toBe(true);
  },
  TEST_MS,
);

tested(
  "an engine that serves another model than it was started for is not let in",
  async () => {
    const replica = await failedReplica("renamed");
    expect(replica.reason).toContain("it serves other, and not renamed");
  },
  TEST_MS,
);

tested(
  "tries grow rarer: no tight loop",
  async () => {
    const first = await failedReplica("short");
    const third = await fleet.waitFor(
      "a third failure",
      async () =>
        (await fleet.replicas()).find((replica) => replica.model === "short" && replica.state === "failed" && replica.failures >= 3),
      60_000,
    );
    expect(third.id).toBe(first.id);
    const tries = (await fleet.events())
      .filter(({ subject, kind }) => subject === `replica/${third.id}` && /fail|died/.test(kind))
      .map(({ at_ms }) => at_ms);
    const gaps = tries.slice(1).map((at_ms, index) => at_ms - (tries[index] ?? 0));
    expect(gaps.length).toBeGreaterThanOrEqual(2);
    // 2 s doubling; the start itself takes a moment more.
    expect(gaps[0]).toBeGreaterThan(1_500);
    expect(gaps[1]).toBeGreaterThan(3_500);
  },
  TEST_MS,
);

tested(
  "a taken port is another's, not a failure: the replica gets a new one",
  async () => {
    // Those that fail hold ports of their own.
    await fleet.serve([{ name: "good", engine: "llamacpp", source: join(folder, "good.gguf"), context: 512 }]);
    const [used] = await fleet.waitFor("good alone", async () => {
      const replicas = await fleet.replicas();
      return replicas.length === 1 && replicas;
    });
    const [address, port] = (used?.ranks[0]?.address ?? "").split(":");
    // Whatever the planner leases next, the first ten ports after the one in use are taken.
    for (let next = Number(port) + 1; next <= Number(port) + 10; next++) {
      const squatter = createServer();
      await new Promise<void>((resolve) => squatter.once("error", () => resolve()).listen(next, address, resolve));
      squatters.push(squatter);
    }
    await fleet.serve([
      { name: "good", engine: "llamacpp", source: join(folder, "good.gguf"), context: 512 },
      { name: "late", engine: "sim" },
    ]);
    const [late] = await fleet.ready("late", 60_000);
    expect(late?.failures).toBe(0);
    const taken = Number((late?.ranks[0]?.address ?? "").split(":")[1]);
    expect(taken < Number(port) || taken > Number(port) + 10).toBe(true);
  },
  TEST_MS,
);

tested("the other model served through all of it", async () => {
  const [good] = (await fleet.replicas()).filter(({ model }) => model === "good");
  expect({ state: good?.state, failures: good?.failures }).toEqual({ state: "ready", failures: 0 });
  expect((await streamChat(fleet, key, "good", 5).end).done).toBe(true);
});
