import { expect, test } from "bun:test";
import { messageOf } from "../../../src/protocol/errors.ts";

test("what Bun says of a failed fetch is told without its advice for programmers", async () => {
  const closed = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: () => new Response() });
  const url = closed.url.href;
  await closed.stop(true);
  const error: unknown = await fetch(url).catch((thrown: unknown) => thrown);
  expect(messageOf(error)).toMatch(/connect/i);
  expect(messageOf(error)).not.toContain("verbose");
  expect(messageOf(new Error("No route. For more information, pass `verbose: true` in the second argument to fetch()"))).toBe("No route.");
});
