/** How long the demo takes to be ready, and how much memory an idle server, gateway and agent take. Prints; asserts nothing. */
import { spawn } from "node:child_process";
import { mkdtemp, readdir, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { binary } from "../../release/fresh.ts";

const RUNS = 5;
const IDLE_MS = 10_000;
const READY_MS = 60_000;

interface Process {
  readonly what: string;
  readonly rss_mib: number;
}

/** Processes of the demo in a folder: what each is, and its resident memory without shared pages. */
async function processesIn(folder: string): Promise<Process[]> {
  const found: Process[] = [];
  for (const pid of (await readdir("/proc")).filter((name) => /^\d+$/.test(name))) {
    const read = (name: string) => readFile(`/proc/${pid}/${name}`, "utf8").catch(() => "");
    const [environment, words, status] = await Promise.all([read("environ"), read("cmdline"), read("status")]);
    if (!environment.includes(folder)) continue;
    const kib = Number(/^RssAnon:\s+(\d+)/m.exec(status)?.[1] ?? 0);
    const shared = Number(/^RssFile:\s+(\d+)/m.exec(status)?.[1] ?? 0);
    found.push({ what: words.split("\0")[1] ?? "", rss_mib: (kib + shared) / 1024 });
  }
  return found;
}

async function once(folder: string): Promise<{ ready_ms: number; idle: Process[] }> {
  const started_ms = performance.now();
  const child = spawn(binary, ["demo", "--nodes", "2"], { stdio: ["ignore", "pipe", "ignore"], env: { ...process.env, TMPDIR: folder } });
  let out = "";
  child.stdout.on("data", (bytes: Buffer) => (out += bytes.toString()));
  const ended = new Promise<void>((resolve) => child.once("exit", () => resolve()));
  try {
    while (!out.includes("ask it yourself:")) {
      if (child.exitCode !== null || performance.now() - started_ms > READY_MS) throw new Error("the demo did not become ready");
      await sleep(10);
    }
    const ready_ms = performance.now() - started_ms;
    if (process.argv.includes("--quick")) return { ready_ms, idle: await processesIn(folder) };
    await sleep(IDLE_MS);
    return { ready_ms, idle: await processesIn(folder) };
  } finally {
    child.kill("SIGTERM");
    await ended;
  }
}

const folder = await mkdtemp(join(tmpdir(), "lb-"));
try {
  const times: number[] = [];
  let idle: Process[] = [];
  for (let run = 0; run < RUNS; run++) {
    const { ready_ms, idle: seen } = await once(folder);
    times.push(ready_ms);
    idle = seen;
  }
  const sorted = times.toSorted((left, right) => left - right);
  const [median, slowest] = [sorted[Math.floor(RUNS / 2)] ?? 0, sorted.at(-1) ?? 0].map(Math.round);
  console.log(`demo start to ready: median ${median} ms, slowest ${slowest} ms (${RUNS} runs)`);
  for (const { what, rss_mib } of idle) console.log(`idle memory of ${what}: ${rss_mib.toFixed(0)} MiB`);
} finally {
  await rm(folder, { recursive: true, force: true });
}
