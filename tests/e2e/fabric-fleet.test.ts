// A whole fleet of the compiled binary on stand-ins: a script as nvidia-smi, folders as InfiniBand, a script as saquery.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { binary } from "../../release/fresh.ts";
import { demoCertificates } from "../../src/cli/demo/certificates.ts";
import { FabricList, NodeList, ReplicaList, StatusView } from "../../src/protocol/admin-api.ts";
import { ibTree } from "../fixtures/hardware/ib-tree.ts";

const READY_MS = 30_000;
const CIRCUMSTANCES = { now_ms: Date.now(), random: (count: number) => crypto.getRandomValues(new Uint8Array(count)) };
const NODES = [
  { id: "n1", address: "127.0.0.11", manager: "0xb1" },
  { id: "n2", address: "127.0.0.12", manager: "0xb1" },
  { id: "n3", address: "127.0.0.13", manager: "0xc1" },
  { id: "n4", address: "127.0.0.14", manager: "0xb1" },
  { id: "n5", address: "127.0.0.15", manager: "0xb1" },
];

let root = "";
let gateway_url = "";
const children: Bun.Subprocess[] = [];
const trees: (() => Promise<void>)[] = [];

async function script(path: string, ...lines: string[]): Promise<string> {
  await writeFile(path, ["#!/bin/sh", ...lines, ""].join("\n"));
  await chmod(path, 0o755);
  return path;
}

function start(name: string, words: readonly string[], path = process.env["PATH"] ?? ""): void {
  const log = Bun.file(join(root, `${name}.log`));
  const argv = [binary, ...words, "--owner-pid", String(process.pid)];
  children.push(Bun.spawn(argv, { env: { ...process.env, PATH: path }, stdin: "ignore", stdout: log, stderr: log }));
}

async function ctl(...words: string[]): Promise<{ out: string; err: string }> {
  const env = { ...process.env, LLMGW_CONFIG: join(root, "contexts.yaml") };
  const child = Bun.spawn([binary, "ctl", ...words], { env, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { out, err };
}

async function ask<S extends v.GenericSchema>(schema: S, ...words: string[]): Promise<v.InferOutput<S>> {
  return v.parse(schema, JSON.parse((await ctl(...words, "-o", "json")).out));
}

async function until(condition: () => Promise<boolean>): Promise<void> {
  const end = performance.now() + READY_MS;
  while (!(await condition().catch(() => false))) {
    if (performance.now() > end) throw new Error("it did not come about");
    await Bun.sleep(200);
  }
}

async function startNode({ id, address, manager }: (typeof NODES)[number], server: string): Promise<void> {
  const folder = join(root, "nodes", id);
  const bin = join(folder, "bin");
  await mkdir(bin, { recursive: true });
  const tree = await ibTree([{ name: "mlx5_2" }, { name: "mlx5_3" }]);
  trees.push(tree.remove);
  const smi = await script(join(bin, "smi"), `echo '0, GPU-${id}, 00000000:01:00.0, NVIDIA H100, 580.95, 81559, 4, Disabled'`);
  await script(join(bin, "saquery"), `printf 'SMInfoRecord dump:\\n GUID....${manager}\\n Priority....5\\n SMState....3\\n'`);
  const tls = ["ca.crt", "node.crt", "node.key"].flatMap((name, at) => [
    ["--tls-ca", "--tls-cert", "--tls-key"][at] ?? "",
    join(folder, "tls", name),
  ]);
  const folders = ["--state", join(folder, "s"), "--run", join(root, id)];
  const hardware = ["--nvidia-smi", smi, "--ib-root", tree.root, "--fabric", "ib:mlx5_2,mlx5_3"];
  start(
    id,
    ["agent", "--node", id, "--server", server, "--address", address, ...tls, ...folders, ...hardware],
    `${bin}:${process.env["PATH"]}`,
  );
}

beforeAll(async () => {
  root = await mkdtemp(join(tmpdir(), "llmgw-ff-"));
  await demoCertificates(root, NODES, CIRCUMSTANCES);
  const [control, gateway] = [0, 1].map(() => {
    const probe = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
    const { port } = probe;
    probe.stop(true);
    return port;
  });
  const config = join(root, "server", "server.yaml");
  const listen = `listen: { control: "127.0.0.1:${control}", gateway: "127.0.0.1:${gateway}" }`;
  await writeFile(
    config,
    [listen, 'engines: { llamacpp: "", vllm: "" }', `state: ${join(root, "state")}`, `run: ${join(root, "run")}`, ""].join("\n"),
  );
  await writeFile(join(root, "server", "catalog.yaml"), "models: []\n");
  const server = `https://127.0.0.1:${control}`;
  gateway_url = `http://127.0.0.1:${gateway}`;
  start("server", ["server", "--config", config]);
  const admin = ["--ca", join(root, "ctl/ca.crt"), "--cert", join(root, "ctl/admin.crt"), "--key", join(root, "ctl/admin.key")];
  await ctl("context", "add", "test", "--server", server, ...admin);
  await until(async () => (await ask(StatusView, "status")).nodes.ready === 0);
  // The islands of one name are numbered in the order in which they were seen.
  await Promise.all(NODES.filter(({ manager }) => manager === "0xb1").map((node) => startNode(node, server)));
  await until(async () => (await ask(FabricList, "fabrics")).items[0]?.nodes.length === 4);
  await Promise.all(NODES.filter(({ manager }) => manager !== "0xb1").map((node) => startNode(node, server)));
}, READY_MS * 2);

afterAll(async () => {
  for (const child of children.toReversed()) child.kill("SIGTERM");
  await Promise.all(children.map((child) => child.exited));
  for (const remove of trees) await remove();
  await rm(root, { recursive: true, force: true });
}, READY_MS);

test(
  "one name on two fabrics: islands, a warning everywhere, and what each node has",
  async () => {
    const islands = async () =>
      Object.fromEntries((await ask(FabricList, "fabrics")).items.map(({ name, nodes }) => [name, nodes.join(" ")]));
    await until(async () => Bun.deepEquals(await islands(), { "ib#1": "n1 n2 n4 n5", "ib#2": "n3" }));
    const { items } = await ask(NodeList, "nodes");
    const placed = items.map(({ id, island, fabrics }) => `${id} ${island} ${fabrics.join()}`);
    expect(placed).toEqual(["n1 ib#1 ib", "n2 ib#1 ib", "n3 ib#2 ib", "n4 ib#1 ib", "n5 ib#1 ib"]);
    const gpus = items.map(({ inventory }) => inventory.gpus.map((gpu) => gpu.uuid).join());
    expect(gpus).toEqual(["GPU-n1", "GPU-n2", "GPU-n3", "GPU-n4", "GPU-n5"]);
    expect((await ask(StatusView, "status")).warnings.map(({ code }) => code)).toContain("fabric-split");
    expect((await ctl("fabrics")).err).toMatch(/fabric\/ib: ib is 2 fabrics: \{n1, n2, n4, n5\} and \{n3\}/);
    await until(async () => (await ask(NodeList, "nodes")).items.every(({ inventory }) => inventory.doctor !== undefined));
    const { out } = await ctl("node", "show", "n3");
    expect(out).toMatch(/port mlx5_2:1 +ib, ACTIVE, 400 Gb\/s, subnet managers 0x00000000000000c1/);
    expect(out).toMatch(/doctor +\d+ passed/);
  },
  READY_MS * 2,
);

const replica = async (model: string) => (await ask(ReplicaList, "replicas")).items.find((each) => each.model === model);
const ready = async (model: string) => {
  const seen = await replica(model);
  return seen?.state === "ready" && seen.ranks.every(({ engine_pid }) => engine_pid !== null) ? seen : null;
};
let key = "";
const question = (model: string) => {
  const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "hello" }], max_tokens: 3 });
  return fetch(`${gateway_url}/v1/chat/completions`, { method: "POST", headers, body });
};

