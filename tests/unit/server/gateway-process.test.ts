// The server and the gateway process it starts: a real one, which outlives the server.
import { afterEach, expect, test } from "bun:test";
import { join } from "node:path";
import { isAlive, signalProcess } from "../../../src/os/process.ts";
import { waitGone } from "../os/process-for-tests.ts";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import type { GatewayStatus } from "../../../src/protocol/gateway-api.ts";
import { ControlPlane, until } from "./control-plane-for-tests.ts";

let plane: ControlPlane | null = null;
const started = new Set<number>();
afterEach(async () => {
  await plane?.stop();
  for (const pid of started) {
    signalProcess(pid, "SIGKILL", "leader");
    await waitGone(pid, 5_000);
  }
  started.clear();
  await plane?.end();
});

/** The gateway that answers now and has the newest snapshot, unless it is one that is meant to be gone. */
async function gateway(folder: string, not: number | null = null): Promise<GatewayStatus> {
  const status = await until("a gateway with a snapshot", async () => {
    const answer = await fetchUnix(join(folder, "run", "gateway.sock"), "/status").catch(() => null);
    const found = answer && ((await answer.json()) as GatewayStatus);
    return found?.snapshot && found.pid !== not ? found : null;
  });
  started.add(status.pid);
  return status;
}

test("a gateway is started, replaced when it dies, left alone when the server ends, and taken up again", async () => {
  plane = await ControlPlane.make([{ name: "m", engine: "sim" }], "child");
  await plane.start();
  const first = await gateway(plane.folder);
  const before = await plane.admin();
  await until("the server sees it", async () => (await before("GET", "status")).body.gateway.state === "serving");
  signalProcess(first.pid, "SIGKILL", "leader");
  const second = await gateway(plane.folder, first.pid);
  expect(plane.log.some((line) => line.includes("the gateway does not answer"))).toBe(true);
  await plane.stop();
  expect(isAlive(second.pid)).toBe(true);
  await plane.start();
  const admin = await plane.admin();
  await until("the server sees it", async () => (await admin("GET", "status")).body.gateway.state === "serving");
  const { body } = await admin("POST", "keys", { name: "alice" });
  const { pid } = await until("the key", async () => {
    const status = await gateway((plane as ControlPlane).folder);
    return status.snapshot && second.snapshot && status.snapshot.generation > second.snapshot.generation ? status : null;
  });
  expect(pid).toBe(second.pid);
  expect(body.key).toStartWith("llmgw_");
}, 30_000);
