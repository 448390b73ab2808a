// Stories of a fleet for people to read: golden/NAME.txt. UPDATE_GOLDENS=1 writes them anew; look at what changed.
import { expect, test } from "bun:test";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { ModelSpec } from "../../src/protocol/catalog.ts";
import { modelOf } from "../unit/core/fleet-for-tests.ts";
import { Chance } from "./chance.ts";
import { SimFleet } from "./sim-fleet.ts";

interface Story {
  readonly name: string;
  readonly nodes: readonly { readonly id: string; readonly gpus?: number; readonly fabric?: "first" | "second" }[];
  readonly models: readonly ModelSpec[];
  tell(fleet: SimFleet): void;
}

const passes = (fleet: SimFleet, seconds: number) => {
  for (let second = 0; second < seconds; second++) fleet.pass();
};
const readyOn = (fleet: SimFleet, model: string) => fleet.replicas.find((each) => each.model === model && each.state === "ready");
const first = (fleet: SimFleet, model: string) => {
  const placement = readyOn(fleet, model)?.placements[0];
  if (!placement) throw new Error(`${model} is not ready`);
  return placement;
};

const STORIES: readonly Story[] = [
  {
    name: "drain",
    nodes: [
      { id: "a", gpus: 2 },
      { id: "b", gpus: 2 },
      { id: "c", gpus: 1 },
    ],
    models: [modelOf("chat", { gpus: 1, replicas: 2 }), modelOf("large", { gpus: 2 })],
    tell: (fleet) => {
      fleet.settle();
      fleet.drain(first(fleet, "large").node);
      passes(fleet, 30);
      fleet.scale("chat", 1);
      fleet.settle();
    },
  },
  {
    name: "node-lost-and-back",
    nodes: [{ id: "a" }, { id: "b" }],
    models: [modelOf("chat", { replicas: 2 })],
    tell: (fleet) => {
      fleet.settle();
      fleet.power("a", false);
      passes(fleet, 130);
      fleet.power("a", true);
      fleet.settle();
    },
  },
  {
    name: "agents-cut-off",
    nodes: [{ id: "a" }, { id: "b" }, { id: "c" }, { id: "d" }],
    models: [modelOf("chat", { replicas: 4 })],
    tell: (fleet) => {
      fleet.settle();
      for (const { shape } of fleet.nodes) fleet.cutLink(shape.id);
      passes(fleet, 200);
      for (const { shape } of fleet.nodes) fleet.mendLink(shape.id);
      passes(fleet, 20);
    },
  },
  {
    name: "gang-loses-a-rank",
    nodes: [{ id: "a" }, { id: "b" }, { id: "c" }, { id: "d", fabric: "second" }],
    models: [modelOf("pair", { nodes: 2 })],
    tell: (fleet) => {
      fleet.settle();
      const { node, launch } = readyOn(fleet, "pair")?.placements[1] ?? first(fleet, "pair");
      fleet.failEngine(node, launch.attempt, "died");
      fleet.settle();
      fleet.setFabric(first(fleet, "pair").node, "ib", false);
      fleet.settle();
    },
  },
  {
    name: "gpu-lost",
    nodes: [{ id: "a", gpus: 2 }],
    models: [modelOf("chat", { gpus: 1, replicas: 2 })],
    tell: (fleet) => {
      fleet.settle();
      fleet.setGpu("a", 1, false);
      passes(fleet, 60);
      fleet.setGpu("a", 1, true);
      passes(fleet, 20);
    },
  },
  {
    name: "server-dies-in-a-drain",
    nodes: [{ id: "a" }, { id: "b" }],
    models: [modelOf("chat", { replicas: 2 })],
    tell: (fleet) => {
      fleet.settle();
      fleet.drain("a");
      passes(fleet, 3);
      fleet.killServer();
      passes(fleet, 20);
      fleet.startServer();
      fleet.settle();
    },
  },
  {
    name: "catalog-change-rolls",
    nodes: [{ id: "a" }, { id: "b" }],
    models: [modelOf("chat", { replicas: 2, context: 1_024 })],
    tell: (fleet) => {
      fleet.settle();
      fleet.edit([modelOf("chat", { replicas: 2, context: 2_048 })]);
      passes(fleet, 40);
    },
  },
];

test.each(STORIES.map((story) => [story.name, story] as const))("%s goes as it was written down", (name, { nodes, models, tell }) => {
  const shapes = nodes.map(({ id, gpus = 0, fabric = "first" }, index) => ({
    shape: { id, gpus, address: `10.0.0.${index + 2}`, adapters: { ib: 1 } },
    fabric,
  }));
  const fleet = new SimFleet({ nodes: shapes, models, chance: new Chance(1), trouble: 0, calm: false, tells: true });
  tell(fleet);
  const story = `${fleet.log.join("\n")}\n`;
  const file = join(import.meta.dir, "golden", `${name}.txt`);
  if (process.env["UPDATE_GOLDENS"] === "1") writeFileSync(file, story);
  expect(existsSync(file) ? readFileSync(file, "utf8") : "").toBe(story);
});
