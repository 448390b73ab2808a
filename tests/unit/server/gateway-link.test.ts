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

test("what a gateway counts by older routes does not count: a replica it still sends requests to is not idle", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-link-"));
  const over = new AbortController();
  let taken = 0;
  let mayTake = Promise.withResolvers<void>();
  let asked = 0;
  const status = (): GatewayStatus => ({
    protocol: PROTOCOL,
    pid: process.pid,
    started_ms: 0,
    llmgw_version: "1",
    snapshot: { epoch: 1, generation: taken },
    in_flight: 0,
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
    log: makeLog({ level: "error", format: "text", write: () => {} }),
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