async function serve(...entries: string[]): Promise<void> {
  await writeFile(join(root, "server", "catalog.yaml"), `${["models:", ...entries.map((entry) => `  - ${entry}`)].join("\n")}\n`);
  await ctl("reload");
}

test.each([2, 4])(
  "a gang of %d runs on nodes of one fabric with that fabric's adapters, and a lost rank brings all of it back",
  async (ranks) => {
    const model = `gang-of-${ranks}`;
    await serve(`{ name: ${model}, engine: sim, nodes: ${ranks}, args: { load-ms: 50 } }`, "{ name: too-wide, engine: sim, nodes: 5 }");
    await until(async () => (await ready(model)) !== null);
    const first = await replica(model);
    const nodes = first?.ranks.map(({ node }) => node) ?? [];
    expect(new Set(nodes).size).toBe(ranks);
    expect(nodes).not.toContain("n3");
    for (const { engine_pid, node } of first?.ranks ?? []) {
      const environment = (await Bun.file(`/proc/${engine_pid}/environ`).text()).split("\0");
      expect(environment).toContain("NCCL_IB_HCA==mlx5_2:1,mlx5_3:1");
      expect(environment).toContain(`VLLM_HOST_IP=${NODES.find(({ id }) => id === node)?.address}`);
      expect(environment).toContain("NCCL_SOCKET_IFNAME==lo");
    }
    key ||= (await ctl("key", "create", "gang")).out.trim();
    await until(async () => (await question(model)).status === 200);
    const last = first?.ranks.find(({ rank }) => rank === ranks - 1)?.engine_pid ?? 0;
    process.kill(last, "SIGKILL");
    await until(async () => (await ready(model)) !== null && (await replica(model))?.ranks[0]?.attempt !== first?.ranks[0]?.attempt);
    const attempts = (await replica(model))?.ranks.map(({ attempt }) => attempt) ?? [];
    expect(first?.ranks.some(({ attempt }) => attempts.includes(attempt))).toBe(false);
    await until(async () => (await question(model)).status === 200);
    const wide = await replica("too-wide");
    expect(wide?.state).toBe("pending");
    expect(wide?.reason).toMatch(/no fabric has 5 nodes with room: ib#1 has 4 of 4, ib#2 has 1 of 1/);
    expect(wide?.refusals.map(({ node, filter }) => `${node} ${filter}`)).toEqual(NODES.map(({ id }) => `${id} island`));
  },
  READY_MS * 3,
);
