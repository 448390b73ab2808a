// A dialer against servers that are not who was meant: each is told apart, and not one byte of the request reaches it.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import type { AddressInfo } from "node:net";
import { createServer } from "node:tls";
import type { Server } from "node:tls";
import { makeDialer } from "../../../src/pki/dial.ts";
import type { DialerOptions } from "../../../src/pki/dial.ts";
import { CLIENT_AUTH, SERVER_AUTH } from "../../../src/pki/certificate.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import { issued, oddCertificate, testAuthority } from "./authority-for-tests.ts";
import type { TestAuthority } from "./authority-for-tests.ts";

const DAY_MS = 86_400_000;
const SECRET = "this must not be read by anyone else";
let ours: TestAuthority;
/** Its name is the same as ours. */
let theirs: TestAuthority;
let gateway: Identity;

beforeAll(async () => {
  [ours, theirs] = await Promise.all([testAuthority(), testAuthority()]);
  gateway = await ours.identity("gateway", "gateway");
});

/** A server that shows this certificate, takes any client, and writes down what it is told. */
class Listener {
  heard = "";
  readonly server: Server;

  constructor({ cert, key }: { readonly cert: string; readonly key: string }) {
    this.server = createServer({ cert, key, ca: ours.ca.cert, requestCert: true, rejectUnauthorized: false }, (socket) => {
      socket.on("error", () => undefined);
      socket.on("data", (data) => {
        this.heard += data.toString();
        if (this.heard.endsWith(SECRET)) socket.end("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
      });
    });
    this.server.on("tlsClientError", () => undefined);
  }

  /** Tells it the secret, if it is node n1. */
  async tell(options: DialerOptions = {}): Promise<Response> {
    await new Promise<void>((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    const url = `https://127.0.0.1:${(this.server.address() as AddressInfo).port}/secret`;
    const init = { method: "POST", headers: { authorization: SECRET }, body: SECRET, expect: { role: "node", name: "n1" } } as const;
    try {
      return await makeDialer(gateway, options).request(url, init);
    } finally {
      await Bun.sleep(20);
      this.server.close();
    }
  }
}

interface Wrong {
  readonly what: string;
  readonly shown: () => Promise<{ readonly cert: string; readonly key: string }>;
  readonly code: "E_TLS" | "E_IDENTITY";
  /** Words of why or remedy. */
  readonly says: string;
}

const WRONG: readonly Wrong[] = [
  { what: "of another authority of the same name", shown: () => issued(theirs.ca, "node", "n1"), code: "E_TLS", says: "same CA file" },
  {
    what: "that signed itself",
    shown: () => oddCertificate(null, { subject: "O=llmgw:node, CN=n1", usages: [SERVER_AUTH] }),
    code: "E_TLS",
    says: "same CA file",
  },
  {
    what: "whose certificate a node issued",
    shown: async () => {
      const rogue = await issued(ours.ca, "node", "rogue");
      const forged = await issued(rogue, "node", "n1");
      return { cert: forged.cert + rogue.cert, key: forged.key };
    },
    code: "E_TLS",
    says: "is not trusted",
  },
  {
    what: "whose certificate expired",
    shown: () => issued(ours.ca, "node", "n1", { days: 1 }, Date.now() - 3 * DAY_MS),
    code: "E_TLS",
    says: "clocks",
  },
  {
    what: "whose certificate is not yet valid",
    shown: () => issued(ours.ca, "node", "n1", {}, Date.now() + 3 * DAY_MS),
    code: "E_TLS",
    says: "clocks",
  },
  {
    what: "whose certificate is for clients",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=n1", usages: [CLIENT_AUTH] }),
    code: "E_TLS",
    says: "",
  },
  {
    what: "whose certificate states no use",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=n1" }),
    code: "E_TLS",
    says: "not meant for servers",
  },
  { what: "of another name", shown: () => issued(ours.ca, "node", "n2"), code: "E_IDENTITY", says: "node n2" },
  {
    what: "of another name that lists this one",
    shown: () => issued(ours.ca, "node", "n2", { dns: ["n1"] }),
    code: "E_IDENTITY",
    says: "node n2",
  },
  { what: "of another role", shown: () => issued(ours.ca, "server", "n1"), code: "E_IDENTITY", says: "server n1" },
];

describe("a dialer tells nothing to a server", () => {
  test.each(WRONG.map((wrong) => [wrong.what, wrong] as const))("%s", async (_what, { shown, code, says }) => {
    const listener = new Listener(await shown());
    const error = await listener.tell().then(
      () => "answered",
      (thrown: OperatorError) => thrown,
    );
    expect(error).toMatchObject({ code });
    const { message, why, remedy } = error as OperatorError;
    expect(`${message}\n${why}\n${remedy}`).toContain(says);
    expect(listener.heard).toBe("");
  });

  test("that was revoked, or whose dates are wrong by its own clock", async () => {
    const cases: readonly DialerOptions[] = [
      { revocations: () => [{ name: "n1", until_ms: Date.now() }] },
      { now: () => Date.now() + 31 * DAY_MS },
      { now: () => Date.now() - 2 * DAY_MS },
    ];
    for (const options of cases) {
      const listener = new Listener(await issued(ours.ca, "node", "n1", {}, Date.now() - 1_000));
      expect(await listener.tell(options).catch((error: unknown) => error)).toMatchObject({ code: "E_TLS" });
      expect(listener.heard).toBe("");
    }
  });

  test("but all of it to the one that was meant, wherever it is", async () => {
    const listener = new Listener(await issued(ours.ca, "node", "n1", { ips: ["10.9.8.7"], dns: [] }));
    expect(await (await listener.tell()).text()).toBe("ok");
    expect(listener.heard).toContain("POST /secret");
    expect(listener.heard).toEndWith(SECRET);
  });
});

describe("a dialer's requests to one address", () => {
  let door: Bun.Server<undefined>;
  beforeAll(async () => {
    const { cert, key } = await issued(ours.ca, "node", "n1");
    let asked = 0;
    const fetch = async (request: Request) => {
      asked += 1;
      if (new URL(request.url).pathname === "/echo") return new Response(request.body);
      return new Response(String(asked));
    };
    door = Bun.serve({
      hostname: "127.0.0.1",
      port: 0,
      tls: { cert, key, ca: ours.ca.cert, requestCert: true, rejectUnauthorized: true },
      fetch,
    });
  });
  afterAll(() => door.stop(true));

  test("are each judged by what they expect, also side by side and after one that was right", async () => {
    const dialer = makeDialer(gateway);
    const url = `https://127.0.0.1:${door.port}/`;
    const ask = (name: string) =>
      dialer.request(url, { expect: { role: "node", name } }).then(
        (response) => response.text().then(() => "answered"),
        (error: OperatorError) => error.code,
      );
    expect(await ask("n1")).toBe("answered");
    expect(await ask("n2")).toBe("E_IDENTITY");
    const names = Array.from({ length: 20 }, (_, index) => (index % 2 === 0 ? "n1" : "n2"));
    expect(await Promise.all(names.map(ask))).toEqual(names.map((name) => (name === "n1" ? "answered" : "E_IDENTITY")));
    expect(await ask("n1")).toBe("answered");
    // Only those that were right arrived.
    expect(await (await dialer.request(url, { expect: { role: "node" } })).text()).toBe("13");
  });

  test("stream their bodies both ways, and end when aborted", async () => {
    const dialer = makeDialer(gateway);
    const url = `https://127.0.0.1:${door.port}/echo`;
    const abort = new AbortController();
    let send: (text: string) => void = () => undefined;
    const body = new ReadableStream<Uint8Array>({
      start: (controller) => {
        send = (text) => controller.enqueue(new TextEncoder().encode(text));
      },
    });
    send("one");
    const response = await dialer.request(url, { method: "POST", body, signal: abort.signal, expect: { role: "node", name: "n1" } });
    const reader = (response.body as ReadableStream<Uint8Array>).getReader();
    const hear = async () => new TextDecoder().decode((await reader.read()).value);
    expect(await hear()).toBe("one");
    send("two");
    expect(await hear()).toBe("two");
    abort.abort(new Error("enough"));
    expect(await reader.read().catch((error: unknown) => String(error))).toContain("enough");
  });
});
