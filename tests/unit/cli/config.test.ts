import { expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { configCommands, recognise } from "../../../src/cli/config.ts";
import { dispatch } from "../../../src/cli/frame.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";

test.each([
  ["models: []", "catalog"],
  ["listen: {}", "server"],
  ["servers: [https://a:1]\naddress: 10.0.0.1", "agent"],
  ["log: {}", null],
  ["models: []\nlisten: {}", null],
  ["pve_host: https://pve1", "provision"],
  ["[1", null],
  ["3", null],
])("%j is of kind %s", (text, kind) => {
  expect(recognise(text)).toBe(kind as ReturnType<typeof recognise>);
});

/** What `llmgw config check` says of a file. */
async function faultOf(text: string): Promise<OperatorError | null> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-check-"));
  try {
    await Bun.write(join(folder, "file.yaml"), text);
    const io = { out: () => {}, err: () => {}, isTerminal: false, isErrTerminal: false, color: false, env: {}, cwd: folder };
    return await dispatch(configCommands, ["check", join(folder, "file.yaml")], io).then(
      () => null,
      (thrown: OperatorError) => thrown,
    );
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

test.each([
  ['listen: { gateway: "0.0.0.0:8080" }', "in clear"],
  ["gateway: { auth: none }\nlisten: { gateway: 10.0.0.2:8080 }", "loopback only"],
  ["servers: [https://a:1]\naddress: 10.0.0.1\nfabrics: [IB!]", "is no name"],
  ["models: [{ name: a, engine: llamacpp, source: /m, nodes: 2 }]", "llamacpp runs on one node"],
  ["models: [{ name: a, engine: vllm, source: /m, args: { hos: 0.0.0.0 } }]", "model a: args may not set hos, it means --host"],
  ["models: [{ name: a, engine: sglang, source: /m, context: 5, args: { context-length: 6 } }]", "beside context"],
])("%j reads well, but no program would start from it", async (text, why) => {
  expect(await faultOf(text)).toMatchObject({ code: "E_CONFIG", why: expect.stringContaining(why) });
});

test("what every report of a rank would have to carry is bounded", async () => {
  const entry = (args: string) => `models: [{ name: a, engine: sim, args: { chat-template: "${args}" } }]`;
  expect(await faultOf(entry("x".repeat(10_000)))).toBeNull();
  expect(await faultOf(entry("x".repeat(1_000_000)))).toMatchObject({ code: "E_CONFIG" });
  expect(await faultOf(`models: [{ name: a, engine: llamacpp, source: "/${"x".repeat(5_000)}" }]`)).toMatchObject({ code: "E_CONFIG" });
});

test("a file for new machines is checked, too", async () => {
  expect(await faultOf("pve_host: https://pve1:8006\ncores: 4\n")).toBeNull();
  expect(await faultOf("pve_host: https://pve1:8006\nbridge: 'vmbr0; x'\n")).toMatchObject({ code: "E_CONFIG" });
});

test("a value that no program can be given is refused where it is written", async () => {
  const fault = await faultOf('models: [{ name: a, engine: sim, args: { chat-template: "a\\0b" } }]');
  expect(fault?.message).toMatch(/:1:\d+: models\.0\.args\.chat-template: no argument of a program can hold a NUL character/);
});
