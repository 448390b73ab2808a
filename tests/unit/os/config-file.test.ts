import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { agentConfigHere, loadAgentConfig } from "../../../src/os/config-file.ts";
import { AgentConfig, ServerConfig } from "../../../src/protocol/config.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-config-"));
  const lines = ["servers: [https://10.0.0.1:7443]", "address: 10.0.0.5", "state: state", "log: { format: json }"];
  await writeFile(join(folder, "agent.yaml"), `${lines.join("\n")}\n`);
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const load = (flags: Record<string, unknown>, file: string | null = "agent.yaml") =>
  loadAgentConfig(file && join(folder, file), flags, "/here");

describe("an agent's configuration", () => {
  test("has paths from the file's folder, and defaults for what is not said", async () => {
    expect(await load({})).toEqual({
      servers: ["https://10.0.0.1:7443"],
      address: "10.0.0.5",
      tls: { ca: join(folder, "tls/ca.crt"), cert: join(folder, "tls/node.crt"), key: join(folder, "tls/node.key") },
      state: join(folder, "state"),
      run: "/run/llmgw",
      custody: "auto",
      engine_user: "llmgw-engine",
      log: { level: "info", format: "json" },
    });
  });

  test("a flag replaces what it names and nothing beside it; its path is from the working folder", async () => {
    const config = await load({
      tls: { cert: "new.crt" },
      log: { level: "debug" },
      state: "other",
      servers: ["https://b:1"],
      node: undefined,
    });
    expect(config.tls).toEqual({ ca: join(folder, "tls/ca.crt"), cert: "/here/new.crt", key: join(folder, "tls/node.key") });
    expect(config.log).toEqual({ level: "debug", format: "json" });
    expect([config.state, config.servers]).toEqual(["/here/other", ["https://b:1"]]);
  });

  test("flags alone are enough", async () => {
    const config = await load({ servers: ["https://b:1"], address: "127.0.0.2", tls: { key: "k" } }, null);
    expect(config.tls).toEqual({ ca: "/etc/llmgw/tls/ca.crt", cert: "/etc/llmgw/tls/node.crt", key: "/here/k" });
    expect([config.state, config.run]).toEqual(["/var/lib/llmgw", "/run/llmgw"]);
  });

  test.each<[string, Record<string, unknown>, string]>([
    ["no server", { address: "127.0.0.1" }, "the agent needs --server:"],
    ["no address", { servers: ["https://b:1"] }, "the agent needs --address:"],
    ["a name for an address", { servers: ["https://b:1"], address: "host" }, "--address: an IP address"],
    ["a server without TLS", { servers: ["http://b:1"], address: "127.0.0.1" }, "--server: a server is https"],
  ])("%s is an error that says so", async (_what, flags, place) => {
    const error = await load(flags, null).then(
      () => null,
      (thrown: OperatorError) => thrown,
    );
    expect(error?.code).toBe("E_CONFIG");
    expect(`${error?.message}: ${error?.why}`).toContain(place);
  });
});

test("the agent of this machine is known by its file, and by the defaults where there is none", async () => {
  expect(await agentConfigHere(join(folder, "agent.yaml"))).toEqual(await load({}));
  const { tls, state, servers } = await agentConfigHere(join(folder, "none", "agent.yaml"));
  expect([tls.key, state, servers]).toEqual([join(folder, "none", "tls/node.key"), "/var/lib/llmgw", undefined]);
});

describe("the units of systemd", () => {
  const folders = async (unit: string) => {
    const text = await readFile(join(import.meta.dir, "../../../release/systemd", unit), "utf8");
    const value = (key: string) => new RegExp(`^${key}=(.*)$`, "m").exec(text)?.[1];
    return { state: `/var/lib/${value("StateDirectory")}`, run: `/run/${value("RuntimeDirectory")}` };
  };
  const server = v.parse(ServerConfig, {});
  const agent = v.parse(AgentConfig, { servers: ["https://b:1"], address: "127.0.0.1" });

  test.each([
    ["llmgw-server.service", server],
    ["llmgw-gateway.service", server],
    ["llmgw-agent.service", agent],
  ] as const)("%s makes the folders that are the defaults", async (unit, { state, run }) => {
    expect(await folders(unit)).toEqual({ state, run });
  });

  test("give server and agent folders of their own, as they run as different users and may share a machine", () => {
    expect([server.state, server.run]).not.toEqual([agent.state, agent.run]);
  });
});
