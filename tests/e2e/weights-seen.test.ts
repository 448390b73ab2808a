// What a model needs is known before it is placed, and what its engine really holds is shown beside it.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { llamaServer } from "../fixtures/llama-server.ts";
import { tinyGguf, writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { Fleet } from "./fleet.ts";

const TEST_MS = 120_000;
const program = await llamaServer();
// It needs a llama-server from Debian's archive.
const tested = test.skipIf(program === null);
/** Large enough to be most of what its engine holds. */
const MODEL = { layers: 2, width: 1_024, feed_forward: 2_048, heads: 8, kv_heads: 8 };
let fleet: Fleet;
let folder = "";
let web: Bun.Server<undefined>;
const asked: string[] = [];

beforeAll(async () => {
  if (program === null) return;
  folder = await mkdtemp(join(tmpdir(), "llmgw-seen-"));
  await writeTinyGguf(join(folder, "here.gguf"), MODEL);
  const bytes = tinyGguf(MODEL);
  web = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => {
      const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.get("range") ?? "");
      asked.push(request.headers.get("range") ?? "whole");
      if (!range) return new Response(bytes);
      const [from, end] = [Number(range[1]), Math.min(bytes.length - 1, range[2] ? Number(range[2]) : bytes.length)];
      return new Response(bytes.subarray(from, end + 1), {
        status: 206,
        headers: { "content-range": `bytes ${from}-${end}/${bytes.length}` },
      });
    },
  });
  fleet = await Fleet.start({ nodes: 1, llama_server: program });
  await fleet.serve([
    { name: "here", engine: "llamacpp", source: join(folder, "here.gguf"), context: 512 },
    { name: "there", engine: "llamacpp", source: `http://127.0.0.1:${web.port}/there.gguf`, context: 512 },
    { name: "wide", engine: "llamacpp", source: join(folder, "here.gguf"), context: 2_000_000_000 },
    { name: "slow", engine: "sim", args: { "load-ms": 300_000 } },
    { name: "nowhere", engine: "llamacpp", source: join(folder, "nowhere.gguf"), context: 512 },
  ]);
}, TEST_MS);
afterAll(async () => {
  await fleet?.stop();
  await web?.stop(true);
  if (folder) await rm(folder, { recursive: true, force: true });
});

tested.each(["here", "there"])(
  "%s: counted by its header, and shown beside what its engine holds",
  async (model) => {
    await fleet.ready(model);
    const measured = await fleet.waitFor("the engine to be measured", async () => {
      const replica = (await fleet.replicas()).find((each) => each.model === model);
      return replica?.ranks[0]?.memory_used === null ? null : replica;
    });
    const used = measured.ranks[0]?.memory_used ?? 0;
    expect(measured.memory.basis).toContain("the header of the weights");
    // Rather too much than too little; a model this small is dwarfed by what is set aside for its process.
    expect(measured.memory.system / used).toBeGreaterThan(1);
    expect(measured.memory.system / used).toBeLessThan(6);
    const { out } = await fleet.must("ctl", "why", `replica/${measured.id}`);
    expect(out).toMatch(/counted for each rank: \d+ MiB of memory, by the header of the weights: weights/);
    expect(out).toMatch(/memory of n1: [\d.]+ MiB in use/);
  },
  TEST_MS,
);

tested(
  "a source is asked for its header before a node fetches it",
  () => {
    expect(asked[0]).toBe("bytes=0-1048575");
    expect(asked.filter((range) => range === "whole")).toHaveLength(1);
  },
  TEST_MS,
);

tested(
  "a start that is under way says when it is given up",
  async () => {
    await fleet.waitFor("it to start", async () =>
      (await fleet.replicas()).some((each) => each.model === "slow" && each.state === "starting"),
    );
    expect((await fleet.must("ctl", "why", "model/slow")).out).toMatch(
      /is starting for .*\n.*loading.*\n +given up, unless it gets on, in 1\d?m/,
    );
  },
  TEST_MS,
);

async function refusal(model: string) {
  return fleet.waitFor(`${model} to be refused`, async () => {
    const replica = (await fleet.replicas()).find((each) => each.model === model);
    return replica?.state === "pending" && replica.refusals.find(({ available }) => !available.includes("just looking"));
  });
}

tested(
  "a context that no node can hold is refused with numbers, not tried",
  async () => {
    expect(await refusal("wide")).toMatchObject({ node: "n1", filter: "memory", needed: expect.stringMatching(/^\d+\.\d GiB of memory$/) });
  },
  TEST_MS,
);

tested(
  "weights that no node has are said to be missing, and found by themselves once they are there",
  async () => {
    expect(await refusal("nowhere")).toMatchObject({
      filter: "weights",
      needed: join(folder, "nowhere.gguf"),
      available: expect.stringContaining("ENOENT"),
    });
    await writeTinyGguf(join(folder, "nowhere.gguf"));
    await fleet.ready("nowhere");
  },
  TEST_MS,
);
