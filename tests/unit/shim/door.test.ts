import { afterEach, expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { createServer } from "node:net";
import type { Server, Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { connect } from "node:tls";
import type { TLSSocket } from "node:tls";
import { makeLog } from "../../../src/os/log.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import { ENGINE_CONNECT_MS } from "../../../src/protocol/limits.ts";
import { Door } from "../../../src/shim/door.ts";
import { EngineLink } from "../../../src/shim/engine-link.ts";
import { RankLog } from "../../../src/shim/rank-log.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import { until } from "./rank-for-tests.ts";

const ATTEMPT = "0123456789abcdef";
const authority = await testAuthority();
const [node, gateway, server] = await Promise.all([
  authority.identity("node", "a"),
  authority.identity("gateway", "g"),
  authority.identity("server", "s"),
]);

const endings: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of endings.splice(0).reverse()) await end();
});

/** A door on loopback before an engine that is played by a function for each connection. */
async function doorTo(engine: (socket: Socket) => void) {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-door-"));
  endings.push(() => rm(folder, { recursive: true, force: true }));
  const engine_socket = join(folder, "e.sock");
  const sockets = new Set<Socket>();
  const played: Server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    socket.on("close", () => sockets.delete(socket));
    engine(socket);
  });
  await new Promise<void>((resolve) => played.listen(engine_socket, resolve));
  endings.push(async () => {
    for (const socket of sockets) socket.destroy();
    played.close();
  });
  const log = new RankLog(folder);
  /** What the door has taken in of the bodies of requests. */
  const taken = { bytes: 0 };
  const link = new EngineLink({ kind: "socket", path: engine_socket });
  const door = new Door({ attempt: ATTEMPT, engine: () => link, log, refusal: () => null });
  const listener = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity: node,
    trust: new Trust(node.ca),
    roles: ["gateway", "server"],
    log: makeLog({ level: "error", format: "text", write: () => {} }),
    now: Date.now,
    handle: (request, response, peer) => {
      door.handle(request, response, peer);
      request.on("data", (data: Buffer) => (taken.bytes += data.length));
    },
  });
  endings.push(() => listener.close());
  const as = (identity: typeof gateway) => {
    const dialer = makeDialer(identity);
    return (path: string, init: { method?: string; body?: string; signal?: AbortSignal } = {}) =>
      dialer.request(`https://127.0.0.1:${listener.port}${path}`, {
        ...init,
        headers: { "x-llmgw-attempt": ATTEMPT },
        expect: { role: "node", name: "a" },
      });
  };
  const away = () => new Promise<void>((resolve) => played.close(() => resolve()));
  return { door, log, taken, engine_socket, away, port: listener.port, sockets, ask: as(gateway), askAsServer: as(server) };
}

/** A connection to the door that reads and writes only as the test says. */
async function raw(port: number): Promise<TLSSocket> {
  const { ca, cert, key } = gateway;
  const socket = connect({ host: "127.0.0.1", port, ca, cert, key, checkServerIdentity: () => undefined });
  socket.on("error", () => {});
  await new Promise((resolve) => socket.once("secureConnect", resolve));
  endings.push(async () => socket.destroy());
  return socket;
}

/** A number once it no longer rises. */
function settled(read: () => number): Promise<number> {
  let before = -1;
  return until("it to stop rising", async () => {
    const now = read();
    if (now === before) return now;
    before = now;
    await Bun.sleep(300);
    return null;
  });
}

/** Whether an answer's body comes to its end. */
const endOf = (answer: Response) =>
  answer.text().then(
    () => "whole",
    () => "broken off",
  );

const WHOLE = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

test("an engine that ends its idle connections makes no request fail", async () => {
  const { ask } = await doorTo((socket) => {
    socket.on("data", () => {
      socket.write(WHOLE);
      // What happens between an answer and the next question is the engine's own affair.
      setTimeout(() => socket.destroy(), 1);
    });
  });
  for (let round = 0; round < 100; round += 1) {
    const answer = await ask("/v1/models");
    expect(`${answer.status} ${await answer.text()}`).toBe("200 ok");
    await Bun.sleep(round % 4);
  }
});

