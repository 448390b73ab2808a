/**
 * `npm run mutants`: breaks one rule at a time in a copy of the sources and tells whether some seed of the simulated fleet
 * notices. A rule whose loss nobody notices is a hole in what the simulation checks. Exits with 1 when there is one.
 * `npm run mutants -- WORDS` tries those rules alone that have these words.
 */
import { cp, mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

const ROOT = join(import.meta.dir, "../..");

/** One rule broken: the words in the file that make it, and what stands there instead. */
interface Mutant {
  readonly breaks: string;
  readonly file: string;
  readonly words: string;
  readonly instead: string;
}

const MUTANTS: readonly Mutant[] = [
  {
    breaks: "a gang's adapter is up",
    file: "src/core/gang.ts",
    words: `(port.state ?? "ACTIVE").includes("ACTIVE")`,
    instead: "true",
  },
  {
    breaks: "an operator's number counts instead of the catalog's",
    file: "src/server/models.ts",
    words: "scales.get(spec.name)?.replicas ?? spec.replicas",
    instead: "spec.replicas",
  },
  {
    breaks: "a GPU that a planned rank holds is not free",
    file: "src/core/room.ts",
    words: "for (const uuid of launch.gpus) room.held_gpus.add(uuid);",
    instead: "",
  },
  {
    breaks: "a port that a planned rank holds is not free",
    file: "src/core/room.ts",
    words: "takeRow(rooms, door.address, door.port, 1);",
    instead: "",
  },
  {
    breaks: "ports of a gang are held too",
    file: "src/core/room.ts",
    words: "if (gang) takeRow(rooms, door.address, gang.ports.first, gang.ports.count);",
    instead: "",
  },
  {
    breaks: "what a node says it runs holds its place",
    file: "src/core/room.ts",
    words: "for (const room of rooms.by_node.values()) holdObserved(rooms, room);",
    instead: "",
  },
  {
    breaks: "an attempt waits for the one that holds its place",
    file: "src/agent/places.ts",
    words: "if (holder !== undefined && holder !== launch.attempt)",
    instead: "if (holder === launch.replica)",
  },
  {
    breaks: "two fabrics that go by one name stay two",
    file: "src/core/fabrics.ts",
    words: "...port.managers.map((guid) => `manager ${guid}`)",
    instead: `"manager"`,
  },
  {
    breaks: "a rank has an adapter on the gang's fabric",
    file: "src/core/gang.ts",
    words: "declared.includes(port.fabric) && port.excluded",
    instead: "port.excluded",
  },
  {
    breaks: "a gang has as many ranks as were asked for",
    file: "src/core/gang.ts",
    words: "best.open.slice(0, nodes)",
    instead: "best.open.slice(0, Math.max(1, nodes - 1))",
  },
  {
    breaks: "a drain waits for the replacement",
    file: "src/core/fit.ts",
    words: `.filter((replica) => replica.state === "ready" && displaced(replica)?.at_once !== true);`,
    instead: ".filter(() => false);",
  },
  {
    breaks: "nothing is replaced while its door still answers",
    file: "src/core/loss.ts",
    words: "return door !== undefined && (world.unreachable?.has(door) ?? false);",
    instead: "return door !== undefined;",
  },
  {
    breaks: "replicas on a lost node are replaced",
    file: "src/core/loss.ts",
    words: `if (replica.state !== "ready") return true;`,
    instead: "return false;",
  },
  {
    breaks: "engines that run but are in no record are taken over or stopped",
    file: "src/core/adoption.ts",
    words: "if (!first || !model || adopted.has(first.replica) || !isWhole(ranks)) continue;",
    instead: `if (model) throw new Error("taken over");\n    continue;`,
  },
  {
    breaks: "a node that has not spoken since the server started gets nothing new",
    file: "src/core/placement.ts",
    words: `return node.ranks === null ? { needed: "a ready node", available: "its agent has not spoken to this server yet" } : null;`,
    instead: "return null;",
  },
  {
    breaks: "a failed start is tried again",
    file: "src/core/planner.ts",
    words: "replica.next_try_ms !== null && replica.next_try_ms <= now_ms",
    instead: "replica.next_try_ms === null",
  },
  {
    breaks: "replicas beyond the wanted number go",
    file: "src/core/fit.ts",
    words: ".slice(0, Math.max(0, fresh.length - spec.replicas));",
    instead: ".slice(0, 0);",
  },
  {
    breaks: "those that serve are the last to go",
    file: "src/core/fit.ts",
    words: "Number(serving(a)) - Number(serving(b)) ||\n      PROGRESS[a.state] - PROGRESS[b.state] ||",
    instead: "PROGRESS[b.state] - PROGRESS[a.state] ||",
  },
  {
    breaks: "a replica whose engine has ended is started again",
    file: "src/core/lifecycle.ts",
    words: `if (status?.phase === "exited") return fail(replica, node, status.exit, policy, now_ms);`,
    instead: "",
  },
  {
    breaks: "a join that comes late changes nothing",
    file: "src/server/sessions.ts",
    words: "if (!before || joins === 0 || joins > before.joins ||",
    instead: "if (!before || joins >= 0 ||",
  },
  {
    breaks: "an agent leaves alone what the plan has",
    file: "src/agent/converge.ts",
    words: "if (wanted.has(attempt)) continue;",
    instead: `if (wanted.has(attempt) && phase !== "ready") continue;`,
  },
  {
    breaks: "a new decision gets a new version",
    file: "src/core/plan-parts.ts",
    words: "parts.set(node, { version: next, node,",
    instead: "parts.set(node, { version: old?.version ?? next, node,",
  },
];

/** The first line that a seed fails with; null when none does. */
async function noticed(folder: string): Promise<string | null> {
  const child = Bun.spawn([process.execPath, "test", "--bail", "--timeout", "600000", "./tests/sim/fleet.test.ts"], {
    cwd: folder,
    env: { ...process.env, SIM_SEEDS: process.env["SIM_SEEDS"] ?? "500" },
    stdin: "ignore",
    stdout: "ignore",
    stderr: "pipe",
  });
  const said = await new Response(child.stderr).text();
  if ((await child.exited) === 0) return null;
  const line = said.split("\n").find((each) => each.startsWith("error:"));
  if (!line?.includes("SIM_SEED=")) throw new Error(`the simulation did not run:\n${said.slice(-2_000)}`);
  return line.slice("error: ".length);
}

async function tryMutant({ file, words, instead }: Mutant): Promise<string | null> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-mutant-"));
  try {
    for (const each of ["src", "tests/sim", "tests/unit/core", "package.json", "tsconfig.json", "bunfig.toml"])
      await cp(join(ROOT, each), join(folder, each), { recursive: true });
    await symlink(join(ROOT, "node_modules"), join(folder, "node_modules"));
    const text = await readFile(join(folder, file), "utf8");
    if (text.split(words).length !== 2) throw new Error(`${file} does not have these words once: ${words}`);
    await writeFile(
      join(folder, file),
      text.replace(words, () => instead),
    );
    return await noticed(folder);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

let missed = 0;
const wanted = process.argv[2] ?? "";
const chosen = MUTANTS.filter(({ breaks }) => breaks.includes(wanted));
if (chosen.length === 0) throw new Error(`no rule is called "${wanted}"`);
for (const mutant of chosen) {
  const how = await tryMutant(mutant);
  if (how === null) missed += 1;
  console.log(`${how === null ? "MISSED" : "noticed"}  ${mutant.breaks}${how === null ? "" : `\n         ${how}`}`);
}
console.log(`${chosen.length - missed} noticed, ${missed} missed`);
process.exit(missed === 0 ? 0 : 1);
