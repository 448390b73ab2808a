/** The page of engines in docs/reference/, made from the same functions that start them. */
import type { Engine, EngineCommand, StopStep } from "../src/engines/engine.ts";
import { ENGINES } from "../src/engines/registry.ts";
import { sampleLaunch } from "../src/engines/sample-launch.ts";

const PROGRAMS: Readonly<Record<string, string>> = { llamacpp: "llama-server", vllm: "vllm", sglang: "python" };

function commandOf(engine: Engine, gpus: number, rank: 0 | 1 | null): EngineCommand {
  const launch = sampleLaunch(engine.kind, gpus, rank);
  return engine.command({
    launch,
    program: [PROGRAMS[engine.kind] ?? engine.kind],
    weights_path: "/models/model",
    endpoint:
      engine.listens === "socket"
        ? { kind: "socket", path: `/run/llmgw/r/${launch.attempt}/e.sock` }
        : { kind: "loopback", port: 20_003, spare_ports: [20_004, 20_005], key: "" },
    folder: "RANK_FOLDER",
    cache: `/var/lib/llmgw/cache/${engine.kind}-HASH`,
  });
}

/** A command over several lines, as a shell would take it. */
function shown({ argv }: EngineCommand): string[] {
  const text = argv.reduce((line, part) => (part.startsWith("--") ? `${line} \\\n  ${part}` : `${line} ${part}`));
  return ["", "```sh", text, "```"];
}

const seconds = (wait_ms: number) => `${wait_ms / 1_000} s`;
const stopText = ({ signal, to, wait_ms }: StopStep) =>
  `\`${signal}\` to ${to === "leader" ? "its first process" : "all its processes"}, then ${seconds(wait_ms)}`;
const ticked = (words: readonly string[]) => words.map((word) => `\`${word}\``).join(" ");

function sectionOf(engine: Engine): string[] {
  const { kind, rules, probes, vitals, stop, scrub, gangs } = engine;
  const alone = commandOf(engine, 1, null);
  const keyed = Object.entries(rules.keyed).map(([flag, key]) => `\`${flag}\` (${key})`);
  return [
    "",
    `## ${kind}`,
    "",
    `See also [its page](../engines/${kind}.md). One rank, one GPU, \`context: 32768\`, \`parallel: 8\`:`,
    ...shown(alone),
    ...(gangs
      ? ["", "Two nodes of eight GPUs, rank 0 and rank 1:", ...shown(commandOf(engine, 8, 0)), ...shown(commandOf(engine, 8, 1))]
      : []),
    "",
    `- **Ready** once ${probes.map(({ path }) => `\`${path}\``).join(", then ")} are content; asked of rank 0.`,
    `- **Stuck** is told by \`${vitals.path}\`.`,
    `- **Stopped** by ${stop.map(stopText).join("; ")}.`,
    `- **Environment added**: ${ticked(Object.keys(alone.env))}`,
    `- **Environment never passed on**, besides what no engine gets: ${ticked(scrub)}`,
    ...(keyed.length === 0 ? [] : [`- **Not in \`args\` beside the key of the catalog** that says the same: ${keyed.join(", ")}`]),
    `- **Never in \`args\`**: ${ticked(rules.owned)}`,
  ];
}

/** The page, whole. */
export function enginesPage(): string {
  const sections = ENGINES.filter(({ kind }) => kind !== "sim").flatMap(sectionOf);
  return [
    "# Engines",
    "",
    "Made from `src/engines/` by `npm run docs`.",
    "",
    "What llmgw starts, how it knows that an engine is ready or stuck, how it stops it, and what `args` in the catalog may not set.",
    ...sections,
    "",
  ].join("\n");
}
