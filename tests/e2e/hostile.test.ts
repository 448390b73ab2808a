// Hundreds of wrong certificates at the control listener and at a shim's door of the compiled binary: none gets in.
// LLMGW_HOSTILE_TRIES sets how many.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { randomUUID } from "node:crypto";
import { connect } from "node:net";
import { connect as connectTls } from "node:tls";
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import type { KeyedCertificate } from "../../src/pki/authority.ts";
import type { JoinRequest } from "../../src/protocol/agent-api.ts";
import type { Role } from "../../src/protocol/ids.ts";
import { HANDSHAKE_MS, HEADERS_MS } from "../../src/protocol/limits.ts";
import { PROTOCOL } from "../../src/protocol/protocol.ts";
import { ATTEMPT_HEADER } from "../../src/protocol/shim-api.ts";
import { askWithOpenssl } from "../unit/pki/openssl-for-tests.ts";
import { Fleet } from "./fleet.ts";
import { issue, readAuthority, strangeAuthority } from "./authority.ts";
import { IMPOSTURES, shuffled, statusOf, type Authorities, type Try } from "./hostile.ts";

const TRIES = Number(process.env["LLMGW_HOSTILE_TRIES"] ?? 300);
const TEST_MS = 120_000 + TRIES * 200;
const AT_ONCE = 8;
let fleet: Fleet;
let authorities: Authorities;
let inventory: JoinRequest["inventory"];
let door: Try;

beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 1, models: [{ name: "m", engine: "sim" }] });
  const [replica] = await fleet.ready("m");
  authorities = { own: await readAuthority(join(fleet.folder, "ca")), other: await strangeAuthority() };
  inventory = (await fleet.nodeViews())[0]?.inventory as JoinRequest["inventory"];
  const [rank] = replica?.ranks ?? [];
  door = { url: `https://${rank?.address}/v1/models`, headers: { [ATTEMPT_HEADER]: rank?.attempt ?? "" } };
}, TEST_MS);
afterAll(() => fleet?.stop());

/** A join as the agent of a node would send it, from a machine of its own. */
function joinAs(node: string, machine_id = randomUUID()): Try {
  const body: JoinRequest = {
    protocol: PROTOCOL,
    node,
    version: "0.1.0",
    joins: 0,
    session_key: { machine_id, boot_id: randomUUID(), agent_start_id: randomUUID() },
    address: "127.0.0.99",
    clock_ms: Date.now(),
    inventory,
    ranks: [],
    seen: { epoch: 0, generation: 0 },
  };
  const headers = { "content-type": "application/json", "x-llmgw-node": node };
  return { url: `${fleet.control}/agent/v1/join`, method: "POST", headers, body: JSON.stringify(body) };
}

const admin = (): Try => ({ url: `${fleet.control}/admin/v1/nodes` });

test("whoever is right is let in: the tries below would be answered", async () => {
  const { own } = authorities;
  expect(await statusOf(await issue(own, { role: "admin", name: "somebody" }), admin())).toBe(200);
  expect(await statusOf(await issue(own, { role: "viewer", name: "somebody" }), admin())).toBe(200);
  expect(await statusOf(await issue(own, { role: "node", name: "spare" }), joinAs("spare"))).toBe(200);
  expect(await statusOf(await issue(own, { role: "gateway", name: "gateway" }), door)).toBe(200);
});

test(
  `${TRIES} tries in random order, none admitted`,
  async () => {
    const { own } = authorities;
    const targets: [string, Role, string, () => Try][] = [
      ["admin API", "admin", "somebody", admin],
      ["agent API", "node", "n1", () => joinAs("n1")],
      ["shim's door", "gateway", "gateway", () => door],
    ];
    const wrong_roles: [string, Role, string, () => Try][] = [
      ["admin API", "node", "n1", admin],
      ["admin API", "gateway", "gateway", admin],
      ["admin API", "server", "server", admin],
      ["agent API", "admin", "n1", () => joinAs("n1")],
      ["agent API", "gateway", "n1", () => joinAs("n1")],
      ["agent API", "node", "other", () => joinAs("n1")],
      ["shim's door", "node", "n1", () => door],
      ["shim's door", "admin", "somebody", () => door],
      ["shim's door", "viewer", "somebody", () => door],
    ];
    const cases: { what: string; shown: KeyedCertificate | null; ask: Try }[] = [];
    for (const [place, role, name, ask] of targets) {
      for (const { what, make } of IMPOSTURES)
        cases.push({ what: `${what} at the ${place}`, shown: await make(authorities, role, name), ask: ask() });
    }
    for (const [place, role, name, ask] of wrong_roles) {
      cases.push({ what: `${role} ${name} at the ${place}`, shown: await issue(own, { role, name }), ask: ask() });
    }
    cases.push({
      what: "another attempt at the shim's door",
      shown: await issue(own, { role: "gateway", name: "gateway" }),
      ask: { ...door, headers: { [ATTEMPT_HEADER]: "0".repeat(16) } },
    });
    cases.push({ what: "a copy on a second machine", shown: await nodeCertificate("n1"), ask: joinAs("n1") });

    const tries = shuffled(Array.from({ length: TRIES }, (_, index) => cases[index % cases.length] as (typeof cases)[number]));
    const certificates = tries.filter(({ what }) => !what.startsWith("another attempt")).length;
    const refused_before = await refusals();
    const admitted: string[] = [];
    const worker = async () => {
      for (let next = tries.pop(); next; next = tries.pop()) {
        const status = await statusOf(next.shown, next.ask);
        if (status !== 0 && (status < 400 || status >= 500)) admitted.push(`${next.what}: ${status}`);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, worker));
    expect(admitted).toEqual([]);
    // Each left its line in the log of the door it came to.
    await fleet.waitFor("a line for each", async () => (await refusals()) - refused_before >= certificates, 5_000);
    expect(await statusOf(await issue(own, { role: "admin", name: "somebody" }), admin())).toBe(200);
    expect((await fleet.nodeViews()).find(({ id }) => id === "n1")?.state).toBe("ready");
  },
  TEST_MS,
);

