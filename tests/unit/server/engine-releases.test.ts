import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makeLog } from "../../../src/os/log.ts";
import { EngineReleases } from "../../../src/server/engine-releases.ts";
import { until } from "../shim/rank-for-tests.ts";

let web: Bun.Server<undefined>;
let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-releases-"));
  web = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) =>
      request.url.includes("/other/") ? Response.json({ tag_name: "b9", assets: [] }) : new Response("no", { status: 404 }),
  });
});
afterAll(async () => {
  await web.stop(true);
  await rm(folder, { recursive: true, force: true });
});

test.each([
  ["that has nothing", "none", /answered .*404/],
  ["that answers with another release", "other", /b9, and not of b1/],
])("a mirror %s is named in the reason, without its password", async (_what, path, words) => {
  const stop = new AbortController();
  const lines: string[] = [];
  const log = makeLog({ level: "debug", format: "text", write: (line) => lines.push(line) });
  const releases = new EngineReleases({ folder, log, signal: stop.signal, changed: () => undefined });
  const reason = () => releases.wanted.find(({ kind }) => kind === "llamacpp")?.reason ?? "";
  releases.follow({ mirror: `http://reader:hunter2@127.0.0.1:${web.port}/${path}`, llamacpp: "b1", vllm: "", sglang: "" });
  await until("the reason", () => reason().startsWith("cannot find out"));
  stop.abort();
  expect(reason()).toMatch(words);
  expect(reason()).toContain(`127.0.0.1:${web.port}/${path}`);
  expect(reason() + lines.join("")).not.toContain("hunter2");
});
