/** `npm run demo -- ARGUMENTS`: builds llmgw when needed, then runs `llmgw demo ARGUMENTS`. */
import { binary, buildIfStale, runHere } from "./fresh.ts";

await buildIfStale();
process.exit(await runHere([binary, "demo", ...process.argv.slice(2)]));
