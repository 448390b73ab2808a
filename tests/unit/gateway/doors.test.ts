import { afterEach, describe, expect, test } from "bun:test";
import { createServer, type AddressInfo } from "node:net";
import { Doors, type UpstreamOutcome } from "../../../src/gateway/upstream.ts";
import type { AnswerBody } from "../../../src/gateway/exchange.ts";
import type { Target } from "../../../src/protocol/gateway-api.ts";
import { UPSTREAM_CONNECT_MS } from "../../../src/protocol/limits.ts";
import type { Revocation } from "../../../src/protocol/plan.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";
import { oddBytes, standIn, type Behaviour, type StandIn } from "./door-for-tests.ts";

const authority = await testAuthority();
const gateway = await authority.identity("gateway", "gw");
const node = await authority.identity("node", "n1");

const toClose: (() => unknown)[] = [];
afterEach(async () => {
  for (const close of toClose.splice(0)) await close();
});

async function door(behave: Behaviour, identity = node): Promise<StandIn> {
  const it = await standIn(identity, behave, { node: "n1" });
  toClose.push(() => it.close());
  return it;
}

function doors(revocations: Revocation[] = []): Doors {
  const it = new Doors({ identity: gateway, revocations: () => revocations });
  toClose.push(() => it.close());
  return it;
}

const send = (from: Doors, target: Target, body: Uint8Array = Buffer.from("{}"), signal = new AbortController().signal) =>
  from.send(target, { method: "POST", path: "/v1/x?y=1", headers: new Headers({ "x-a": "1" }), body, signal });

async function all(body: AnswerBody): Promise<Buffer> {
  const pieces: Uint8Array[] = [];
  for (let piece = await body.read(); piece !== null; piece = await body.read()) pieces.push(piece);
  return Buffer.concat(pieces);
}

async function textOf(outcome: UpstreamOutcome): Promise<string> {
  if (outcome.kind === "failed") throw new Error(outcome.why);
  return (await all(outcome.answer.body)).toString();
}

const answerOk: Behaviour = (_request, response) => response.writeHead(200, { "content-length": "2" }).end("ok");

describe("a door that is the one meant", () => {
  test("gets method, path, headers, attempt and body as they are", async () => {
    const it = await door((request, response, body) => {
      const { method, url, headers } = request;
      response.end(JSON.stringify({ method, url, a: headers["x-a"], attempt: headers["x-llmgw-attempt"], body: body.toString("base64") }));
    });
    const body = oddBytes(1_000);
    expect(JSON.parse(await textOf(await send(doors(), it.target, body)))).toEqual({
      method: "POST",
      url: "/v1/x?y=1",
      a: "1",
      attempt: it.target.attempt,
      body: body.toString("base64"),
    });
  });

  test("keeps its connection for the next request, also when the answer is in chunks or the door's own refusal", async () => {
    const behaviours: Behaviour[] = [
      answerOk,
      (_request, response) => void (response.write("a"), response.end("b")),
      (_request, response) => response.writeHead(503, { "x-llmgw-refused": "not-ready" }).end("{}"),
      answerOk,
    ];
    const it = await door((request, response, body) => behaviours.shift()?.(request, response, body));
    const from = doors();
    expect(await textOf(await send(from, it.target))).toBe("ok");
    expect(await textOf(await send(from, it.target))).toBe("ab");
    expect(await send(from, it.target)).toMatchObject({ kind: "failed", unseen: true });
    expect(await textOf(await send(from, it.target))).toBe("ok");
    expect(it.connections.size).toBe(1);
  });

  test("gets one connection for each request at the same time", async () => {
    const waiting: (() => void)[] = [];
    const it = await door((request, response, body) => waiting.push(() => answerOk(request, response, body)));
    const from = doors();
    const asked = Array.from({ length: 20 }, () => send(from, it.target).then(textOf));
    await until("all of them", () => waiting.length === 20);
    for (const answer of waiting) answer();
    expect(new Set(await Promise.all(asked))).toEqual(new Set(["ok"]));
    expect(it.connections.size).toBe(20);
  });

  test("a kept connection the door has closed is not used again", async () => {
    const it = await door(answerOk);
    const from = doors();
    expect(await textOf(await send(from, it.target))).toBe("ok");
    it.cut();
    await Bun.sleep(50);
    expect(await textOf(await send(from, it.target))).toBe("ok");
    expect(it.connections.size).toBe(2);
  });

  test("large bodies cross whole both ways", async () => {
    const sent = oddBytes(12_000_000);
    const it = await door((_request, response, body) => response.end(body));
    const outcome = await send(doors(), it.target, sent);
    if (outcome.kind === "failed") throw new Error(outcome.why);
    expect((await all(outcome.answer.body)).equals(sent)).toBe(true);
  });

  test("sends no more than a little ahead of who reads", async () => {
    let taken = 0;
    const it = await door((_request, response) => {
      const block = oddBytes(65_536);
      const more = () => {
        while (taken < 100_000_000) {
          taken += block.length;
          if (!response.write(block)) return void response.once("drain", more);
        }
        response.end();
      };
      more();
    });
    const outcome = await send(doors(), it.target);
    if (outcome.kind === "failed") throw new Error(outcome.why);
    let before = -1;
    await until("the door to stall", async () => {
      const stalled = taken === before;
      before = taken;
      await Bun.sleep(300);
      return stalled;
    });
    expect(taken).toBeLessThan(32_000_000);
    expect((await all(outcome.answer.body)).length).toBe(taken);
    expect(taken).toBeGreaterThan(100_000_000 - 1);
  });
});

