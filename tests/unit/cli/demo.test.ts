import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readdir, rm, stat, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import fc from "fast-check";
import { is } from "valibot";
import { diedError, startChild } from "../../../src/cli/demo/child.ts";
import {
  llamaModel,
  openKept,
  remember,
  removeFolders,
  simModel,
  temporaryFolder,
  writeCatalog,
  writeDemo,
} from "../../../src/cli/demo/folder.ts";
import { curlLine } from "../../../src/cli/demo/question.ts";
import { endRanks, TAG } from "../../../src/cli/demo/ranks.ts";
import { readContexts } from "../../../src/cli/context.ts";
import { freePort } from "../../../src/cli/demo/free-port.ts";
import { loadAgentConfig, loadCatalog, loadServerConfig } from "../../../src/os/config-file.ts";
import { loadIdentity } from "../../../src/pki/identity.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import { ModelName } from "../../../src/protocol/ids.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-demo-test-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const circumstances = { now_ms: Date.now(), random: (bytes: number) => crypto.getRandomValues(new Uint8Array(bytes)) };

test.each([
  ["/m/Qwen2.5-0.5B_q4.gguf", "Qwen2.5-0.5B_q4"],
  ["/m/my model (1).GGUF", "my-model-1"],
  ["/m/---.gguf", "model"],
  ["/m/plain", "plain"],
])("the model of %s is %s", (file, name) => {
  expect(llamaModel(file)).toMatchObject({ name, engine: "llamacpp", source: file, replicas: 1 });
});

test("any file gives a model a name that is one", () => {
  fc.assert(fc.property(fc.string({ unit: "grapheme" }), (name) => is(ModelName, llamaModel(`/m/${name}.gguf`).name)));
});

test("the curl line survives a shell, whatever the question", () => {
  for (const text of ['it\'s "so"', "a $HOME `b` \\ c", "two\nlines"]) {
    const line = curlLine({ endpoint: "http://127.0.0.1:1", key: "k", model: "m", text });
    const shown = Bun.spawnSync(["bash", "-c", `curl() { printf '%s\\0' "$@"; }; ${line}`])
      .stdout.toString()
      .split("\0");
    expect(JSON.parse(shown.at(-2) ?? "")).toMatchObject({ model: "m", messages: [{ role: "user", content: text }] });
  }
});

test("what a demo writes is what server, agents and ctl read", async () => {
  const root = join(folder, "written");
  await openKept(root);
  const catalog = { models: [simModel(2)] };
  const common = {
    root,
    run: join(folder, "r"),
    nodes: 2,
    gateway_port: 1111,
    control_port: 2222,
    circumstances,
    llama_server: "/bin/true",
  };
  const demo = await writeDemo({ ...common, key: undefined });
  await writeCatalog(root, catalog);
  const server = await loadServerConfig(demo.server_config);
  expect(server.listen).toEqual({ control: "127.0.0.1:2222", gateway: "127.0.0.1:1111" });
  expect(await loadCatalog(server.catalog)).toEqual(catalog);
  expect(await loadIdentity(server.tls)).toMatchObject({ role: "server" });
  expect(await loadIdentity({ ca: server.tls.ca, ...server.gateway.identity })).toMatchObject({ role: "gateway" });
  for (const { id, address, config } of demo.nodes) {
    const agent = await loadAgentConfig(config, {}, "/");
    expect(agent).toMatchObject({ node: id, address, servers: ["https://127.0.0.1:2222"], llamacpp_bin: "/bin/true" });
    expect(await loadIdentity(agent.tls)).toMatchObject({ role: "node", name: id });
  }
  expect(Object.keys((await readContexts(demo.ctl_config)).contexts)).toEqual(["demo"]);
  const first = await loadIdentity(server.tls);
  const again = await writeDemo({ ...common, key: "kept" });
  expect((await loadIdentity((await loadServerConfig(again.server_config)).tls)).ca).toBe(first.ca);
  for (const file of await readdir(root, { recursive: true })) {
    if (file.endsWith(".key")) expect((await stat(join(root, file))).mode & 0o777).toBe(0o600);
  }
});

test("a kept folder is taken up again, but not while a demo runs in it, nor when it is something else", async () => {
  const kept = join(folder, "kept");
  expect(await openKept(kept)).toBeNull();
  const memory = { gateway_port: 1, control_port: 2, key: "k" };
  await remember(kept, memory);
  expect(await openKept(kept).catch((error: OperatorError) => error.why)).toBe(`a demo runs in it (process ${process.pid})`);
  const text = await Bun.file(join(kept, "demo.yaml")).text();
  await writeFile(join(kept, "demo.yaml"), text.replace(/start_ticks: \d+/, "start_ticks: 1"));
  expect(await openKept(kept)).toMatchObject(memory);
  const foreign = join(folder, "foreign");
  await Bun.write(join(foreign, "mine"), "");
  expect(await openKept(foreign).catch((error: OperatorError) => error.code)).toBe("E_EXISTS");
});

test("a taken port is told, and any free one found", async () => {
  const port = await freePort(0);
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(port, "127.0.0.1", resolve));
  expect(await freePort(port).catch((error: OperatorError) => error.code)).toBe("E_EXISTS");
  server.close();
});

test("a child that ends at once is told by its last lines and its own code", async () => {
  const log = join(folder, "child.log");
  const child = await startChild({ name: "server", argv: ["/bin/sh", "-c", "echo 'llmgw: no (E_CONFIG)' >&2; exit 2"], log, env: {} });
  const error = await diedError(child, await child.ended, true);
  expect({ code: error.code, what: error.message, remedy: error.remedy }).toEqual({
    code: "E_CONFIG",
    what: "the server ended (exit code 2)",
    remedy: `see ${log}`,
  });
  expect(error.why).toContain("llmgw: no (E_CONFIG)");
  const missing = startChild({ name: "agent", argv: ["/no/such"], log, env: {} }).catch((thrown: OperatorError) => thrown.message);
  expect(await missing).toBe("cannot start the agent");
});

test("what carries the tag is ended, also what ignores SIGTERM and what moved to another session", async () => {
  const run = await temporaryFolder("llmgw-tag-");
  const env = { [TAG]: run, PATH: process.env["PATH"] };
  const log = join(run, "log");
  const soft = await startChild({ name: "soft", argv: ["sleep", "60"], log, env });
  const hard = await startChild({ name: "hard", argv: ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 60; done"], log, env });
  const other = await startChild({ name: "other", argv: ["sleep", "60"], log, env: { PATH: process.env["PATH"] } });
  while (!(await Bun.file(log).text()).includes("up")) await Bun.sleep(5);
  await endRanks(run);
  expect(await Promise.all([soft.ended, hard.ended])).toEqual(["signal SIGTERM", "signal SIGKILL"]);
  expect(await Promise.race([other.ended, Bun.sleep(50).then(() => "alive")])).toBe("alive");
  await other.stop();
  await removeFolders(run);
}, 20_000);