/** Lines about refused connections and requests, of the server and of all shims. */
async function refusals(): Promise<number> {
  const ranks = join(fleet.folder, "n1", "state", "ranks");
  const shims = (await readdir(ranks)).map((attempt) => readFile(join(ranks, attempt, "shim.log"), "utf8").catch(() => ""));
  const texts = await Promise.all([fleet.log("server"), ...shims]);
  return texts
    .join("\n")
    .split("\n")
    .filter((line) => line.includes(" warn ") && line.includes("refused")).length;
}

async function nodeCertificate(id: string): Promise<KeyedCertificate> {
  const [cert, key] = await Promise.all(["node.crt", "node.key"].map((name) => readFile(join(fleet.folder, id, "tls", name), "utf8")));
  return { cert: cert as string, key: key as string };
}

test("the log says which certificate claimed which id from which address", async () => {
  await statusOf(await issue(authorities.own, { role: "node", name: "other" }), joinAs("n1"));
  const line = (await fleet.log("server"))
    .split("\n")
    .find((each) => each.includes("other") && each.includes("n1") && each.includes("127.0.0.1"));
  expect(line).toBeDefined();
});

test(
  "a revoked certificate is refused, and one issued later is not",
  async () => {
    const machine = randomUUID();
    const before = await issue(authorities.own, { role: "node", name: "left" });
    expect(await statusOf(before, joinAs("left", machine))).toBe(200);
    await fleet.must("ctl", "revoke", "left");
    expect(await statusOf(before, joinAs("left", machine))).not.toBe(200);
    await fleet.signal("server", "SIGKILL");
    fleet.startServer();
    await fleet.waitFor("the server to be back", () => fleet.status());
    expect(await statusOf(before, joinAs("left", machine))).not.toBe(200);
    expect(await statusOf(await issue(authorities.own, { role: "node", name: "left" }), joinAs("left", machine))).toBe(200);
  },
  TEST_MS,
);

test.each(["-tls1_2", "-tls1_3"] as const)(
  "a resumed session (%s) is refused after the revocation of its certificate",
  async (version) => {
    const name = `left${version}`;
    const call = {
      port: Number(new URL(fleet.control).port),
      folder: fleet.folder,
      shown: await issue(authorities.own, { role: "admin", name }),
      version,
      path: "/admin/v1/status",
    };
    const session = join(fleet.folder, name);
    expect(await askWithOpenssl({ ...call, save: session })).toContain("HTTP/1.1 200");
    const resumed = await askWithOpenssl({ ...call, resume: session, save: session });
    expect(resumed).toContain("Reused");
    expect(resumed).toContain("HTTP/1.1 200");
    await fleet.must("ctl", "revoke", name, "--force");
    const late = await askWithOpenssl({ ...call, resume: session });
    expect(late).toContain("Reused");
    expect(late).not.toContain("HTTP/1.1");
    expect(await fleet.log("server")).toMatch(new RegExp(`refused.*${name}.*revoked`));
  },
  TEST_MS,
);

test("an older certificate is refused once a newer one has connected", async () => {
  const machine = randomUUID();
  const older = await issue(authorities.own, { role: "node", name: "twice", at_ms: Date.now() - 60_000 });
  const newer = await issue(authorities.own, { role: "node", name: "twice" });
  expect(await statusOf(older, joinAs("twice", machine))).toBe(200);
  expect(await statusOf(newer, joinAs("twice", machine))).toBe(200);
  expect(await statusOf(older, joinAs("twice", machine))).not.toBe(200);
});

/** How long a connection stays open that sends only this, in ms. */
function patience(target: string, shown: KeyedCertificate | null, text: string): Promise<number> {
  const { hostname, port } = new URL(target);
  const started_ms = performance.now();
  return new Promise((resolve) => {
    const end = () => resolve(performance.now() - started_ms);
    const socket = shown
      ? connectTls({ host: hostname, port: Number(port), rejectUnauthorized: false, ...shown }, () => socket.write(text))
      : connect({ host: hostname, port: Number(port) }, () => socket.write(text));
    socket.once("close", end).once("error", end).resume();
  });
}

test("half a handshake and half a header are ended by our own timers", async () => {
  const right = await issue(authorities.own, { role: "admin", name: "somebody" });
  const gateway = await issue(authorities.own, { role: "gateway", name: "gateway" });
  const waits = await Promise.all([
    patience(fleet.control, null, ""),
    patience(door.url, null, "\u0016\u0003\u0001"),
    patience(fleet.control, right, "GET /admin/v1/nodes HTTP/1.1\r\nhost:"),
    patience(door.url, gateway, "GET /v1/models HTTP/1.1\r\nhost:"),
  ]);
  const most_ms = Math.max(HANDSHAKE_MS, HEADERS_MS) + 5_000;
  expect(waits.filter((wait) => wait > most_ms)).toEqual([]);
}, 60_000);
