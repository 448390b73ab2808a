// The real gateway process before doors without an engine: what it passes on, what it keeps, what it says when they fail.
import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { connect } from "node:net";
import { gzipSync } from "node:zlib";
import { oddBytes, standIn, type Behaviour, type StandIn } from "./door-for-tests.ts";
import { KEY, routeOf, startGateway, type TestGateway } from "./gateway-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";

let gateway: TestGateway;
let generation = 0;
const toClose: (() => Promise<void>)[] = [];
beforeAll(async () => {
  gateway = await startGateway();
});
afterAll(() => gateway.cleanUp());
afterEach(async () => {
  for (const close of toClose.splice(0)) await close();
});

async function doors(...behaviours: Behaviour[]): Promise<StandIn[]> {
  const identity = await gateway.authority.identity("node", "a");
  const made = await Promise.all(behaviours.map((it, at) => standIn(identity, it, { replica: `demo-${"abcd"[at]?.repeat(5)}` })));
  toClose.push(...made.map((it) => () => it.close()));
  generation += 1;
  expect(await gateway.put(generation, [routeOf(made.map((it) => it.target))])).toBe(true);
  return made;
}

const CHAT = '{ "messages":[],\t"model" : "demo", "odd": "\\u00e9\u00e9" }';
const ask = (init: RequestInit = {}) => gateway.post("/v1/chat/completions?x=%20y", CHAT, init);
const errorOf = async (answer: Response) =>
  ((await answer.json()) as { error: { code: string; type: string; message: string; param: string | null } }).error;
const idle = () => until("nothing in flight", async () => (await gateway.status()).in_flight === 0);

/** What comes back for these bytes until the gateway ends the connection, or `until_text` has come. */
function raw(text: string | Uint8Array, until_text?: string): Promise<string> {
  return new Promise((resolve) => {
    let said = "";
    const socket = connect(Number(new URL(gateway.url).port), "127.0.0.1", () => socket.write(text));
    socket.on("data", (data: Buffer) => {
      said += data.toString("latin1");
      if (until_text !== undefined && said.includes(until_text)) socket.destroy();
    });
    socket.on("error", () => {});
    socket.on("close", () => resolve(said));
  });
}

const post = (more: string, body: string) =>
  `POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ${KEY}\r\n${more}\r\n\r\n${body}`;

describe("bytes pass unchanged", () => {
  test("of the request, less what ends at the gateway", async () => {
    let seen: { body: string; url: string | undefined; headers: NodeJS.Dict<string | string[]> } | null = null;
    const [door] = await doors((request, response, body) => {
      seen = { body: body.toString(), url: request.url, headers: request.headers };
      response.end("{}");
    });
    const headers = {
      authorization: `Bearer ${KEY}`,
      cookie: "a=b",
      "x-api-key": "secret",
      "x-llmgw-attempt": "ffffffffffffffff",
      "x-odd": "kept",
      "x-request-id": "mine-12345678",
    };
    const answer = await ask({ headers });
    expect(answer.status).toBe(200);
    expect(answer.headers.get("x-request-id")).toBe("mine-12345678");
    expect(seen as unknown).toMatchObject({
      body: CHAT,
      url: "/v1/chat/completions?x=%20y",
      headers: { "x-odd": "kept", "x-request-id": "mine-12345678", "x-llmgw-attempt": door?.target.attempt },
    });
    const sent = Object.keys((seen as unknown as { headers: object }).headers);
    expect(sent.filter((name) => ["authorization", "cookie", "x-api-key"].includes(name))).toEqual([]);
  });

  test("of answers: events, compressed ones, with a length or without, small and large", async () => {
    const large = oddBytes(9_500_000);
    const cases: [string, Record<string, string>, Buffer][] = [
      ["events", { "content-type": "text/event-stream" }, Buffer.from('data: {"a":1}\r\n\r\n: ping\n\ndata: [DONE]\n\n')],
      ["compressed", { "content-type": "application/json", "content-encoding": "gzip" }, gzipSync(oddBytes(5_000))],
      ["with a length", { "content-length": "1000" }, oddBytes(1_000)],
      ["large, with a length", { "content-length": String(large.length) }, large],
      ["large, without", { "content-type": "application/octet-stream" }, large],
    ];
    for (const [name, headers, bytes] of cases) {
      await doors((_request, response) => response.writeHead(418, { ...headers, "x-odd": "kept" }).end(bytes));
      const answer = await fetch(`${gateway.url}/v1/completions`, {
        method: "POST",
        headers: { authorization: `Bearer ${KEY}` },
        body: CHAT,
        decompress: false,
      });
      expect([name, answer.status, answer.headers.get("x-odd")]).toEqual([name, 418, "kept"]);
      expect(answer.headers.get("content-encoding")).toBe(headers["content-encoding"] ?? null);
      expect([name, Buffer.from(await answer.arrayBuffer()).equals(bytes)]).toEqual([name, true]);
    }
    await idle();
  });

  test("of a request that comes in chunks", async () => {
    let body = "";
    await doors((_request, response, bytes) => {
      body = bytes.toString();
      response.end("{}");
    });
    const chunks = '5\r\n{"mod\r\nb\r\nel":"demo"}\r\n0\r\n\r\n';
    expect(await raw(post("transfer-encoding: chunked", chunks), "{}")).toStartWith("HTTP/1.1 200 OK");
    expect(body).toBe('{"model":"demo"}');
  });
});

