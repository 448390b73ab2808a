import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { stopAll } from "../../../src/agent/agent.ts";
import { isAlive } from "../../../src/os/process.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";
import { testNode } from "./node-for-tests.ts";
import type { TestNode } from "./node-for-tests.ts";
import { testServer } from "./server-for-tests.ts";
import type { TestServer } from "./server-for-tests.ts";

const TEST_MS = 60_000;
let server: TestServer;
let node: TestNode;

beforeEach(async () => {
  const authority = await testAuthority();
  server = await testServer(await authority.identity("server", "control"));
  node = await testNode(await authority.identity("node", "a"), [server.url]);
});
afterEach(async () => {
  await node.cleanUp();
  await server.close();
}, TEST_MS);

describe("stop-all", () => {
  test(
    "ends every rank, with neither an agent, a certificate nor a server",
    async () => {
      const agent = node.start();
      const launch = node.launch();
      server.plan([launch]);
      const { engine_pid } = await server.sees(launch.attempt, "a ready rank", ({ phase }) => phase === "ready");
      await agent.end();
      await server.close();
      await rm(node.config.tls.cert);
      await stopAll(node.options);
      expect(isAlive(engine_pid ?? 0)).toBe(false);
      expect(JSON.parse(await readFile(join(node.config.state, "ranks", launch.attempt, "exit.json"), "utf8"))).toMatchObject({
        kind: "stopped",
      });
    },
    TEST_MS,
  );

  test("does not begin what was never started", async () => {
    const launch = node.launch({ weights: { source: "http://127.0.0.1:1/w.gguf" } });
    const folder = join(node.config.state, "ranks", launch.attempt);
    await Bun.write(join(folder, "launch.json"), JSON.stringify(launch));
    await stopAll(node.options);
    expect(JSON.parse(await readFile(join(folder, "exit.json"), "utf8"))).toMatchObject({ kind: "stopped" });
  });

  test("a folder that cannot be read does not keep an agent from starting", async () => {
    const folder = join(node.config.state, "ranks", "0123456789abcdef");
    await Bun.write(join(folder, "launch.json"), "{");
    await writeFile(join(node.config.state, "ranks", "note"), "");
    node.start();
    await until("a join", () => server.joins.length === 1);
    expect(server.joins[0]?.ranks).toEqual([]);
    expect(node.lines.some((line) => line.includes("cannot read an attempt's folder"))).toBe(true);
  });
});
