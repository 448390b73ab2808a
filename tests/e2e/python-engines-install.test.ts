// vLLM and SGLang are installed by Python's own venv and pip from an index on loopback; what is in it is of our own making.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdir, mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EngineList } from "../../src/protocol/admin-api.ts";
import { parseAs } from "../../src/protocol/errors.ts";
import { sglangHelp, vllmHelp } from "../fixtures/help-texts.ts";
import { PackageIndex } from "../fixtures/package-site.ts";
import { Fleet } from "./fleet.ts";

const TEST_MS = 240_000;
const hasVenv = (await Bun.spawn(["python3", "-c", "import venv, ensurepip"], { stdout: "ignore", stderr: "ignore" }).exited) === 0;
// It needs Python 3 with venv.
const tested = test.skipIf(!hasVenv);
let folder = "";
let index: PackageIndex;
let web: Bun.Server<undefined>;
let fleet: Fleet;
let key = "";

beforeAll(async () => {
  if (!hasVenv) return;
  folder = await mkdtemp(join(tmpdir(), "llmgw-pi-"));
  index = await PackageIndex.open();
  await index.torch("1.0", 1);
  await index.torch("2.0", 0);
  await index.vllm("1.0.0", vllmHelp());
  await index.sglang("1.0.0", sglangHelp());
  web = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => index.answer(new URL(request.url).pathname) ?? new Response("no", { status: 404 }),
  });
  const smi = join(folder, "smi");
  await writeFile(smi, "#!/bin/sh\necho '0, GPU-n1, 00000000:01:00.0, NVIDIA H100, 580.95, 81559, 4, Disabled'\n");
  await chmod(smi, 0o755);
  await mkdir(join(folder, "model"));
  await writeFile(join(folder, "model", "config.json"), "{}");
  fleet = await Fleet.start({ nodes: 1, engines: named("1.0.0", "1.0.0"), agent: { nvidia_smi: smi } });
  await fleet.serve([{ name: "m", engine: "vllm", source: join(folder, "model"), gpus: 1, replicas: 1 }]);
}, TEST_MS);
afterAll(async () => {
  await fleet?.stop();
  await web?.stop(true);
  await index?.close();
  if (folder) await rm(folder, { recursive: true, force: true });
});

const named = (vllm: string, sglang = "") => ({ vllm, sglang, mirror: `http://127.0.0.1:${web.port}` });
const engine = async (kind: string) =>
  parseAs(EngineList, await fleet.ctl("engines"), "the engines").items.find((each) => each.engine === kind);
const inUse = (kind: string, version: string) =>
  fleet.waitFor(
    `${kind} ${version} to be used`,
    async () => {
      const seen = await engine(kind);
      return seen?.version === version && seen.state === "installed" && seen;
    },
    120_000,
  );
async function answer(): Promise<string> {
  const response = await fetch(`${fleet.gateway}/v1/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify({ model: "m", messages: [{ role: "user", content: "hello" }] }),
  });
  return response.text();
}

tested(
  "both are installed, each in an environment of its own, proved, and the model's answers come from there",
  async () => {
    expect(await inUse("vllm", "1.0.0")).toMatchObject({ origin: "installed", features: ["cuda"] });
    expect(await inUse("sglang", "1.0.0")).toMatchObject({ origin: "installed" });
    await fleet.ready("m");
    key = await fleet.key();
    expect(await answer()).toContain("from vllm 1.0.0");
    expect((await fleet.must("ctl", "engine-check", "vllm", "--node", "n1")).out).toContain("passed");
    expect((await fleet.must("ctl", "engine-check", "sglang", "--node", "n1")).out).toContain("passed");
  },
  TEST_MS,
);

tested.each([
  ["1.1.0", vllmHelp(["--uds"]), {}, /does not take --uds/],
  ["1.2.0", vllmHelp(), { crash: "libcudart.so.13: cannot open shared object file" }, /libcudart\.so\.13/],
  ["1.3.0", vllmHelp(), { torch: "2.0" }, /torch sees no GPU/],
  ["1.4.0", null, {}, /No matching distribution found for vllm==1\.4\.0/],
] as const)(
  "vLLM %s is not used, with the reason, and the one before goes on",
  async (version, help, more, reason) => {
    if (help !== null) await index.vllm(version, help, more);
    await fleet.nameEngines(named(version, "1.0.0"));
    const seen = await fleet.waitFor(
      `${version} to fail`,
      async () => {
        const now = await engine("vllm");
        return now?.wanted === version && now.state === "failed" && now;
      },
      120_000,
    );
    expect(seen.reason).toMatch(reason);
    expect(seen.version).toBe("1.0.0");
    expect(await answer()).toContain("from vllm 1.0.0");
    // What becomes of one engine is nothing to the other.
    expect(await engine("sglang")).toMatchObject({ version: "1.0.0", state: "installed" });
  },
  TEST_MS,
);

tested(
  "an index that is broken is told and asked again; the version comes once it is well, and the replica rolls to it",
  async () => {
    await index.vllm("1.5.0", vllmHelp());
    index.broken = true;
    await fleet.nameEngines(named("1.5.0", "1.0.0"));
    await fleet.waitFor("the failure", async () => (await engine("vllm"))?.state === "failed", 120_000);
    expect((await engine("vllm"))?.next_try_ms).toBeGreaterThan(Date.now() - 1_000);
    index.broken = false;
    await inUse("vllm", "1.5.0");
    // The one GPU is taken: it is moved by hand, as with any other change of a model without room for two.
    const [replica] = await fleet.replicas();
    expect(replica?.state).toBe("ready");
    const waits = async () => (await fleet.replicas()).find(({ state }) => state === "pending");
    const waiting = await fleet.waitFor("the replacement to wait", waits);
    expect(waiting.reason).toContain("keeps serving");
    expect(await answer()).toContain("from vllm 1.0.0");
    await fleet.must("ctl", "scale", "m", "0");
    await fleet.must("ctl", "scale", "m", "1");
    await fleet.waitFor("answers from 1.5.0", async () => (await answer()).includes("from vllm 1.5.0"), 60_000);
    const folders = () => readdir(join(fleet.folder, "n1", "state", "engines", "vllm"));
    await fleet.waitFor("old versions to be removed", async () => (await folders()).join() === "1.5.0", 60_000);
  },
  TEST_MS,
);
