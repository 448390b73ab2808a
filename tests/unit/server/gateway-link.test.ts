// A gateway that answers, and takes new routes when it is let.
import { expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makeLog } from "../../../src/os/log.ts";
import { serveUnix } from "../../../src/os/unix-http.ts";
import type { GatewayStatus, Snapshot } from "../../../src/protocol/gateway-api.ts";
import { PROTOCOL } from "../../../src/protocol/protocol.ts";
import { GatewayLink } from "../../../src/server/gateway-link.ts";
import { until } from "./control-plane-for-tests.ts";

const ATTEMPT = "0123456789abcdef";

const silent = makeLog({ level: "error", format: "text", write: () => {} });
const statusOf = (pid: number): GatewayStatus => ({
  protocol: PROTOCOL,
  pid,
  started_ms: 0,
  llmgw_version: "1",
  snapshot: null,
  in_flight: 0,
  loads: [],
});

test("a gateway that stands still is killed once that is long, and not before", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-link-"));
  const socket = join(folder, "g.sock");
  const over = new AbortController();
  const process_of_it = Bun.spawn(["sleep", "1000"], { stdio: ["ignore", "ignore", "ignore"] });
  let answers = true;
  const gateway = await serveUnix(socket, () => (answers ? Response.json(statusOf(process_of_it.pid)) : new Promise<Response>(() => {})));
  const content = (): Omit<Snapshot, "version"> => ({ auth: "none", routes: [], keys: [], revocations: [] });
  // The configuration is not there: a gateway that were started would end at once.
  const link = new GatewayLink({ socket, config_file: join(folder, "none"), owner_pid: null, log: silent, content, frozen_ms: 5_000 });
  const running = link.run(over.signal);
  try {
    await until("an answer", async () => link.status);
    answers = false;
    await until("silence", async () => (link.status === null ? true : null));
    expect(process_of_it.killed).toBe(false);
    expect(process_of_it.exitCode).toBeNull();
    await process_of_it.exited;
    expect(process_of_it.signalCode).toBe("SIGKILL");
  } finally {
    over.abort();
    process_of_it.kill("SIGKILL");
    await gateway.close();
    await running;
    await rm(folder, { recursive: true, force: true });
  }
}, 40_000);

test("what a gateway counts by older routes does not count: a replica it still sends requests to is not idle", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-link-"));
  const over = new AbortController();
  let taken = 0;
  let mayTake = Promise.withResolvers<void>();
  let asked = 0;
  const status = (): GatewayStatus => ({
    ...statusOf(process.pid),
    snapshot: { epoch: 1, generation: taken },
    loads: [{ replica: "m-aaaaa", attempt: ATTEMPT, in_flight: taken, unreachable: null }],
  });
  const gateway = await serveUnix(join(folder, "g.sock"), async (request) => {
    if (request.method === "GET") {
      asked += 1;
      return Response.json(status());
    }
    await mayTake.promise;
    taken += 1;
    return Response.json({ accepted: true });
  });
  let routes: Snapshot["routes"] = [];
  const link = new GatewayLink({
    socket: join(folder, "g.sock"),
    config_file: null,
    owner_pid: null,
    log: silent,
    content: () => ({ auth: "none", routes, keys: [], revocations: [] }),
  });
  const running = link.run(over.signal);
  try {
    await until("a question", async () => (asked > 0 ? true : null));
    expect(link.in_flight()).toBeNull();
    mayTake.resolve();
    await until("counts", async () => link.in_flight());
    expect(link.in_flight()).toEqual(new Map([[ATTEMPT, 1]]));
    mayTake = Promise.withResolvers();
    routes = [{ model: "m", created_ms: 0, targets: [], starting: false }];
    link.poke();
    // It goes on answering, and the routes it counts by are older than the drain may be.
    await until("counts to be too old", async () => (link.in_flight() === null ? true : null));
    mayTake.resolve();
    expect(await until("counts", async () => link.in_flight())).toEqual(new Map([[ATTEMPT, 2]]));
  } finally {
    over.abort();
    mayTake.resolve();
    link.poke();
    await running;
    await gateway.close();
    await rm(folder, { recursive: true, force: true });
  }
}, 30_000);
