import { expect, test } from "bun:test";
import { recognise } from "../../../src/cli/config.ts";

test.each([
  ["models: []", "catalog"],
  ["listen: {}", "server"],
  ["servers: [https://a:1]\naddress: 10.0.0.1", "agent"],
  ["log: {}", null],
  ["models: []\nlisten: {}", null],
  ["[1", null],
  ["3", null],
])("%j is of kind %s", (text, kind) => {
  expect(recognise(text)).toBe(kind as ReturnType<typeof recognise>);
});