describe("when a door fails", () => {
  test("before its answer: 502, and no other replica gets a request that may have been seen", async () => {
    let asked = 0;
    const fail: Behaviour = (request) => {
      asked += 1;
      request.socket.destroy();
    };
    await doors(fail, fail);
    const answer = await ask();
    expect([answer.status, answer.statusText, (await errorOf(answer)).code]).toEqual([502, "Bad Gateway", "upstream_failed"]);
    expect(asked).toBe(1);
    await idle();
  });

  test("before it passed the request on: another replica answers, or 503 when there is none", async () => {
    const refuse: Behaviour = (_request, response) => response.writeHead(503, { "x-llmgw-refused": "not-ready" }).end("{}");
    await doors(refuse, (_request, response) => response.end("well"));
    for (let round = 0; round < 4; round++) expect(await (await ask()).text()).toBe("well");
    await doors(refuse, refuse);
    const answer = await ask();
    expect(answer.status).toBe(503);
    expect(answer.headers.get("retry-after")).not.toBeNull();
    const { message } = await errorOf(answer);
    expect(message).not.toContain("127.0.0.1");
    await idle();
  });

  test("in an answer that is no event stream: the connection is cut, never an end that looks whole", async () => {
    const half: Behaviour = (request, response) => {
      response.writeHead(200, { "content-type": "application/json" });
      response.write('{"half":', () => setTimeout(() => request.socket.destroy(), 100));
    };
    await doors(half);
    const body = '{"model":"demo"}';
    const said = await raw(post(`content-length: ${body.length}`, body));
    expect(said).toEndWith(`{"half":\r\n`);
    expect(said).not.toContain("error");
    await idle();
    expect(gateway.log()).toContain("a replica broke off its answer");
    expect(gateway.log()).not.toMatch(/^\s+at /m);
  });

  test("in an event stream: what came, then an error event", async () => {
    await doors((request, response) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write('data: {"a":1}\n\ndata: {"b', () => setTimeout(() => request.socket.destroy(), 100));
    });
    const answer = await ask();
    const text = await answer.text();
    expect(text).toStartWith('data: {"a":1}\n\ndata: {"b\n\n');
    expect(JSON.parse(text.trim().split("\n\n").at(-1)?.slice(6) ?? "")).toMatchObject({ error: { code: "upstream_failed" } });
    await idle();
  });
});

describe("clients that are odd", () => {
  test("every answer names its request, whatever the host header says", async () => {
    const { url } = gateway;
    for (const path of ["/livez", "/readyz", "/readyz?verbose", "/metrics", "/v1/models", "/v1/models/demo", "/v1/models/%", "/x", "//x"]) {
      const answer = await fetch(url + path, { headers: { authorization: `Bearer ${KEY}` } });
      expect([path, answer.headers.get("x-request-id")]).toEqual([path, expect.stringMatching(/^req-/)]);
    }
    expect(await raw("GET /livez HTTP/1.1\r\nhost: [bad\r\n\r\n", "ok\n")).toStartWith("HTTP/1.1 200 OK");
  });

  test("a body that is too large is refused in OpenAI's form, announced or not", async () => {
    const announced = await raw(post("content-length: 99999999", "{"), "}}");
    expect(announced).toStartWith("HTTP/1.1 413 ");
    expect(announced).toContain('"code":"request_too_large"');
    const block = `100000\r\n${"x".repeat(0x100000)}\r\n`;
    const chunked = await raw(post("transfer-encoding: chunked", block.repeat(33)), "}}");
    expect(chunked).toStartWith("HTTP/1.1 413 ");
    expect(chunked).toContain('"code":"request_too_large"');
  });

  test("an engine may think for longer than Bun waits; a client that stops in its request is cut", async () => {
    await doors((_request, response) => setTimeout(() => response.end("thought"), 13_000));
    const thought = ask().then((answer) => answer.text());
    const began = Date.now();
    await raw(post("content-length: 100", '{"model"'));
    expect(Date.now() - began).toBeLessThan(20_000);
    expect(await thought).toBe("thought");
  }, 30_000);

  test("one series of metrics stands there once, while an old attempt ends beside the new one", async () => {
    const [old] = await doors(() => {});
    const gone = new AbortController();
    const asked = ask({ signal: gone.signal }).catch(() => null);
    await until("it to be in flight", async () => (await gateway.status()).in_flight === 1);
    const [fresh] = await doors(() => {});
    const second = ask({ signal: gone.signal }).catch(() => null);
    await until("both to be in flight", async () => (await gateway.status()).in_flight === 2);
    expect(fresh?.target.replica).toBe(old?.target.replica ?? "");
    const page = await (await fetch(`${gateway.url}/metrics`, { headers: { authorization: `Bearer ${KEY}` } })).text();
    const series = page
      .split("\n")
      .filter((line) => line !== "" && !line.startsWith("#"))
      .map((line) => line.slice(0, line.lastIndexOf(" ")));
    expect(new Set(series).size).toBe(series.length);
    expect(page).toContain('llmgw_gateway_in_flight{replica="demo-aaaaa"} 2');
    gone.abort();
    await Promise.all([asked, second]);
    await idle();
  });
});

describe("what an engine refuses", () => {
  test("is not held against the replica: one user's wrong wishes leave the others' routing as it was", async () => {
    const served = [0, 0];
    const answers =
      (at: number): Behaviour =>
      (_request, response, body) => {
        if (body.includes("wrong")) response.writeHead(501, { "content-type": "application/json" }).end("{}");
        else response.end(JSON.stringify({ at: (served[at] = (served[at] ?? 0) + 1) }));
      };
    await doors(answers(0), answers(1));
    const wrong = '{"model":"demo","input":"wrong"}';
    for (let i = 0; i < 3; i++) expect((await gateway.post("/v1/embeddings", wrong)).status).toBe(501);
    await Promise.all(Array.from({ length: 10 }, async () => (await ask()).arrayBuffer()));
    expect(served).toEqual([5, 5]);
  });
});
