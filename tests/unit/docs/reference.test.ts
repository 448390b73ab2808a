import { expect, test } from "bun:test";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { referencePages } from "../../../docs/reference.ts";

const pages = await referencePages();

test.each(Object.keys(pages))("%s is what the sources say (npm run docs)", async (path) => {
  expect(await readFile(join(import.meta.dir, "..", "..", "..", path), "utf8")).toBe(pages[path] ?? "");
});