test("an engine that takes no connection just now is asked again; one that never does is a 503", async () => {
  const { ask, engine_socket, away } = await doorTo((socket) => socket.on("data", () => socket.write(WHOLE)));
  await away();
  const asked = ask("/v1/models");
  await Bun.sleep(200);
  const back = createServer((socket) => socket.on("data", () => socket.write(WHOLE))).listen(engine_socket);
  endings.push(async () => back.close());
  const answer = await asked;
  expect(`${answer.status} ${await answer.text()}`).toBe("200 ok");
  back.close();
  const began = performance.now();
  expect((await ask("/v1/models")).status).toBe(503);
  expect(performance.now() - began).toBeGreaterThan(ENGINE_CONNECT_MS - 100);
}, 20_000);

test("hundreds of requests are in flight at once", async () => {
  let held = 0;
  const { ask, sockets } = await doorTo((socket) => socket.on("data", () => (held += 1)));
  const gone = new AbortController();
  const asked = Promise.all(
    Array.from({ length: 100 }, () => ask("/v1/completions", { method: "POST", body: "{}", signal: gone.signal }).catch(() => null)),
  );
  await until("all to be in the engine", () => held >= 100);
  gone.abort();
  await asked;
  await until("the engine to be rid of them", () => sockets.size === 0, 2_000);
});

