/**
 * `npm test [-- FILTER...]` runs all tests that need no root; `npm run test:system` those that do, or need packages of
 * the system. Lists what was skipped; the last line is `N passed, N failed`.
 */
import { existsSync } from "node:fs";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { buildIfStale, root, runHere } from "./fresh.ts";

const PLAIN = ["tests/unit", "tests/property", "tests/sim", "tests/e2e", "tests/architecture.test.ts", "tests/tidy.test.ts"];
const SYSTEM = ["tests/system"];
/** How many files are run side by side: most wait more than they compute; whole machines compute more. */
const workersFor = (paths: readonly string[]) => (paths.some((path) => path.startsWith("tests/system")) ? 2 : 3);

interface Counts {
  passed: number;
  failed: number;
  skipped: string[];
}

const unescape = (text: string) =>
  text.replaceAll("&quot;", '"').replaceAll("&apos;", "'").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

/** Counts the cases of a JUnit report. */
function count(report: string): Counts {
  const counts: Counts = { passed: 0, failed: 0, skipped: [] };
  for (const [, attributes = "", , body = ""] of report.matchAll(/<testcase\b([^>]*?)(\/>|>([\s\S]*?)<\/testcase>)/g)) {
    const attribute = (name: string) => unescape(new RegExp(`\\b${name}="([^"]*)"`).exec(attributes)?.[1] ?? "");
    if (body.includes("<failure") || body.includes("<error")) counts.failed++;
    else if (body.includes("<skipped")) counts.skipped.push(`${attribute("file")}: ${attribute("name")}`);
    else counts.passed++;
  }
  return counts;
}

async function test(paths: readonly string[]): Promise<Counts> {
  if (paths.length === 0) return { passed: 0, failed: 0, skipped: [] };
  const folder = await mkdtemp(join(tmpdir(), "llmgw-test-"));
  try {
    const report = join(folder, "report.xml");
    // A busy machine makes tests slow, not wrong; those that wait for processes name their own, longer limits.
    const options = [
      `--parallel=${workersFor(paths)}`,
      "--timeout=60000",
      "--reporter=junit",
      `--reporter-outfile=${report}`,
      "--only-failures",
    ];
    const code = await runHere([process.execPath, "test", ...options, ...paths.map((path) => `./${path}`)]);
    const counts = count(existsSync(report) ? await readFile(report, "utf8") : "");
    // A file that does not load has no case of its own in the report, and a run that was cut short has no report.
    const none = counts.passed + counts.skipped.length === 0;
    if ((code !== 0 || none) && counts.failed === 0) counts.failed = 1;
    return counts;
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

const given = process.argv.slice(2);
const system = given.includes("--system");
const filters = given.filter((word) => word !== "--system");
await buildIfStale();
const { passed, failed, skipped } = await test(
  filters.length > 0 ? filters : (system ? SYSTEM : PLAIN).filter((path) => existsSync(join(root, path))),
);
for (const name of skipped) console.log(`skipped ${name}`);
if (skipped.length > 0) console.log(`${skipped.length} skipped`);
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
