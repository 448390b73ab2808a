// What becomes of a node's engines when the machine changes under them: a node looks again by itself.
import { afterAll, afterEach, beforeAll, expect, setSystemTime, test } from "bun:test";
import { chmod, mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NodeEngines } from "../../../src/agent/node-engines.ts";
import { makeLog } from "../../../src/os/log.ts";
import { isAlive } from "../../../src/os/process.ts";
import { AgentConfig } from "../../../src/protocol/config.ts";
import { parseAs } from "../../../src/protocol/errors.ts";
import type { Gpu, Inventory } from "../../../src/protocol/inventory.ts";
import { ENGINE_PROVE_AGAIN_MS } from "../../../src/protocol/limits.ts";
import { until } from "../shim/rank-for-tests.ts";

let folder = "";
const path_before = process.env["PATH"];
const stop = new AbortController();
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-ne-"));
});
afterEach(() => {
  setSystemTime();
  process.env["PATH"] = path_before;
});
afterAll(async () => {
  stop.abort();
  await rm(folder, { recursive: true, force: true });
});

async function nodeWith(config: Record<string, unknown>, machine: () => Pick<Inventory, "host" | "gpus">) {
  const state = await mkdtemp(join(folder, "state-"));
  await mkdir(join(state, "agent"));
  const given = { servers: ["https://127.0.0.1:1"], address: "127.0.0.1", state, ...config };
  const engines = new NodeEngines({
    config: parseAs(AgentConfig, given, "the test's configuration"),
    engine_user: null,
    log: makeLog({ level: "error", format: "text", write: () => {} }),
    signal: stop.signal,
    machine,
    running: () => new Set(),
    changed: () => {},
  });
  await engines.open();
  return engines;
}

const host = { arch: "x64" } as Inventory["host"];
const plain = () => ({ host, gpus: [] });
const offer = (engines: NodeEngines) => engines.offers().find(({ kind }) => kind === "llamacpp");

test("an engine named by path is found when it comes, withdrawn when it may no longer be run, and taken back", async () => {
  const program = join(await mkdtemp(join(folder, "bin-")), "llama-server");
  const engines = await nodeWith({ llamacpp_bin: program }, plain);
  expect(offer(engines)).toMatchObject({ offered: false, reason: expect.stringContaining("ENOENT") });
  await writeFile(program, "#!/bin/sh\necho 'version: 7 (abc)'\n", { mode: 0o755 });
  const seen = (what: string, offered: boolean) =>
    until(what, async () => {
      await engines.tidy();
      const now = offer(engines);
      return now?.offered === offered && now;
    });
  expect(await seen("it to be found", true)).toMatchObject({ version: "7" });
  // Root may do much, but not run this.
  await chmod(program, 0o644);
  expect((await seen("it to be withdrawn", false)).reason).toContain("EACCES");
  await chmod(program, 0o755);
  await seen("it to be taken back", true);
});

test("an engine named by path that lacks something is asked again, but not all the time", async () => {
  const bin = await mkdtemp(join(folder, "bin-"));
  const program = join(bin, "llama-server");
  const lines = [
    "#!/bin/sh",
    `echo x >> ${bin}/asked`,
    `[ -e ${bin}/driver ] || { echo no driver; exit 1; }`,
    "echo 'version: 7 (abc)'",
    "",
  ];
  await writeFile(program, lines.join("\n"), { mode: 0o755 });
  const asked = async () => (await readFile(join(bin, "asked"), "utf8")).length;
  const engines = await nodeWith({ llamacpp_bin: program }, plain);
  expect(offer(engines)).toMatchObject({ offered: false, reason: expect.stringContaining("no driver") });
  await writeFile(join(bin, "driver"), "");
  const before = await asked();
  await engines.tidy();
  expect(await asked()).toBe(before);
  setSystemTime(new Date(Date.now() + ENGINE_PROVE_AGAIN_MS));
  await engines.tidy();
  expect(await asked()).toBeGreaterThan(before);
  expect(offer(engines)).toMatchObject({ offered: true });
});

test("a machine whose GPUs are seen later is no longer unsuited", async () => {
  const gpus: Gpu[] = [];
  const engines = await nodeWith({}, () => ({ host, gpus }));
  engines.want([{ kind: "vllm", version: "1", recipe: null, reason: "being looked up" }]);
  await until("it to be unsuited", () => engines.installs()[0]?.phase === "unsuited");
  await engines.tidy();
  expect(engines.installs()[0]?.phase).toBe("unsuited");
  gpus.push({ name: "H100", driver: { value: "580.95" }, compute_capability: { value: "9.0" } } as Gpu);
  await engines.tidy();
  await until("it to be wanted", () => engines.installs()[0]?.phase === "waiting");
});

test("of two installations of one version the first ends before the second begins", async () => {
  const bin = await mkdtemp(join(folder, "bin-"));
  // Each says which it is, and whether it met another at work.
  await writeFile(join(bin, "python3"), `#!/bin/sh\necho $$ >> ${bin}/pids\nexec sleep 600\n`, { mode: 0o755 });
  process.env["PATH"] = `${bin}:${path_before}`;
  const gpus = [{ name: "H100", driver: { value: "580.95" }, compute_capability: { value: "9.0" } } as Gpu];
  const engines = await nodeWith({}, () => ({ host, gpus }));
  const want = (index: string) =>
    engines.want([{ kind: "vllm", version: "1", recipe: { how: "packages", requirements: ["vllm==1"], index, uv: [] }, reason: "" }]);
  const pids = async () => (await readFile(join(bin, "pids"), "utf8").catch(() => "")).trim().split("\n").filter(Boolean).map(Number);
  want("http://127.0.0.1/a/");
  const first = await until("the first", async () => (await pids())[0] ?? null);
  want("http://127.0.0.1/b/");
  await until("the second", async () => (await pids())[1] ?? null);
  expect(isAlive(first)).toBe(false);
  engines.want([]);
});
