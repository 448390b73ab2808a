// A node is taken out of the fleet, in use or not, living or dead, and its certificate with it.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { NodeList, type NodeView } from "../../src/protocol/admin-api.ts";
import { parseAs } from "../../src/protocol/errors.ts";
import { Fleet } from "./fleet.ts";

const TEST_MS = 120_000;
let fleet: Fleet;

beforeAll(async () => {
  fleet = await Fleet.start({ nodes: 3, models: [{ name: "m", engine: "sim", replicas: 1 }] });
  await fleet.ready("m");
}, TEST_MS);
afterAll(() => fleet?.stop());

const nodes = async (): Promise<readonly NodeView[]> => parseAs(NodeList, await fleet.ctl("nodes"), "the nodes").items;
const holder = async (): Promise<string> => {
  const [replica] = (await fleet.replicas()).filter(({ state }) => state === "ready");
  return replica?.ranks[0]?.node ?? "";
};
const refusal = (...words: string[]) => fleet.must("ctl", "node", "remove", ...words).then(() => "", String);

test(
  "a revoked node is listed as refused; with a new certificate in place its agent comes back by itself, and its engine serves on",
  async () => {
    const node = await holder();
    const serving = await fleet.enginePids("m");
    const state = async () => (await nodes()).find(({ id }) => id === node)?.state;
    await fleet.must("ctl", "revoke", node);
    expect(await state()).toBe("refused");
    const address = fleet.addresses[fleet.nodes.indexOf(node)] ?? "";
    await fleet.issue("issue-node", node, "--ip", address, "--out", join(fleet.folder, node, "tls"));
    await fleet.waitFor("the node to be back", async () => (await state()) === "ready", 60_000);
    expect(await fleet.enginePids("m")).toEqual(serving);
    expect(await holder()).toBe(node);
  },
  TEST_MS,
);

test(
  "a node in use is not removed unless forced; then its replica runs elsewhere, and its agent is refused",
  async () => {
    const node = await holder();
    expect(await refusal(node)).toContain(`llmgw ctl drain ${node}`);
    expect(await refusal(`${node}x`)).toContain("there is no node");
    await fleet.must("ctl", "node", "remove", node, "--force", "--dry-run");
    expect((await nodes()).map(({ id }) => id)).toContain(node);
    const [engine] = await fleet.enginePids("m");
    await fleet.must("ctl", "node", "remove", node, "--force");
    expect((await nodes()).map(({ id }) => id)).not.toContain(node);
    await fleet.waitFor("a replica elsewhere", async () => !["", node].includes(await holder()));
    await fleet.waitFor(
      "its engine to end",
      async () =>
        !(
          await Bun.file(`/proc/${engine}/cmdline`)
            .text()
            .catch(() => "")
        ).includes("sim-engine"),
    );
    await fleet.waitFor("its agent to be refused", async () => (await fleet.log(node)).includes("no session with the server"));
    expect((await nodes()).map(({ id }) => id)).not.toContain(node);
  },
  TEST_MS,
);

test(
  "a node that is dead is removed by force at once, with what ran there, and stays removed over a restart",
  async () => {
    const node = await holder();
    await fleet.signal(node, "SIGKILL");
    await fleet.must("ctl", "node", "remove", node, "--force");
    await fleet.waitFor("a replica on the last node", async () => !["", node].includes(await holder()));
    await fleet.signal("server", "SIGTERM");
    fleet.startServer();
    await fleet.waitFor("the server", () =>
      nodes().then(
        (found) => found.length === 1,
        () => false,
      ),
    );
    fleet.startAgent(node);
    await fleet.waitFor("its agent to be refused", async () => (await fleet.log(node)).includes("no session with the server"));
    expect((await nodes()).map(({ id }) => id)).not.toContain(node);
  },
  TEST_MS,
);
