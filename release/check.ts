/** `npm run check`: form, lint and types. Changes nothing. */
import { join } from "node:path";
import { root, runHere } from "./fresh.ts";

const CHECKS: Record<string, string[]> = {
  fmt: [process.execPath, "fmt", "--no-script", "--check", "src", "tests", "release", "docs/*.ts", "build.ts"],
  lint: ["node", join(root, "node_modules", "oxlint", "bin", "oxlint"), "--type-aware", "--deny-warnings"],
  types: [process.execPath, "check", "--no-script"],
};

let failed = 0;
for (const [name, command] of Object.entries(CHECKS)) {
  const code = await runHere(command);
  console.error(`llmgw: ${name} ${code === 0 ? "passed" : "failed"}`);
  if (code !== 0) failed++;
}
process.exit(failed === 0 ? 0 : 1);
