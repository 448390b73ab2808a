import { afterEach, describe, expect, test } from "bun:test";
import { connect } from "node:tls";
import { isAlive, processesOf } from "../../../src/os/process.ts";
import { freePort, startRank, until } from "./rank-for-tests.ts";
import type { TestRank } from "./rank-for-tests.ts";

const ranks: TestRank[] = [];
async function rank(...args: Parameters<typeof startRank>): Promise<TestRank> {
  const started = await startRank(...args);
  ranks.push(started);
  return started;
}
afterEach(async () => {
  await Promise.all(ranks.splice(0).map((it) => it.cleanUp()));
});

const CHAT = JSON.stringify({ messages: [{ role: "user", content: "hi" }], max_tokens: 8 });
const STREAM = JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream: true });

describe("a rank with the simulated engine", () => {
  test("becomes ready, answers through its door, stops as told and leaves its exit", async () => {
    const it = await rank();
    const { engine_pid } = await it.reach("ready");
    const answer = await it.ask("/v1/chat/completions", { method: "POST", body: CHAT });
    expect(answer.status).toBe(200);
    expect(((await answer.json()) as { usage: { completion_tokens: number } }).usage.completion_tokens).toBe(8);
    await it.stop();
    await until("the shim to end", () => !isAlive(it.pid));
    expect(isAlive(engine_pid as number)).toBe(false);
    expect((await it.exit()).kind).toBe("stopped");
  });

  test("answers 421 to who means another attempt, 403 to a gateway that wants the log", async () => {
    const it = await rank();
    await it.reach("ready");
    expect((await it.ask("/v1/models", { headers: { "x-llmgw-attempt": "0123456789abcdef" } })).status).toBe(421);
    expect((await it.ask("/llmgw/log")).status).toBe(403);
    const url = `https://127.0.0.1:${it.launch.door.port}/llmgw/log?lines=50`;
    const log = await it.server.request(url, { headers: { "x-llmgw-attempt": it.launch.attempt }, expect: { role: "node", name: "a" } });
    expect(await log.text()).toContain("model demo is loaded");
  });

  test("answers 503 while loading", async () => {
    const it = await rank({ args: { "load-ms": 3000 } });
    await it.reach("starting");
    const answer = await until("the door", () => it.ask("/v1/models").catch(() => null));
    expect(answer.status).toBe(503);
    expect(answer.headers.get("retry-after")).toBe("1");
  });

  test("an engine that dies in a stream cuts it, and leaves code and last lines", async () => {
    const it = await rank({ args: { "crash-after-tokens": 5 } });
    await it.reach("ready");
    const answer = await it.ask("/v1/chat/completions", { method: "POST", body: STREAM });
    const end = await answer.text().then(
      () => "whole",
      () => "broken off",
    );
    expect(end).toBe("broken off");
    await until("the shim to end", () => !isAlive(it.pid));
    const exit = await it.exit();
    expect(exit).toMatchObject({ kind: "died", code: 1 });
    expect(exit.last_lines.join("\n")).toContain("told to crash");
  });

  test("an engine that cannot load ends the attempt before it is ready", async () => {
    const it = await rank({ args: { "crash-at-load": true } });
    await until("the shim to end", () => !isAlive(it.pid));
    const exit = await it.exit();
    expect(exit).toMatchObject({ kind: "start", code: 1 });
    expect(exit.last_lines.at(-1)).toContain("told to crash at load");
  });

  test("an engine that does not become ready in time is ended", async () => {
    const it = await rank({ args: { hang: true, "load-ms": 60_000 }, start_deadline_ms: 300 });
    await until("the shim to end", () => !isAlive(it.pid));
    expect((await it.exit()).kind).toBe("start");
    expect((await it.exit()).reason).toContain("not ready");
  });

  test("a client that leaves cancels its request in the engine", async () => {
    const it = await rank({ args: { "tokens-per-second": 2, tokens: 1000 } });
    await it.reach("ready");
    const gone = new AbortController();
    const answer = await it.ask("/v1/chat/completions", { method: "POST", body: STREAM, signal: gone.signal });
    await answer.body?.getReader().read();
    gone.abort();
    await until("the cancellation", async () => (await (await it.ask("/metrics")).text()).includes("sim:cancelled_total 1"), 5_000);
  });

  test("a taken port ends the attempt as a failed lease", async () => {
    const port = freePort();
    const other = Bun.listen({ hostname: "127.0.0.1", port, socket: { data: () => {} } });
    const it = await rank({ door: { address: "127.0.0.1", port } });
    await until("the shim to end", () => !isAlive(it.pid));
    other.stop(true);
    expect((await it.exit()).kind).toBe("lease");
  });

  test("args may not set what llmgw sets itself", async () => {
    const it = await rank({ args: { socket: "/tmp/elsewhere" } });
    await until("the shim to end", () => !isAlive(it.pid));
    expect((await it.exit()).reason).toContain("args may not set socket");
  });

  test("when the engine is killed the attempt ends; when the shim is killed so is the engine", async () => {
    const first = await rank();
    const { engine_pid } = await first.reach("ready");
    process.kill(engine_pid as number, "SIGKILL");
    await until("the shim to end", () => !isAlive(first.pid));
    expect(await first.exit()).toMatchObject({ kind: "died", signal: "SIGKILL" });
    const second = await rank();
    await second.reach("ready");
    process.kill(second.pid, "SIGKILL");
    await until("the engine to be gone", async () => (await processesOf(second.launch.attempt, null)).length === 0);
  });

  test("an engine that ignores SIGTERM is killed", async () => {
    const it = await rank({ args: { "ignore-sigterm": true } });
    const { engine_pid } = await it.reach("ready");
    await it.stop();
    await until("the shim to end", () => !isAlive(it.pid));
    expect(isAlive(engine_pid as number)).toBe(false);
    expect(await it.exit()).toMatchObject({ kind: "stopped", signal: "SIGKILL" });
  });

  test("an engine that answers no request, with its port open, is ended with a written reason", async () => {
    const it = await rank({ args: { hang: true } }, { stuck_ms: 1_000 });
    await it.reach("ready");
    const asked = it.ask("/v1/chat/completions", { method: "POST", body: CHAT }).then(
      (answer) => answer.status,
      () => "cut",
    );
    await until("the shim to end", () => !isAlive(it.pid), 30_000);
    expect(await it.exit()).toMatchObject({ kind: "died", reason: expect.stringContaining("the engine is stuck: 1 request in flight") });
    expect(await asked).toBe("cut");
  });

  test("an engine that is slow is not stuck", async () => {
    const it = await rank({ args: { "tokens-per-second": 3 } }, { stuck_ms: 1_000 });
    await it.reach("ready");
    const answer = await it.ask("/v1/chat/completions", { method: "POST", body: CHAT.replace("8", "12") });
    expect(((await answer.json()) as { usage: { completion_tokens: number } }).usage.completion_tokens).toBe(12);
  });

  test("its door ends a handshake of somebody without a certificate", async () => {
    const it = await rank();
    await it.reach("ready");
    const closed = new Promise<string>((resolve) => {
      const socket = connect({ host: "127.0.0.1", port: it.launch.door.port, rejectUnauthorized: false }, () =>
        socket.write("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
      );
      let said = "";
      socket.on("data", (data) => (said += data.toString()));
      socket.on("error", () => {});
      socket.on("close", () => resolve(said));
    });
    expect(await closed).toBe("");
  });
});
