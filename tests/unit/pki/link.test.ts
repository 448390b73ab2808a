import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { makeLog } from "../../../src/os/log.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import type { PeerListener } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import { testAuthority } from "./authority-for-tests.ts";
import type { TestAuthority } from "./authority-for-tests.ts";

const DAY_MS = 86_400_000;
let ours: TestAuthority;
let theirs: TestAuthority;
let server: Identity;
let trust: Trust;
let door: PeerListener;
const lines: string[] = [];
const log = makeLog({ level: "debug", format: "text", write: (line) => lines.push(line) });
const url = () => `https://127.0.0.1:${door.port}/who`;

beforeAll(async () => {
  ours = await testAuthority();
  theirs = await testAuthority();
  server = await ours.identity("server", "control");
  trust = new Trust(ours.ca.cert);
  door = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity: server,
    trust,
    roles: ["node", "admin"],
    log,
    now: Date.now,
    timers: { handshake_ms: 300, headers_ms: 300, body_ms: 300, idle_ms: 300 },
    handle: async (request, response, peer) => {
      if (request.url === "/slow") await Bun.sleep(900);
      response.end(JSON.stringify({ name: peer.name, role: peer.role }));
    },
  });
});
afterAll(() => door.close());

const ask = (identity: Identity, name: string | undefined = "control", path = url()) =>
  makeDialer(identity).request(path, { expect: { role: "server", ...(name !== undefined && { name }) } });

async function failure(promise: Promise<unknown>): Promise<OperatorError> {
  return promise.then(
    () => Promise.reject(new Error("it was admitted")),
    (error: OperatorError) => error,
  );
}

describe("a door", () => {
  test("admits the right certificate and says who it is", async () => {
    const node = await ours.identity("node", "a");
    expect(await (await ask(node)).json()).toEqual({ name: "a", role: "node" });
    expect(await (await ask(node, undefined)).json()).toEqual({ name: "a", role: "node" });
  });

  test("lets a request take longer than every timer", async () => {
    const node = await ours.identity("node", "slow");
    const answer = await ask(node, "control", url().replace("/who", "/slow"));
    expect(answer.status).toBe(200);
  });

  const wrong: readonly [string, () => Promise<Identity>, string][] = [
    ["of another authority", () => theirs.identity("node", "a").then((it) => ({ ...it, ca: ours.ca.cert })), "handshake"],
    ["that expired", () => ours.identity("node", "b", { days: 1 }, Date.now() - 3 * DAY_MS), "refused"],
    ["not yet valid", () => ours.identity("node", "c", {}, Date.now() + 3 * DAY_MS), "refused"],
    ["of a role that is not for this door", () => ours.identity("gateway", "g"), "its role is gateway"],
  ];
  test.each(wrong)("refuses a certificate %s", async (_what, identity, said) => {
    lines.length = 0;
    const error = await failure(ask(await identity()));
    expect(["E_TLS", "E_UNREACHABLE"]).toContain(error.code);
    expect(lines.join("\n")).toContain(said);
    expect(lines.join("\n")).toContain("address=127.0.0.1");
  });

  test("refuses a revoked certificate, and one that a newer one of its name has replaced", async () => {
    const old = await ours.identity("node", "twice", {}, Date.now() - 5_000);
    const newer = await ours.identity("node", "twice");
    expect((await ask(old)).status).toBe(200);
    expect((await ask(newer)).status).toBe(200);
    lines.length = 0;
    await failure(ask(old));
    expect(lines.join("\n")).toContain("a newer certificate of that name");
    trust.setRevocations([{ name: "twice", until_ms: Date.now() + 1 }]);
    await failure(ask(newer));
    expect(lines.join("\n")).toContain("revoked");
    trust.setRevocations([]);
  });

  test("ends handshakes and headers that take too long by its own timers", async () => {
    const started = Date.now();
    const closed = new Promise((resolve) => connect(door.port, "127.0.0.1").on("close", resolve));
    await closed;
    expect(Date.now() - started).toBeGreaterThan(200);
    expect(lines.join("\n")).toContain("handshake took too long");
  });

  test("can drop a peer in the middle of a request", async () => {
    const node = await ours.identity("node", "dropped");
    const asked = failure(ask(node, "control", url().replace("/who", "/slow")));
    await Bun.sleep(200);
    door.dropPeers((peer) => peer.name === "dropped");
    expect((await asked).code).toBe("E_UNREACHABLE");
  });
});

describe("a dialer", () => {
  test("sends nothing to somebody else", async () => {
    const node = await ours.identity("node", "a2");
    expect((await failure(ask(node, "other"))).code).toBe("E_IDENTITY");
    const asNode = makeDialer(node).request(url(), { expect: { role: "node" } });
    expect((await failure(asNode)).code).toBe("E_IDENTITY");
  });

  test("does not trust another authority", async () => {
    const stranger = await theirs.identity("node", "a");
    expect((await failure(ask(stranger))).code).toBe("E_TLS");
  });

  test("says that nobody answers", async () => {
    const node = await ours.identity("node", "a3");
    expect((await failure(ask(node, "control", "https://127.0.0.1:9/"))).code).toBe("E_UNREACHABLE");
  });
});