test.each([
  ["a length", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"],
  ["chunks", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"],
])("an answer with %s that the engine breaks off is broken off here too", async (_what, half) => {
  const { ask } = await doorTo((socket) =>
    socket.on("data", () => {
      socket.write(half);
      setTimeout(() => socket.destroy(), 50);
    }),
  );
  const answer = await ask("/v1/completions", { method: "POST", body: "{}" });
  expect(answer.status).toBe(200);
  expect(await endOf(answer)).toBe("broken off");
});

test("an engine that hangs up before it answers is a 502 in OpenAI's form that names the door", async () => {
  const { ask } = await doorTo((socket) => socket.on("data", () => socket.destroy()));
  const answer = await ask("/v1/completions", { method: "POST", body: "{}" });
  expect(answer.status).toBe(502);
  expect(answer.headers.get("x-llmgw-refused")).toBe("engine-closed");
  expect(await answer.json()).toMatchObject({ error: { type: "server_error" } });
});

test("when the door cuts, what is in flight ends visibly, answered or not", async () => {
  let asked = 0;
  const { ask, door } = await doorTo((socket) =>
    socket.on("data", (data) => {
      asked += 1;
      if (data.toString().includes("stream")) socket.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n");
    }),
  );
  const stream = await ask("/stream");
  const ends = Promise.allSettled([stream.text(), ask("/silent")]);
  await until("both to be in the engine", () => asked === 2);
  door.cut();
  expect((await ends).map((end) => end.status)).toEqual(["rejected", "rejected"]);
});

test("a reader that stalls holds the engine back", async () => {
  const chunk = Buffer.alloc(65_536, "x");
  const wanted = 200 * 1024 * 1024;
  let sent = 0;
  const { port } = await doorTo((socket) =>
    socket.once("data", () => {
      socket.write(`HTTP/1.1 200 OK\r\ncontent-length: ${wanted}\r\n\r\n`);
      const more = () => {
        while (sent < wanted) {
          sent += chunk.length;
          if (!socket.write(chunk)) return;
        }
      };
      socket.on("drain", more);
      more();
    }),
  );
  const reader = await raw(port);
  reader.pause();
  reader.write(`GET /big HTTP/1.1\r\nhost: door\r\nx-llmgw-attempt: ${ATTEMPT}\r\n\r\n`);
  await until("the answer to begin", () => sent > 0);
  expect(await settled(() => sent)).toBeLessThan(32 * 1024 * 1024);
});

test("an engine that does not read holds the sender back", async () => {
  const { port, taken } = await doorTo((socket) => socket.pause());
  const sender = await raw(port);
  const body = Buffer.alloc(64 * 1024 * 1024, "x");
  sender.write(`POST /big HTTP/1.1\r\nhost: door\r\nx-llmgw-attempt: ${ATTEMPT}\r\ncontent-length: ${body.length}\r\n\r\n`);
  sender.write(body);
  await until("the body to begin", () => taken.bytes > 0);
  expect(await settled(() => taken.bytes)).toBeLessThan(8 * 1024 * 1024);
});

test("an answer is owed while the next step is the engine's", async () => {
  const played = new Set<Socket>();
  const { ask, door, port, taken } = await doorTo((socket) => {
    played.add(socket);
    socket.resume();
  });
  const say = (text: string) => [...played].forEach((socket) => socket.write(text));
  expect(door.owed).toBe(0);
  const asked = ask("/v1/completions", { method: "POST", body: "{}" });
  await until("the engine to owe an answer", () => door.owed === 1);
  say("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n");
  const answer = await asked;
  expect(door.owed).toBe(1);
  say("0\r\n\r\n");
  await answer.text();
  await until("nothing to be owed", () => door.owed === 0);
  played.clear();

  const sender = await raw(port);
  const before = taken.bytes;
  sender.write(`POST /slow HTTP/1.1\r\nhost: door\r\nx-llmgw-attempt: ${ATTEMPT}\r\ncontent-length: 4\r\n\r\n`);
  sender.write("{}");
  await until("half of the body", () => taken.bytes === before + 2 && played.size === 1);
  expect(door.owed).toBe(0);
  sender.write("{}");
  await until("the whole body", () => door.owed === 1);
  sender.destroy();
  await until("its client to be gone", () => door.owed === 0);
});

test("an answer that waits for its client is not owed, one that the engine will not hear of is", async () => {
  const chunk = Buffer.alloc(65_536, "x");
  const { door, port } = await doorTo((socket) =>
    socket.once("data", (head) => {
      if (head.toString().startsWith("POST")) socket.pause();
      else {
        socket.write("HTTP/1.1 200 OK\r\ncontent-length: 209715200\r\n\r\n");
        const more = () => {
          while (socket.write(chunk));
        };
        socket.on("drain", more);
        more();
      }
    }),
  );
  const reader = await raw(port);
  reader.pause();
  reader.write(`GET /big HTTP/1.1\r\nhost: door\r\nx-llmgw-attempt: ${ATTEMPT}\r\n\r\n`);
  await until("the answer to wait for its client", async () => {
    const seen: number[] = [];
    for (let look = 0; look < 20; look += 1) seen.push(await Bun.sleep(10).then(() => door.owed));
    return seen.every((owed) => owed === 0) && reader.readableLength > 0;
  });
  reader.destroy();
  const sender = await raw(port);
  const body = Buffer.alloc(64 * 1024 * 1024, "x");
  sender.write(`POST /big HTTP/1.1\r\nhost: door\r\nx-llmgw-attempt: ${ATTEMPT}\r\ncontent-length: ${body.length}\r\n\r\n`);
  sender.write(body);
  await until("the engine to hold the sender back", () => door.owed === 1);
});

test("a live log shows what was and what comes, and ends with its reader", async () => {
  const { askAsServer, log } = await doorTo(() => {});
  for (const line of ["one", "two", "three"]) log.add(line);
  const gone = new AbortController();
  const answer = await askAsServer("/llmgw/log?lines=2&follow=1", { signal: gone.signal });
  const reader = (answer.body as ReadableStream<Uint8Array>).getReader();
  let seen = "";
  const read = async () => (seen += new TextDecoder().decode((await reader.read()).value));
  while (!seen.includes("three")) await read();
  log.add("four");
  while (!seen.includes("four")) await read();
  expect(seen).toBe("two\nthree\nfour\n");
  gone.abort();
});
