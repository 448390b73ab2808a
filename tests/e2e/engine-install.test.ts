// A node installs the llama.cpp the server names, proves it, uses it, and keeps the one it has when the next is no good.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EngineList } from "../../src/protocol/admin-api.ts";
import { parseAs } from "../../src/protocol/errors.ts";
import { llamaServer } from "../fixtures/llama-server.ts";
import { ReleaseSite } from "../fixtures/release-site.ts";
import { writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { Fleet } from "./fleet.ts";
import { streamChat } from "./stream.ts";

const TEST_MS = 180_000;
const program = await llamaServer();
// It needs a llama-server from Debian's archive.
const tested = test.skipIf(program === null);
let folder = "";
let site: ReleaseSite;
let fleet: Fleet;
let key = "";

beforeAll(async () => {
  if (program === null) return;
  folder = await mkdtemp(join(tmpdir(), "llmgw-ei-"));
  site = await ReleaseSite.open(program);
  await site.add("b1", "cut");
  await writeTinyGguf(join(folder, "m.gguf"));
  fleet = await Fleet.start({ nodes: 1, engines: { llamacpp: "b1", mirror: site.url } });
  await fleet.serve([{ name: "m", engine: "llamacpp", source: join(folder, "m.gguf"), context: 512 }]);
}, TEST_MS);
afterAll(async () => {
  await fleet?.stop();
  await site?.close();
  if (folder) await rm(folder, { recursive: true, force: true });
});

const engine = async () => parseAs(EngineList, await fleet.ctl("engines"), "the engines").items.find((each) => each.engine === "llamacpp");
const versions = () => readdir(join(fleet.folder, "n1", "state", "engines", "llamacpp"));
/** The version's folder that the model's engine runs from. */
const runsFrom = async () => {
  const [pid] = await fleet.enginePids("m");
  const maps = await Bun.file(`/proc/${pid}/maps`).text();
  return /engines\/llamacpp\/([^/]+)\//.exec(maps)?.[1];
};

tested(
  "a download that is cut is gone on with; the engine is proved, offered and used",
  async () => {
    const seen = await fleet.waitFor(
      "b1 to be used",
      async () => {
        const now = await engine();
        return now?.version === "b1" && now.state === "installed" && now;
      },
      120_000,
    );
    expect(seen).toMatchObject({ origin: "installed", wanted: "b1", reason: "" });
    expect(site.asked.some((path) => /^\/blobs\/b1 bytes=\d+-$/.test(path))).toBe(true);
    await fleet.ready("m");
    key = await fleet.key();
    expect((await streamChat(fleet, key, "m", 5).end).done).toBe(true);
    expect(await runsFrom()).toBe("b1");
    expect((await fleet.must("ctl", "engine-check", "llamacpp", "--node", "n1")).out).toContain("passed");
  },
  TEST_MS,
);

tested.each([
  ["b2", { refuses: "--metrics" }, "none", /does not take.*--metrics/],
  ["b3", { broken: "error while loading shared libraries: libfoo.so" }, "none", /loading shared libraries: libfoo/],
  ["b4", {}, "wrong-digest", /its sha256 is [0-9a-f]+/],
  ["b5", {}, "missing", /answered 404/],
  ["b6", { links: { "out.so": "/etc/passwd" } }, "none", /the link .*out.so leads to \/etc\/passwd/],
  ["b7", { links: { "gone.so": "nothing.so" } }, "none", /the link .*gone.so leads to nothing.so/],
] as const)(
  "%s is not used, with the reason; the one before stays and its engine runs on",
  async (version, extras, trouble, reason) => {
    const before = await fleet.enginePids("m");
    await site.add(version, trouble, extras);
    await fleet.nameEngines({ llamacpp: version, mirror: site.url });
    const seen = await fleet.waitFor(
      `${version} to fail`,
      async () => {
        const now = await engine();
        return now?.wanted === version && now.state === "failed" && now;
      },
      60_000,
    );
    expect(seen.reason).toMatch(reason);
    expect(seen).toMatchObject({ version: "b1", origin: "installed" });
    const warning = (await fleet.status()).warnings.find(({ code }) => code === "engine-install-failed");
    expect(warning?.subject).toBe("node/n1");
    expect(warning?.text).toMatch(reason);
    expect(warning?.text).toContain("b1 stays in use");
    expect(await fleet.enginePids("m")).toEqual(before);
    expect((await streamChat(fleet, key, "m", 3).end).done).toBe(true);
  },
  TEST_MS,
);

tested(
  "a version nobody knows, too many questions, and a list too large for the disk are said as what they are",
  async () => {
    await fleet.nameEngines({ llamacpp: "b404", mirror: site.url });
    const warned = async (words: RegExp) => {
      const { warnings } = await fleet.status();
      return warnings.some(({ code, text }) => code.startsWith("engine-") && words.test(text));
    };
    await fleet.waitFor("the unknown version", () => warned(/b404: cannot find out how it is installed: .*404: it knows no such version/));
    await site.add("b403", "limited");
    await fleet.nameEngines({ llamacpp: "b403", mirror: site.url });
    await fleet.waitFor("the limit", () => warned(/403: too many questions from this address, until 2030-/));
    await site.add("b507", "none", {}, 2 ** 50);
    await fleet.nameEngines({ llamacpp: "b507", mirror: site.url });
    await fleet.waitFor("the full disk", () => warned(/it needs \d+ MiB in .*engines, and \d+ are free|it needs \d+ MiB/));
    expect(await engine()).toMatchObject({ version: "b1", state: "failed" });
  },
  TEST_MS,
);

tested(
  "a good version is rolled out replica by replica, and what nothing uses any more goes",
  async () => {
    const [old] = await fleet.enginePids("m");
    await site.add("b8", "slow");
    await fleet.nameEngines({ llamacpp: "b8", mirror: site.url });
    let answered = 0;
    await fleet.waitFor(
      "the model to run on b8",
      async () => {
        // Nobody is without an answer meanwhile.
        expect((await streamChat(fleet, key, "m", 3).end).done).toBe(true);
        answered += 1;
        return (await fleet.replicas()).length === 1 && (await runsFrom()) === "b8";
      },
      120_000,
    );
    expect(answered).toBeGreaterThan(1);
    expect(await fleet.enginePids("m")).not.toContain(old as number);
    expect((await fleet.events()).some(({ text }) => text.includes("llamacpp of n1 is b8 now, and it was started with b1"))).toBe(true);
    await fleet.waitFor("old versions to be removed", async () => (await versions()).join() === "b8", 60_000);
  },
  TEST_MS,
);

tested(
  "an engine whose files were lost is installed again, and what it served comes back",
  async () => {
    const [old = 0] = await fleet.enginePids("m");
    await rm(join(fleet.folder, "n1", "state", "engines", "llamacpp"), { recursive: true });
    process.kill(old, "SIGKILL");
    const back = await fleet.waitFor(
      "the model to be back",
      async () => {
        const [pid] = await fleet.enginePids("m");
        return pid !== old && pid;
      },
      120_000,
    );
    await fleet.ready("m");
    expect(await fleet.enginePids("m")).toEqual([back]);
    expect(await runsFrom()).toBe("b8");
    expect(await engine()).toMatchObject({ version: "b8", state: "installed" });
    expect(await fleet.log("n1")).toContain("an engine is not the file that it was");
  },
  TEST_MS,
);

tested(
  "an agent that is killed while it fetches a version goes on with it, and its engine serves on",
  async () => {
    const serving = await fleet.enginePids("m");
    await site.add("b9", "slow");
    await fleet.nameEngines({ llamacpp: "b9", mirror: site.url });
    await fleet.waitFor("it to be fetched", async () => (await engine())?.state === "fetching");
    await fleet.signal("n1", "SIGKILL");
    expect(await fleet.enginePids("m")).toEqual(serving);
    fleet.startAgent("n1");
    await fleet.waitFor("the model to run on b9", async () => (await runsFrom()) === "b9", 120_000);
    await fleet.ready("m");
    await fleet.waitFor("b8 to be removed", async () => (await versions()).join() === "b9", 60_000);
  },
  TEST_MS,
);

tested(
  "an agent that starts without a server offers what it used before, and with no version named nothing is offered",
  async () => {
    await fleet.signal("server", "SIGKILL");
    await fleet.signal("n1", "SIGTERM");
    fleet.startAgent("n1");
    fleet.startServer();
    await fleet.waitFor("the node to be back", async () => (await fleet.status()).nodes.ready === 1);
    await fleet.waitFor("its engine", async () => (await engine())?.version === "b9");
    expect(await runsFrom()).toBe("b9");
    await fleet.nameEngines({});
    await fleet.waitFor("it to be withdrawn", async () => (await engine())?.version !== "b9");
    expect(await fleet.enginePids("m")).toHaveLength(1);
  },
  TEST_MS,
);
