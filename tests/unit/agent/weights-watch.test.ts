import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { WeightsWatch } from "../../../src/agent/weights-watch.ts";
import type { Found } from "../../../src/weights/shape.ts";
import { WeightStore } from "../../../src/weights/store.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-watch-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const WELL: Found = { shape: null, fault: "" };

test("a file system that hangs is said to, is looked at once only, and what was known of others stays", async () => {
  const [dead, alive] = ["dead", "alive"].map((name) => join(folder, name)) as [string, string];
  await Promise.all([dead, alive].map((path) => writeFile(path, "first")));
  const looks: string[] = [];
  let hanging: PromiseWithResolvers<Found> | null = null;
  const watch = new WeightsWatch(
    new WeightStore(join(folder, "weights")),
    (path) => {
      looks.push(path);
      return path === dead && hanging ? hanging.promise : Promise.resolve(WELL);
    },
    20,
  );
  watch.ask([dead, alive]);
  const faults = async () => Object.fromEntries((await watch.look()).map(({ name, fault }) => [name, fault]));
  expect(await faults()).toEqual({ [dead]: "", [alive]: "" });
  hanging = Promise.withResolvers<Found>();
  await Promise.all([dead, alive].map((path) => writeFile(path, "changed since")));
  const silent = `its file system does not answer: nothing was heard of ${dead} for 0.02 s`;
  for (let again = 0; again < 3; again++) expect(await faults()).toEqual({ [dead]: silent, [alive]: "" });
  expect(looks.filter((path) => path === dead)).toHaveLength(2);
  const looked = looks.length;
  hanging.resolve(WELL);
  expect(await faults()).toEqual({ [dead]: "", [alive]: "" });
  expect(looks.length).toBeGreaterThan(looked);
});
