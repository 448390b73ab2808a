// What a door does with connections that are admitted: its own timers, their limits, and what it must not cut.
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { connect as connectTcp } from "node:net";
import { connect } from "node:tls";
import type { TLSSocket } from "node:tls";
import { makeLog } from "../../../src/os/log.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import type { ListenerOptions, PeerListener } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import { testAuthority } from "./authority-for-tests.ts";
import type { TestAuthority } from "./authority-for-tests.ts";

const TIMER_MS = 250;
const timers = { handshake_ms: TIMER_MS, headers_ms: TIMER_MS, body_ms: TIMER_MS, idle_ms: TIMER_MS };
const LIMIT = 4;
let ours: TestAuthority;
let node: Identity;
let trust: Trust;
let door: PeerListener;
/** What the handler saw end. */
const ended: string[] = [];
const lines: string[] = [];
const log = makeLog({ level: "info", format: "text", write: (line) => lines.push(line) });

const handle: ListenerOptions["handle"] = async (request, response) => {
  const path = request.url ?? "";
  response.once("close", () => ended.push(`${path} ${response.writableFinished ? "whole" : "cut"}`));
  if (path === "/hang") return;
  if (path === "/unread") return void response.end("no");
  if (path === "/stream") {
    response.write("first,");
    await Bun.sleep(TIMER_MS * 3);
    return void response.end("last");
  }
  let bytes = 0;
  for await (const chunk of request) bytes += (chunk as Uint8Array).length;
  response.end(`${bytes} bytes`);
};

beforeAll(async () => {
  ours = await testAuthority();
  node = await ours.identity("node", "a");
  trust = new Trust(ours.ca.cert);
  const identity = await ours.identity("server", "control");
  door = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity,
    trust,
    roles: ["node"],
    log,
    now: Date.now,
    timers,
    handle,
    max_connections: LIMIT,
  });
});
afterAll(() => door.close());
beforeEach(() => {
  lines.length = 0;
  ended.length = 0;
  trust.setRevocations([]);
});

/** A connection of node a that says `text`; `closed` = how long it stayed open, in ms, or null after 8 timers. */
class Caller {
  readonly #started_ms = performance.now();
  readonly socket: TLSSocket;
  heard = "";
  readonly closed: Promise<number | null>;

