import { expect, test } from "bun:test";
import { newReplica } from "../../../src/core/lifecycle.ts";
import { place } from "../../../src/core/placement.ts";
import { measure } from "../../../src/core/room.ts";
import type { NodeSeen, Replica } from "../../../src/core/world.ts";
import type { SizedModel } from "../../../src/protocol/catalog.ts";
import type { ModelShape } from "../../../src/protocol/model-shape.ts";
import { GiB, modelOf, TestFleet, type NodeShape } from "./fleet-for-tests.ts";

const waiting = (spec: SizedModel, more: Partial<Replica> = {}): Replica => ({ ...newReplica(`${spec.name}-00000`, spec, 0), ...more });

function placed(
  shapes: readonly NodeShape[],
  spec: SizedModel,
  change: (node: NodeSeen) => NodeSeen = (node) => node,
  more: Partial<Replica> = {},
) {
  const fleet = new TestFleet(shapes, []);
  const world = { ...fleet.world(), nodes: fleet.world().nodes.map(change) };
  return place(waiting(spec, more), measure(world, [], fleet.now_ms), 1_000, () => "0000000000000001");
}

const SHAPE: ModelShape = {
  format: "gguf",
  architecture: "llama",
  weights_bytes: 0,
  kv_values: 0,
  window_values: 0,
  window: 0,
  context: 1,
  vocabulary: 0,
  width: 0,
};

const CASES: [string, SizedModel, (node: NodeSeen) => NodeSeen, string, string, string][] = [
  [
    "node-state",
    modelOf("m"),
    (node) => ({ ...node, state: "suspect", state_reason: "silent" }),
    "node-state",
    "a ready node",
    "suspect: silent",
  ],
  [
    "silence",
    modelOf("m"),
    (node) => ({ ...node, ranks: null }),
    "node-state",
    "a ready node",
    "its agent has not spoken to this server yet",
  ],
  ["cordon", modelOf("m"), (node) => ({ ...node, cordon: "repair" }), "cordon", "a node that takes new replicas", "cordoned: repair"],
  ["engine absent", modelOf("m", { engine: "vllm" }), (node) => node, "engine", "engine vllm", "not on this node"],
  [
    "engine refused",
    modelOf("m"),
    (node) => ({
      ...node,
      inventory: {
        ...node.inventory,
        engines: [{ kind: "sim", version: "1", path: "p", origin: "path", offered: false, reason: "it does not run" }],
      },
    }),
    "engine",
    "engine sim",
    "1: it does not run",
  ],
  ["gpus", modelOf("m", { gpus: 3 }), (node) => node, "gpus", "3 GPUs", "2 free of 2"],
  [
    "a GPU others use",
    modelOf("m", { gpus: 2 }),
    (node) => ({
      ...node,
      inventory: {
        ...node.inventory,
        gpus: node.inventory.gpus.map((gpu) => (gpu.index === 0 ? { ...gpu, memory_used: { value: 20 * GiB } } : gpu)),
      },
    }),
    "gpus",
    "2 GPUs",
    "1 free of 2, GPU 0 has 20.0 GiB of 80.0 GiB in use",
  ],
  ["memory", modelOf("m", { memory: 65 * GiB }), (node) => node, "memory", "65.0 GiB of memory", "64.0 GiB"],
  [
    "memory that others use",
    modelOf("m", { memory: 8 * GiB }),
    (node) => ({ ...node, inventory: { ...node.inventory, memory: { total: 64 * GiB, available: 4 * GiB } } }),
    "memory",
    "8.0 GiB of memory",
    "4.0 GiB",
  ],
  [
    "weights that are not there",
    modelOf("m", { source: "/models/m" }),
    (node) => ({ ...node, inventory: { ...node.inventory, weights: [{ name: "/models/m", fault: "ENOENT", shape: null }] } }),
    "weights",
    "/models/m",
    "ENOENT",
  ],
  [
    "weights that are being looked for",
    modelOf("m", { source: "/models/m" }),
    (node) => ({ ...node, inventory: { ...node.inventory, weights: [] } }),
    "weights",
    "/models/m",
    "the node is just looking for it",
  ],
  [
    "GPUs that are too small",
    modelOf("m", { engine: "llamacpp", source: "/m", gpus: 2, shape: { ...SHAPE, weights_bytes: 170 * GiB } }),
    (node) => node,
    "gpu-memory",
    "85.5 GiB on each of 2 GPUs",
    "free ones have 80.0 GiB, 80.0 GiB",
  ],
  [
    "memory by the header",
    modelOf("m", { engine: "llamacpp", source: "/m", shape: { ...SHAPE, weights_bytes: 70 * GiB } }),
    (node) => node,
    "memory",
    "70.3 GiB of memory",
    "64.0 GiB",
  ],
  [
    "disk",
    modelOf("m", { source: "http://x/m", size: 600 * GiB, memory: 1 }),
    (node) => node,
    "disk",
    "600.0 GiB of disk",
    "500.0 GiB in /state",
  ],
];

test.each(CASES)("%s refuses a node, with numbers", (_name, spec, change, filter, needed, available) => {
  const result = placed([{ id: "a", gpus: 2 }], spec, change);
  const named = filter === "engine" || filter === "weights";
  const reason = named ? `no node can take it: ${needed}: ${available}` : "none of 1 nodes has room";
  expect(result).toEqual({ refusals: [{ node: "a", filter, needed, available }], reason });
});