describe("a door that fails", () => {
  test("before the head: the engine may have seen it; in the body: the answer breaks", async () => {
    const silent = await door((request) => request.socket.destroy());
    expect(await send(doors(), silent.target)).toMatchObject({ kind: "failed", unseen: false });
    const cut = await door((request, response) => {
      response.writeHead(200, { "content-length": "10" });
      response.write("12345", () => request.socket.destroy());
    });
    const outcome = await send(doors(), cut.target);
    expect(outcome.kind).toBe("answer");
    expect(textOf(outcome)).rejects.toThrow();
  });

  test("says by its refusal whether the engine can have seen the request", async () => {
    for (const [refusal, unseen] of [
      ["other-attempt", true],
      ["not-ready", true],
      ["engine-closed", false],
    ] as const) {
      const it = await door((_request, response) => response.writeHead(502, { "x-llmgw-refused": refusal }).end("{}"));
      expect(await send(doors(), it.target)).toEqual({ kind: "failed", why: `its door refused: ${refusal}`, unseen });
    }
  });

  test("a request that is given up is gone from the door at once, before and in its answer", async () => {
    let closed = 0;
    const it = await door((request, response) => {
      response.once("close", () => (closed += 1));
      if (request.headers["x-a"] === "1" && closed > 0) response.writeHead(200).flushHeaders();
    });
    const [first, second] = [new AbortController(), new AbortController()];
    const before = send(doors(), it.target, undefined, first.signal);
    await until("the request", () => it.connections.size === 1);
    first.abort(new Error("gone"));
    expect(before).rejects.toThrow("gone");
    await until("the door to know", () => closed === 1, 1_000);
    const outcome = await send(doors(), it.target, undefined, second.signal);
    second.abort(new Error("gone"));
    expect(textOf(outcome)).rejects.toThrow("gone");
    await until("the door to know", () => closed === 2, 1_000);
  });
});

describe("nothing is sent to", () => {
  const unseen = async (from: Doors, target: Target, why: RegExp) => {
    const outcome = await send(from, target);
    expect(outcome).toMatchObject({ kind: "failed", unseen: true });
    expect(outcome.kind === "failed" ? outcome.why : "").toMatch(why);
  };

  test("whoever is not the node that is meant", async () => {
    const other = await testAuthority("another");
    const wrong: [string, Awaited<ReturnType<typeof authority.identity>>, RegExp][] = [
      ["another node", await authority.identity("node", "n2"), /node n2/],
      ["a server of that name", await authority.identity("server", "n1"), /server n1/],
      ["another authority's", await other.identity("node", "n1"), /not trusted/],
      ["expired", await authority.identity("node", "n1", { days: 1 }, Date.now() - 3 * 86_400_000), /not trusted/],
    ];
    for (const [name, identity, why] of wrong) {
      let asked = 0;
      const it = await door(() => (asked += 1), identity);
      await unseen(doors(), it.target, why);
      expect([name, asked]).toEqual([name, 0]);
    }
  });

  test("a node whose certificate lists no address at all is still who it says", async () => {
    const it = await door(answerOk, await authority.identity("node", "n1", { ips: [], dns: [] }));
    expect(await textOf(await send(doors(), it.target))).toBe("ok");
  });

  test("a node that was revoked, also over a kept connection", async () => {
    const it = await door(answerOk);
    const revocations: Revocation[] = [];
    const from = doors(revocations);
    expect(await textOf(await send(from, it.target))).toBe("ok");
    revocations.push({ name: "n1", until_ms: Date.now() });
    await unseen(from, it.target, /revoked/);
  });

  test("a kept connection of another node at the same address", async () => {
    const it = await door(answerOk);
    const from = doors();
    expect(await textOf(await send(from, it.target))).toBe("ok");
    await unseen(from, { ...it.target, node: "n2" }, /node n1/);
  });

  test("nobody, or one who is silent: it is told in bounded time", async () => {
    const silent = createServer(() => {});
    await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
    toClose.push(() => silent.close());
    const { port } = silent.address() as AddressInfo;
    const gone = await door(answerOk);
    await gone.close();
    await unseen(doors(), gone.target, /cannot reach/);
    const began = Date.now();
    await unseen(doors(), { ...gone.target, port }, /no connection within/);
    expect(Date.now() - began).toBeLessThan(UPSTREAM_CONNECT_MS + 2_000);
  }, 15_000);
});