  constructor(text: string) {
    const { cert, key } = node;
    this.socket = connect({ host: "127.0.0.1", port: door.port, cert, key, rejectUnauthorized: false }, () => this.say(text));
    this.socket.on("data", (data) => (this.heard += data.toString()));
    this.socket.on("error", () => undefined);
    this.closed = new Promise((resolve) => {
      this.socket.once("close", () => resolve(performance.now() - this.#started_ms));
      setTimeout(() => resolve(null), TIMER_MS * 8);
    });
  }

  say(text: string): void {
    if (!this.socket.destroyed) this.socket.write(text);
  }
}

async function until(what: string, holds: () => boolean): Promise<void> {
  const deadline_ms = Date.now() + 5_000;
  while (!holds()) {
    if (Date.now() > deadline_ms) throw new Error(`never came true: ${what}`);
    await Bun.sleep(5);
  }
}

const get = (path: string) => `GET ${path} HTTP/1.1\r\nhost: door\r\n\r\n`;
const post = (path: string, rest: string) => `POST ${path} HTTP/1.1\r\nhost: door\r\n${rest}`;

describe("a door's own timers", () => {
  const slow: readonly [string, string, string][] = [
    ["says nothing after the handshake", "", "its first request took too long"],
    ["says half a header", "GET / HTTP/1.1\r\nhost: d", "its first request took too long"],
    ["stops in a body of known length", post("/", "content-length: 100\r\n\r\nabc"), "the body of its request took too long"],
    ["stops in a chunked body", post("/", "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"), "the body of its request took too long"],
  ];
  test.each(slow)("end a client that %s", async (_what, text, why) => {
    const closed_ms = await new Caller(text).closed;
    expect(closed_ms).toBeGreaterThan(TIMER_MS * 0.8);
    expect(closed_ms).toBeLessThan(TIMER_MS * 4);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toContain(why);
    expect(lines[0]).toContain("certificate=a");
  });

  test.each([
    ["one header at a time", "GET / HTTP/1.1\r\n", "x: y\r\n"],
    ["one byte of a body at a time", post("/", "content-length: 1000\r\n\r\n"), "b"],
  ])("end a client that sends %s", async (_what, first, more) => {
    const caller = new Caller(first);
    const drip = setInterval(() => caller.say(more), TIMER_MS / 10);
    const closed_ms = await caller.closed;
    clearInterval(drip);
    expect(closed_ms).toBeLessThan(TIMER_MS * 4);
  });

  test.each([
    ["nothing", ""],
    ["the start of a handshake", "\u0016\u0003\u0001"],
  ])("end a connection that sends %s", async (_what, text) => {
    const started_ms = performance.now();
    await new Promise((resolve) => {
      const socket = connectTcp(door.port, "127.0.0.1", () => socket.write(text));
      socket.on("close", resolve).on("error", () => undefined);
      socket.resume();
    });
    expect(performance.now() - started_ms).toBeLessThan(TIMER_MS * 4);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toContain("handshake took too long");
    expect(lines[0]).toContain("address=127.0.0.1");
  });

  test.each([
    ["answered", get("/")],
    ["answered and asks half a request more", `${get("/")}GET /next HT`],
  ])("end a kept connection that was %s", async (_what, text) => {
    const caller = new Caller(text);
    expect(await caller.closed).not.toBeNull();
    expect(caller.heard).toContain("0 bytes");
    expect(lines).toEqual([]);
  });

  test("end a kept connection whose body went on after its answer", async () => {
    const caller = new Caller(post("/unread", "content-length: 6\r\n\r\nabc"));
    await until("the answer is there", () => caller.heard.includes("no"));
    caller.say("def");
    expect(await caller.closed).not.toBeNull();
  });
});

describe("a door does not cut", () => {
  test("a request that is thought about for long", async () => {
    const caller = new Caller(get("/hang"));
    expect(await caller.closed).toBeNull();
    caller.socket.destroy();
    await until("the handler knows that the client has gone", () => ended.includes("/hang cut"));
    expect(lines).toEqual([]);
  });

  test("a stream that is silent for long", async () => {
    const caller = new Caller(get("/stream"));
    await until("the stream is whole", () => ended.includes("/stream whole"));
    await caller.closed;
    expect(caller.heard).toMatch(/first,[^]*last/);
  });

  test("a second request sent along with the first", async () => {
    const caller = new Caller(get("/") + get("/hang"));
    expect(await caller.closed).toBeNull();
    expect(caller.heard).toContain("0 bytes");
    caller.socket.destroy();
    await until("the handler knows that the client has gone", () => ended.includes("/hang cut"));
  });
});

describe("a door", () => {
  test.each(["", "\u0016\u0003\u0001"])("says nothing of a look at its port, as load balancers take (%j)", async (text) => {
    await new Promise((resolve) => {
      const socket = connectTcp(door.port, "127.0.0.1", () => socket.end(text));
      socket.on("close", resolve).on("error", () => undefined);
      socket.resume();
    });
    // A caller that distrusts the door leaves as quietly, but after its hello: of that the log has to tell.
    const distrusts = connect({ host: "127.0.0.1", port: door.port, rejectUnauthorized: true });
    distrusts.on("error", () => undefined);
    await until("the refusal is in the log", () => lines.length > 0);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toContain("the TLS handshake failed");
  });

  test("judges each request of a kept connection anew", async () => {
    const caller = new Caller(get("/first"));
    await until("the first answer is there", () => caller.heard.includes("0 bytes"));
    trust.setRevocations([{ name: "a", until_ms: node.issued_ms }]);
    caller.say(get("/second"));
    await caller.closed;
    expect(ended).toEqual(["/first whole"]);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toContain("it was revoked");
  });

  test("tells handlers of a client that left in the middle of a body, and does not call that a fault", async () => {
    const caller = new Caller(post("/", "content-length: 100\r\n\r\nabc"));
    await Bun.sleep(TIMER_MS / 3);
    caller.socket.destroy();
    await until("the handler knows", () => ended.includes("/ cut"));
    await Bun.sleep(10);
    expect(lines).toEqual([]);
  });

  test("holds so many connections and no more", async () => {
    const callers = Array.from({ length: LIMIT }, () => new Caller(get("/hang")));
    await until("all are in", () => callers.every(({ socket }) => socket.authorized || socket.getProtocol() !== null));
    await Bun.sleep(TIMER_MS / 4);
    const late = new Caller(get("/"));
    expect(await late.closed).toBeLessThan(TIMER_MS);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toContain("there are too many");
    for (const { socket } of callers) socket.destroy();
    await until("all have gone", () => ended.length === LIMIT);
    const next = new Caller(get("/"));
    await until("there is room again", () => next.heard.includes("0 bytes"));
    next.socket.destroy();
  });

  test("shows another certificate when told, and asks for one as before", async () => {
    const url = `https://127.0.0.1:${door.port}/`;
    const ask = (name: string) => makeDialer(node).request(url, { expect: { role: "server", name } });
    expect((await ask("control")).status).toBe(200);
    door.setIdentity(await ours.identity("server", "renewed"));
    expect((await ask("renewed")).status).toBe(200);
    expect(ask("control")).rejects.toMatchObject({ code: "E_IDENTITY" });
    const without = await fetch(url, { tls: { rejectUnauthorized: false } }).then(
      () => "answered",
      () => "refused",
    );
    expect(without).toBe("refused");
  });

  test.each(["0", "1", ""])("does not open while NODE_TLS_REJECT_UNAUTHORIZED is %p", async (value) => {
    process.env["NODE_TLS_REJECT_UNAUTHORIZED"] = value;
    try {
      const options = { host: "127.0.0.1", port: 0, identity: node, trust, roles: [], log, now: Date.now, handle };
      expect(await listenMutualTls(options).catch((error: unknown) => error)).toMatchObject({ code: "E_TLS" });
      expect(() => makeDialer(node)).toThrow();
    } finally {
      delete process.env["NODE_TLS_REJECT_UNAUTHORIZED"];
    }
  });
});