test("what only some nodes lack is no reason for all", () => {
  const spec = modelOf("m", { engine: "llamacpp", source: "/m" });
  const without = (node: NodeSeen): NodeSeen => ({ ...node, inventory: { ...node.inventory, weights: [] } });
  const mixed = (node: NodeSeen): NodeSeen => ({
    ...node,
    inventory: { ...node.inventory, weights: [{ name: "/m", fault: `ENOENT on ${node.id}`, shape: null }] },
  });
  const nodes = [{ id: "a" }, { id: "b" }];
  expect(placed(nodes, spec, without)).toMatchObject({ reason: "no node can take it: /m: the node is just looking for it" });
  expect(placed(nodes, spec, mixed)).toMatchObject({ reason: "none of 2 nodes has room" });
});

test("weights whose size is being found out are waited for", () => {
  const fleet = new TestFleet([{ id: "a" }], [modelOf("m", { source: "http://x/m" })]);
  fleet.measuring = new Set(["http://x/m"]);
  fleet.turns(3);
  expect(fleet.decision?.refusals.get(fleet.only().id)).toEqual([
    { node: "a", filter: "weights", needed: "the size of its weights", available: "being read from their source" },
  ]);
  fleet.measuring = new Set();
  fleet.turns(3);
  expect(fleet.only().state).toBe("ready");
});

test("only GPUs that are large enough are given", () => {
  const small = (node: NodeSeen): NodeSeen => ({
    ...node,
    inventory: {
      ...node.inventory,
      gpus: node.inventory.gpus.map((gpu, at) => (at < 2 ? { ...gpu, memory_total: { value: 8 * GiB } } : gpu)),
    },
  });
  const spec = modelOf("m", { engine: "llamacpp", source: "/m", gpus: 2, shape: { ...SHAPE, weights_bytes: 40 * GiB } });
  const result = placed([{ id: "a", gpus: 4 }], spec, small);
  expect("placements" in result ? result.placements[0]?.launch.gpus : []).toEqual(["GPU-a-2", "GPU-a-3"]);
});

test("with no node at all the reason says so", () => {
  expect(placed([], modelOf("m"))).toEqual({ refusals: [], reason: "no node has joined" });
});

const where = (result: ReturnType<typeof placed>) => ("placements" in result ? result.placements[0]?.node : result.reason);

test("equal nodes are taken in order of their names, whatever their order in the world", () => {
  expect(where(placed([{ id: "b" }, { id: "a" }], modelOf("m")))).toBe("a");
});

test("small replicas are packed: the node with the fewest free GPUs that fits", () => {
  expect(
    where(
      placed(
        [
          { id: "a", gpus: 8 },
          { id: "b", gpus: 2 },
        ],
        modelOf("m", { gpus: 1 }),
      ),
    ),
  ).toBe("b");
  expect(
    where(
      placed(
        [
          { id: "a", gpus: 8 },
          { id: "b", gpus: 0 },
        ],
        modelOf("m"),
      ),
    ),
  ).toBe("b");
});

test("a node it failed to start on comes last", () => {
  expect(where(placed([{ id: "a" }, { id: "b" }], modelOf("m"), undefined, { avoid: "a" }))).toBe("b");
  expect(where(placed([{ id: "a" }], modelOf("m"), undefined, { avoid: "a" }))).toBe("a");
});

test("replicas of one model are spread over nodes, those of many packed", () => {
  const fleet = new TestFleet(
    [
      { id: "a", gpus: 4 },
      { id: "b", gpus: 4 },
    ],
    [modelOf("m", { replicas: 4, gpus: 1 })],
  );
  fleet.turns(3);
  const perNode = Map.groupBy(fleet.ready(), (replica) => replica.placements[0]?.node);
  expect([perNode.get("a")?.length, perNode.get("b")?.length]).toEqual([2, 2]);
  const packed = new TestFleet(
    [
      { id: "a", gpus: 4 },
      { id: "b", gpus: 4 },
    ],
    ["k", "l", "m"].map((name) => modelOf(name, { gpus: 1 })),
  );
  packed.turns(3);
  expect(new Set(packed.ready().map((replica) => replica.placements[0]?.node)).size).toBe(1);
});

test("memory of placed replicas is set aside before it shows in readings, and after", () => {
  const fleet = new TestFleet([{ id: "a", memory: 10 * GiB }], [modelOf("m", { replicas: 3, memory: 4 * GiB })]);
  fleet.turns(60);
  expect(fleet.ready()).toHaveLength(2);
  const short = fleet.replicas.find((replica) => replica.state === "pending");
  expect(fleet.decision?.refusals.get(short?.id ?? "")?.[0]).toMatchObject({
    filter: "memory",
    needed: "4.0 GiB of memory",
    available: "2.0 GiB",
  });
  expect(fleet.kinds().filter((kind) => kind === "replica-pending")).toHaveLength(1);
});

test("one download is counted once on the disk of a node", () => {
  const spec = modelOf("m", { replicas: 2, source: "http://x/m", size: 300 * GiB, memory: GiB });
  const fleet = new TestFleet([{ id: "a", disk: 400 * GiB }], [spec]);
  fleet.decide();
  expect(fleet.replicas.map((replica) => replica.state)).toEqual(["fetching", "fetching"]);
});

test("nodes that share an address share its ports", () => {
  const fleet = new TestFleet(
    ["a", "b", "c"].map((id) => ({ id, address: "127.0.0.1" })),
    [modelOf("m", { replicas: 3 })],
  );
  fleet.turns(3);
  expect(new Set(fleet.ready().map((replica) => replica.placements[0]?.launch.door.port)).size).toBe(3);
});
