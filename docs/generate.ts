/** `npm run docs` writes the generated pages; with `--check` it only says which differ. */
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { referencePages } from "./reference.ts";

const check = process.argv.includes("--check");
let differ = 0;
for (const [path, text] of Object.entries(await referencePages())) {
  const file = join(import.meta.dir, "..", path);
  if ((await readFile(file, "utf8").catch(() => "")) === text) continue;
  differ++;
  if (!check) await writeFile(file, text);
  console.log(check ? `${path} is out of date: npm run docs` : `wrote ${path}`);
}
process.exit(check && differ > 0 ? 1 : 0);
