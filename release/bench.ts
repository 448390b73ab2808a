/** `npm run bench`: runs every tests/bench/*.bench.ts on the compiled binary and prints what it measured. */
import { join } from "node:path";
import { buildIfStale, root, runHere } from "./fresh.ts";

await buildIfStale();
let failed = 0;
for (const name of [...new Bun.Glob("tests/bench/*.bench.ts").scanSync(root)].toSorted((a, b) => a.localeCompare(b))) {
  console.log(`== ${name}`);
  if ((await runHere([process.execPath, join(root, name), ...process.argv.slice(2)])) !== 0) failed++;
}
process.exit(failed === 0 ? 0 : 1);
