/** main.ts is the entry: it hands the command line to the command tree and does nothing else. */
import { main } from "./cli/frame.ts";
import { root } from "./cli/root.ts";

await main(root, process.argv0, process.argv.slice(2));
