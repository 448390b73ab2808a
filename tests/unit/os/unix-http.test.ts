import { afterEach, beforeEach, expect, test } from "bun:test";
import { mkdtemp, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fetchUnix, isSilence, serveUnix } from "../../../src/os/unix-http.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";

let folder = "";
let socket = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-unix-"));
  socket = join(folder, "s.sock");
});
afterEach(() => rm(folder, { recursive: true, force: true }));

const code = (promise: Promise<unknown>): Promise<string> =>
  promise.then(
    () => "",
    (error: OperatorError) => error.code,
  );

test("a socket file that a dead process left is replaced, and so is any other file", async () => {
  const dead = Bun.spawn([process.execPath, "-e", `Bun.serve({ unix: "${socket}", fetch: () => new Response() }); console.log("on")`], {
    stdout: "pipe",
  });
  for await (const _line of dead.stdout) break;
  dead.kill("SIGKILL");
  await dead.exited;
  expect((await stat(socket)).isSocket()).toBe(true);
  await (await serveUnix(socket, () => new Response("mine"))).close();
  await writeFile(socket, "something else");
  const server = await serveUnix(socket, () => new Response("mine"));
  expect(await (await fetchUnix(socket, "/")).text()).toBe("mine");
  await server.close();
});

test("what another process serves is not taken from it, also while that process stands still", async () => {
  const server = await serveUnix(socket, () => new Response("first"));
  expect(await code(serveUnix(socket, () => new Response("second")))).toBe("E_EXISTS");
  await server.close();
  const text = `Bun.serve({ unix: "${socket}", fetch: () => new Response("first") }); console.log("on")`;
  const other = Bun.spawn([process.execPath, "-e", text], { stdout: "pipe" });
  try {
    for await (const _line of other.stdout) break;
    other.kill("SIGSTOP");
    expect(await code(serveUnix(socket, () => new Response("second")))).toBe("E_EXISTS");
    const unanswered = fetchUnix(socket, "/", { signal: AbortSignal.timeout(200) }).then(() => null, isSilence);
    expect(await unanswered).toBe(true);
    other.kill("SIGCONT");
    expect(await (await fetchUnix(socket, "/")).text()).toBe("first");
  } finally {
    other.kill("SIGKILL");
    await other.exited;
  }
});
