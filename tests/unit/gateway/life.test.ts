// How a gateway process starts, whom it lets in, and how it ends.
import { afterEach, describe, expect, test } from "bun:test";
import { standIn, type Behaviour } from "./door-for-tests.ts";
import { KEY, routeOf, startGateway, type TestGateway } from "./gateway-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";

const toClose: (() => Promise<void>)[] = [];
afterEach(async () => {
  for (const close of toClose.splice(0).toReversed()) await close();
});

async function start(...args: Parameters<typeof startGateway>): Promise<TestGateway> {
  const gateway = await startGateway(...args);
  toClose.push(() => gateway.cleanUp());
  return gateway;
}

async function serve(gateway: TestGateway, behave: Behaviour): Promise<void> {
  const door = await standIn(await gateway.authority.identity("node", "a"), behave);
  toClose.push(() => door.close());
  expect(await gateway.put(1, [routeOf([door.target])])).toBe(true);
}

const models = (gateway: TestGateway, key?: string) =>
  fetch(`${gateway.url}/v1/models`, { headers: key === undefined ? {} : { authorization: `Bearer ${key}` } });

describe("before a server has spoken to it", () => {
  test("it is alive, not ready, and says so to users", async () => {
    const gateway = await start();
    expect((await fetch(`${gateway.url}/livez`)).status).toBe(200);
    const ready = await fetch(`${gateway.url}/readyz?verbose`);
    expect([ready.status, await ready.text()]).toEqual([503, "[-] snapshot\n[+] staying\n"]);
    const answer = await models(gateway, KEY);
    expect(answer.status).toBe(503);
    expect(answer.headers.get("retry-after")).toBe("5");
    expect(await gateway.put(1, [])).toBe(true);
    expect((await fetch(`${gateway.url}/readyz`)).status).toBe(200);
    expect((await models(gateway, KEY)).status).toBe(200);
  });
});

describe("whom it lets in", () => {
  test("everybody where the snapshot says so, on loopback", async () => {
    const gateway = await start({ auth: "none" });
    await gateway.put(1, [], { auth: "none" });
    expect((await models(gateway)).status).toBe(200);
    await gateway.put(2, []);
    expect((await models(gateway)).status).toBe(401);
  });

  test("only keys off loopback, whatever the snapshot says", async () => {
    // Loopback, written so that it does not pass for it.
    const gateway = await start({ insecure_http: true }, "[::ffff:127.0.0.1]");
    await gateway.put(1, [], { auth: "none" });
    expect((await models(gateway)).status).toBe(401);
    expect((await models(gateway, KEY)).status).toBe(200);
  });

  test.each([[{}], [{ auth: "none", insecure_http: true }]])("it does not start off loopback with %j", async (more) => {
    expect(startGateway(more, "0.0.0.0")).rejects.toThrow("E_CONFIG");
  });

  test("who speaks TLS, where it has a certificate for users", async () => {
    const gateway = await start({ tls: { cert: "gateway-tls.crt", key: "gateway-tls.key" } });
    expect(gateway.url).toStartWith("https:");
    await gateway.put(1, []);
    const tls = { ca: gateway.authority.ca.cert };
    const answer = await fetch(`${gateway.url}/v1/models`, { headers: { authorization: `Bearer ${KEY}` }, tls });
    expect(answer.status).toBe(200);
    expect(fetch(gateway.url.replace("https:", "http:"))).rejects.toThrow();
  });
});

describe("its end", () => {
  /** A stream that goes on until the test says so. */
  async function streaming(gateway: TestGateway): Promise<{ finish: () => void; text: Promise<string> }> {
    let finish = () => {};
    await serve(gateway, (_request, response) => {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.write("data: 1\n\n");
      finish = () => response.end("data: [DONE]\n\n");
    });
    const answer = await gateway.post("/v1/chat/completions", { model: "demo" });
    return { finish: () => finish(), text: answer.text() };
  }
  const ended = (gateway: TestGateway) => until("its end", () => gateway.child.exitCode !== null || gateway.child.signalCode !== null);

  test("on SIGTERM it takes nothing new, lets what runs end, and exits with 0", async () => {
    const gateway = await start();
    const { finish, text } = await streaming(gateway);
    gateway.child.kill("SIGTERM");
    await until("it to take nothing new", () =>
      fetch(`${gateway.url}/livez`, { keepalive: false }).then(
        () => false,
        () => true,
      ),
    );
    expect((await gateway.status()).in_flight).toBe(1);
    finish();
    expect(await text).toBe("data: 1\n\ndata: [DONE]\n\n");
    await ended(gateway);
    expect(gateway.child.exitCode).toBe(0);
  });

  test("a second SIGTERM ends it at once", async () => {
    const gateway = await start();
    const { text } = await streaming(gateway);
    text.catch(() => {});
    gateway.child.kill("SIGTERM");
    await until("it to know", () => gateway.log().includes("gateway is ending"));
    gateway.child.kill("SIGTERM");
    await ended(gateway);
    expect(gateway.child.exitCode).toBe(1);
    expect(text).rejects.toThrow();
  });
});
