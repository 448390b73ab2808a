import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { keepSession, reconnectWait_ms, ServerLink } from "../../../src/agent/link.ts";
import { makeLog } from "../../../src/os/log.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import type { ErrorCode } from "../../../src/protocol/errors.ts";
import { RECONNECT_MAX_MS } from "../../../src/protocol/limits.ts";
import { testAuthority } from "../pki/authority-for-tests.ts";
import type { TestAuthority } from "../pki/authority-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";
import { testServer } from "./server-for-tests.ts";
import type { TestServer } from "./server-for-tests.ts";

const none = new AbortController().signal;
let authority: TestAuthority;
let server: TestServer;

beforeEach(async () => {
  authority = await testAuthority();
  server = await testServer(await authority.identity("server", "control"));
});
afterEach(() => server.close());

const link = async (url: string, from = authority) => new ServerLink(makeDialer(await from.identity("node", "a")), url, "a");
const ended = (promise: Promise<unknown>): Promise<OperatorError> =>
  promise.then(
    () => Promise.reject(new Error("it went well")),
    (error: OperatorError) => error,
  );

describe("a link to a server", () => {
  test("carries the server's own error", async () => {
    const error = await ended((await link(server.url)).poll({ session: "old", have: { epoch: 0, generation: 0 } }, none));
    expect(error).toMatchObject({ code: "E_STALE_SESSION", message: "join again" });
  });

  test("tells nobody anything who is not a server of its authority", async () => {
    const others = await testAuthority();
    const impostors: [TestAuthority, "gateway" | "node" | "server"][] = [
      [authority, "node"],
      [others, "server"],
    ];
    for (const [signer, role] of impostors) {
      const impostor = await testServer(await signer.identity(role, "control"));
      const error = await ended((await link(impostor.url)).poll({ session: "s", have: { epoch: 0, generation: 0 } }, none));
      expect(["E_TLS", "E_IDENTITY"]).toContain(error.code);
      await impostor.close();
    }
  });

  test("says that nobody answers, and ends at once when it is no longer wanted", async () => {
    const gone = await ended((await link("https://127.0.0.1:1")).poll({ session: "s", have: { epoch: 0, generation: 0 } }, none));
    expect(gone.code).toBe("E_UNREACHABLE");
    const over = new AbortController();
    const held = (await link(server.url)).poll({ session: "", have: { epoch: 0, generation: 0 } }, over.signal);
    over.abort(new Error("no longer"));
    expect((await ended(held)).message).toBe("no longer");
  });

  test("an answer that is none of the protocol is an error, not a plan", async () => {
    const odd = await testServer(await authority.identity("server", "control"));
    odd.plan([{ nonsense: true } as never]);
    const error = await ended((await link(odd.url)).poll({ session: "", have: { epoch: 0, generation: 0 } }, none));
    expect(error.code).toBe("E_BAD_REQUEST");
    await odd.close();
  });
});

describe("keeping a session", () => {
  /** Sessions with servers a and b that go as told; what was tried and logged. */
  async function keep(goes: (server: string, turn: number) => OperatorError | "joins") {
    const over = new AbortController();
    const tried: { server: string; at: number }[] = [];
    const lines: string[] = [];
    const log = makeLog({ level: "warn", format: "text", write: (line) => lines.push(line) });
    const kept = keepSession(
      ["a", "b"],
      async (name, joined) => {
        tried.push({ server: name, at: performance.now() });
        const how = goes(name, tried.length);
        if (how !== "joins") throw how;
        joined();
        await new Promise((_resolve, reject) => over.signal.addEventListener("abort", () => reject(over.signal.reason as Error)));
      },
      log,
      over.signal,
    );
    return { tried, lines, over, kept };
  }
  const fault = (code: ErrorCode) => new OperatorError(code, "no", "the test says so", "wait");

  test("turns to the next server when one fails, and ends at once", async () => {
    const { tried, lines, over, kept } = await keep((name) => (name === "a" ? fault("E_UNREACHABLE") : "joins"));
    await until("a session", () => tried.length === 2);
    expect(tried.map((each) => each.server)).toEqual(["a", "b"]);
    expect((tried[1]?.at ?? 0) - (tried[0]?.at ?? 0)).toBeGreaterThan(200);
    expect(lines).toHaveLength(1);
    over.abort();
    await kept;
  });

  test.each<ErrorCode>(["E_REVOKED", "E_IDENTITY", "E_DUPLICATE_NODE"])(
    "%s: says so once, and does not knock again at once",
    async (code) => {
      const { tried, lines, over, kept } = await keep(() => fault(code));
      await until("a first try", () => lines.length === 1);
      expect(lines[0]).toContain(code);
      await Bun.sleep(1_000);
      expect(tried).toHaveLength(1);
      const before = performance.now();
      over.abort();
      await kept;
      expect(performance.now() - before).toBeLessThan(500);
    },
  );

  test("waits grow, are bounded, and differ between agents", () => {
    const waits = Array.from({ length: 12 }, (_, failures) => reconnectWait_ms(failures, false, 0));
    expect(waits.every((wait, index) => index === 0 || wait >= (waits[index - 1] ?? 0))).toBe(true);
    expect([waits[0], Math.max(...waits)]).toEqual([500, RECONNECT_MAX_MS]);
    expect(reconnectWait_ms(0, true, 0)).toBe(RECONNECT_MAX_MS);
    expect(reconnectWait_ms(3, false, 1)).toBe(reconnectWait_ms(3, false, 0) / 2);
  });
});
