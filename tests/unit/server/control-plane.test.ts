// The control plane over real mutual TLS, with agents that speak by hand.
import { afterEach, beforeEach, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { ControlPlane, refusal, until } from "./control-plane-for-tests.ts";

let plane: ControlPlane;
beforeEach(async () => {
  plane = await ControlPlane.make([{ name: "m", engine: "sim" }]);
  await plane.start();
});
afterEach(() => plane.end());

const targets = (model = "m") => plane.snapshot?.routes.find((route) => route.model === model)?.targets ?? [];
const kinds = async () => (await plane.items("events?limit=1000")).map(({ kind }) => kind as string);

/** An agent that has joined and runs what it was given. */
async function runningAgent(id = "a") {
  const agent = await plane.agent(id);
  await agent.join();
  const [launch] = (await agent.plan((ranks) => ranks.length === 1)) as [RankLaunch];
  agent.rank(launch, "ready");
  await agent.report();
  await until("a target", () => targets().length === 1);
  return { agent, launch };
}

test("a node joins, is given a replica, reports it ready, and the gateway is told where it is", async () => {
  const { launch } = await runningAgent();
  expect(launch).toMatchObject({ model: "m", engine: "sim", rank: 0, ranks: 1, door: { address: "127.0.0.2", port: 20_000 } });
  expect(targets()).toEqual([
    { replica: launch.replica, attempt: launch.attempt, node: "a", address: "127.0.0.2", port: 20_000, state: "ready" },
  ]);
  expect(await plane.items("nodes")).toMatchObject([{ id: "a", state: "ready", address: "127.0.0.2", replicas: [launch.replica] }]);
  expect(await plane.items("replicas")).toMatchObject([{ id: launch.replica, state: "ready", ranks: [{ node: "a", engine_pid: 42 }] }]);
  expect(await plane.items("models")).toMatchObject([{ name: "m", wanted: 1, ready: 1, reason: "" }]);
  expect(await kinds()).toEqual(expect.arrayContaining(["node-joined", "replica-created", "replica-placed", "replica-ready"]));
});

test("a held poll is answered as soon as the plan changes, and another node's is not", async () => {
  const { agent } = await runningAgent("a");
  const other = await plane.agent("b", { address: "127.0.0.3" });
  await other.join();
  expect(await other.plan()).toEqual([]);
  const stop = new AbortController();
  let woken = "";
  const polls = [agent, other].map((each) =>
    each.poll(stop.signal).then(
      () => (woken += each.id),
      () => "",
    ),
  );
  await plane.setCatalog([
    { name: "m", engine: "sim" },
    { name: "k", engine: "sim", gpus: 1 },
  ]);
  const began = performance.now();
  const { body } = await (await plane.admin())("POST", "reload");
  expect(body).toEqual({ changed: ["catalog"] });
  await Promise.race(polls);
  expect(performance.now() - began).toBeLessThan(2_000);
  expect(woken).toHaveLength(1);
  stop.abort();
  await Promise.all(polls);
});

test("a node with another node's id is refused, and the log names certificate, claim and address", async () => {
  const agent = await plane.agent("a");
  agent.claims = "b";
  expect(await agent.join()).toMatchObject({ status: 403, body: { error: { code: "E_IDENTITY" } } });
  agent.claims = "a";
  expect(await agent.join({ node: "b" })).toMatchObject({ status: 403, body: { error: { code: "E_IDENTITY" } } });
  expect(await plane.items("nodes")).toEqual([]);
  expect(plane.log.find((line) => line.includes("not who it claims"))).toMatch(/certificate=a claimed=b address=\S*127\.0\.0\.1/);
  await until("an event", async () => (await kinds()).includes("node-identity-refused"));
});

test("another machine with a node's certificate is refused, also just after a restart; the same machine takes over", async () => {
  const identity = await plane.authority.identity("node", "a");
  const first = await plane.agent("a", { identity });
  await first.join();
  const copy = await plane.agent("a", { identity, machine: "another" });
  expect(await copy.join()).toMatchObject({ status: 409, body: { error: { code: "E_DUPLICATE_NODE" } } });
  expect(plane.log.some((line) => line.includes("second machine") && line.includes("first="))).toBe(true);
  await plane.stop();
  await plane.start();
  expect(await copy.join()).toMatchObject({ status: 409, body: { error: { code: "E_DUPLICATE_NODE" } } });
  expect(await first.join()).toMatchObject({ status: 200 });
  const restarted = await plane.agent("a", { identity });
  await restarted.join();
  expect(await first.report()).toMatchObject({ status: 409, body: { error: { code: "E_STALE_SESSION" } } });
  expect(await restarted.report()).toMatchObject({ status: 200 });
});

test("a poll of a session that is superseded ends at once", async () => {
  const identity = await plane.authority.identity("node", "a");
  const agent = await plane.agent("a", { identity });
  await agent.join();
  await agent.plan((ranks) => ranks.length === 1);
  const held = agent.post("poll", { session: agent.session, have: agent.have });
  const again = await plane.agent("a", { identity });
  await again.join();
  const began = performance.now();
  expect(await held).toMatchObject({ status: 409, body: { error: { code: "E_STALE_SESSION" } } });
  expect(performance.now() - began).toBeLessThan(2_000);
});

test("a newer certificate makes older ones of that name useless, also after a restart", async () => {
  const old = await plane.agent("a", { identity: await plane.authority.identity("node", "a", {}, Date.now() - 60_000) });
  await old.join();
  const renewed = await plane.agent("a");
  expect((await renewed.join()).status).toBe(200);
  await refusal(old.report());
  await plane.stop();
  await plane.start();
  await refusal(old.join());
  expect((await renewed.join()).status).toBe(200);
});

test("a repeated or overtaken report changes nothing", async () => {
  const { agent, launch } = await runningAgent();
  const { seq } = agent;
  agent.rank(launch, "exited", { at_ms: 1, kind: "died", code: 1, signal: null, reason: "gone", last_lines: [] });
  expect((await agent.report({ seq })).status).toBe(200);
  await Bun.sleep(100);
  expect(await plane.items("replicas")).toMatchObject([{ state: "ready" }]);
  await agent.report();
  await until("the failure", async () => (await plane.items("replicas"))[0]?.failures === 1);
  expect((await plane.items("replicas"))[0]).toMatchObject({ state: "failed", reason: "gone" });
});

test("a server killed and started again knows replicas and keys, and stops no engine", async () => {
  const { agent, launch } = await runningAgent();
  const { body: key } = await (await plane.admin())("POST", "keys", { name: "alice" });
  await plane.stop();
  await plane.start();
  expect(await plane.items("nodes")).toMatchObject([{ id: "a", state: "ready" }]);
  expect((await refusal(agent.poll())).message).toContain("E_STALE_SESSION");
  await agent.join();
  expect((await agent.plan()).map(({ attempt }) => attempt)).toEqual([launch.attempt]);
  await until("the target", () => targets()[0]?.attempt === launch.attempt);
  expect(plane.snapshot?.keys).toMatchObject([{ id: key.id, sha256: createHash("sha256").update(key.key).digest("hex") }]);
});

test("a server that lost its store takes over what runs, under a later epoch", async () => {
  const { agent, launch } = await runningAgent();
  const before = agent.seen;
  await plane.stop();
  await plane.loseStore();
  await plane.start();
  await agent.join();
  expect((await agent.plan()).map(({ attempt }) => attempt)).toEqual([launch.attempt]);
  expect(agent.seen.epoch).toBeGreaterThan(before.epoch);
  expect(await kinds()).toContain("replica-adopted");
  expect(await plane.items("replicas")).toMatchObject([{ id: launch.replica, state: "ready" }]);
});

test("a catalog that is wrong keeps the old one, and says where and why", async () => {
  await runningAgent();
  const admin = await plane.admin();
  await writeFile(join(plane.folder, "catalog.yaml"), "models:\n  - name: m\n    engine: sim\n    repliccas: 2\n");
  const { status, body } = await admin("POST", "reload");
  expect(status).toBe(400);
  expect(body.error).toMatchObject({ code: "E_CONFIG" });
  expect(`${body.error.what} ${body.error.why}`).toContain("catalog.yaml:4:5");
  expect(await plane.items("models")).toMatchObject([{ name: "m", wanted: 1, ready: 1 }]);
  expect((await admin("GET", "status")).body.warnings).toEqual(
    expect.arrayContaining([expect.objectContaining({ code: "config-invalid" })]),
  );
  await plane.setCatalog([{ name: "m", engine: "llamacpp", source: "/x.gguf", args: { port: 1 } }]);
  expect((await admin("POST", "reload")).body.error.why).toContain("args may not set port");
  await plane.setCatalog([{ name: "m", engine: "sim", replicas: 2 }]);
  expect((await admin("POST", "reload")).body).toEqual({ changed: ["catalog"] });
  expect((await admin("GET", "status")).body.warnings.map(({ code }: { code: string }) => code)).not.toContain("config-invalid");
});

test("keys are shown once, kept as digests, and gone from the gateway when revoked", async () => {
  const admin = await plane.admin();
  const { status, body } = await admin("POST", "keys", { name: "alice" });
  expect(status).toBe(201);
  expect(body.key).toMatch(/^llmgw_[0-9a-z]{8}_[0-9A-Za-z]{40}$/);
  await until("the key at the gateway", () => plane.snapshot?.keys.length === 1);
  expect(JSON.stringify([await plane.items("keys"), plane.snapshot, plane.log])).not.toContain(body.key);
  expect((await admin("DELETE", `keys/${body.id}`)).status).toBe(200);
  await until("no key at the gateway", () => plane.snapshot?.keys.length === 0);
  expect(await plane.items("keys")).toMatchObject([{ id: body.id, name: "alice", revoked_ms: expect.any(Number) }]);
  expect(await admin("DELETE", "keys/nobody")).toMatchObject({ status: 404, body: { error: { code: "E_NOT_FOUND" } } });
  expect(await admin("POST", "keys", { name: "" })).toMatchObject({ status: 400, body: { error: { code: "E_BAD_REQUEST" } } });
});

test("a viewer may look and not act, a node has no business with the admin API, an admin none with the agents'", async () => {
  const viewer = await plane.admin("viewer");
  expect((await viewer("GET", "nodes")).status).toBe(200);
  for (const [method, path] of [
    ["POST", "keys"],
    ["DELETE", "keys/x"],
    ["POST", "reload"],
    ["POST", "revoke"],
  ] as const) {
    expect(await viewer(method, path, method === "POST" ? { name: "x" } : undefined)).toMatchObject({
      status: 403,
      body: { error: { code: "E_NOT_ALLOWED" } },
    });
  }
  const agent = await plane.agent("a");
  expect(await agent.post("../../admin/v1/keys", { name: "mine" })).toMatchObject({ status: 403 });
  const admin = await plane.admin();
  expect(await admin("POST", "../../agent/v1/join", {})).toMatchObject({ status: 403, body: { error: { code: "E_NOT_ALLOWED" } } });
  expect(await admin("GET", "nonsense")).toMatchObject({ status: 404, body: { error: { code: "E_NOT_FOUND" } } });
  expect(await plane.items("keys")).toEqual([]);
});

test("a revoked node is out at once and after a restart; one issued later is in; everybody is told", async () => {
  const { agent } = await runningAgent();
  const other = await plane.agent("b");
  await other.join();
  await other.plan();
  const told = other.poll();
  expect((await (await plane.admin())("POST", "revoke", { name: "a" })).status).toBe(200);
  expect((await told).revocations).toMatchObject([{ name: "a" }]);
  await until("the gateway is told", () => plane.snapshot?.revocations[0]?.name === "a");
  await refusal(agent.report());
  const state = async () => (await plane.items("nodes")).find(({ id }) => id === "a")?.["state"];
  expect(await state()).toBe("refused");
  await plane.stop();
  await plane.start();
  await refusal(agent.join());
  expect(await state()).toBe("refused");
  await until("the clock has moved on", () => Date.now() > (plane.snapshot?.revocations[0]?.until_ms ?? 0) + 5);
  const renewed = await plane.agent("a");
  expect((await renewed.join()).status).toBe(200);
  expect(await state()).toBe("ready");
});

test("a log of a replica that is not there, or whose node is away, is an error with a reason", async () => {
  const admin = await plane.admin();
  expect(await admin("GET", "replicas/m-zzzzz/log")).toMatchObject({ status: 404, body: { error: { code: "E_NOT_FOUND" } } });
  const { agent, launch } = await runningAgent();
  // Nothing listens at the door of this test, so the agent is asked; always for a number that it takes.
  for (const [query, lines] of Object.entries({ "2": 2, "-1": 0, x: 0 })) {
    const asked = admin("GET", `replicas/${launch.replica}/log?lines=${query}`);
    for (let i = 0; i < 5; i++) {
      const { requests } = await agent.poll();
      const [request] = requests;
      if (!request) continue;
      expect(request).toMatchObject({ kind: "log", attempt: launch.attempt, lines });
      await agent.post(`results/${request.id}`, { session: agent.session, result: { lines: ["one", "two"] } });
      break;
    }
    expect(await asked).toEqual({ status: 200, body: "one\ntwo\n" });
  }
  await plane.stop();
  await plane.start();
  expect(await admin("GET", `replicas/${launch.replica}/log`)).toMatchObject({ status: 502, body: { error: { code: "E_UNREACHABLE" } } });
});

test("what is no JSON, or not of the schema, or from a far protocol, is refused", async () => {
  const agent = await plane.agent("a");
  expect(await agent.post("join", { node: "a" })).toMatchObject({ status: 400, body: { error: { code: "E_BAD_REQUEST" } } });
  expect(await agent.join({ protocol: 9 })).toMatchObject({ status: 426, body: { error: { code: "E_PROTOCOL" } } });
  expect(await agent.report()).toMatchObject({ status: 409, body: { error: { code: "E_STALE_SESSION" } } });
});

test("a second server on the same state is refused", async () => {
  const { runServer } = await import("../../../src/server/server.ts");
  const { loadServerConfig } = await import("../../../src/os/config-file.ts");
  const { makeLog } = await import("../../../src/os/log.ts");
  const config_file = join(plane.folder, "server.yaml");
  const config = await loadServerConfig(config_file);
  const options = { config_file, config, log: makeLog({ level: "error", format: "text" }), owner_pid: null };
  expect(await refusal(runServer({ ...options, signal: new AbortController().signal }))).toMatchObject({ code: "E_EXISTS" });
});
