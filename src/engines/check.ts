import type { EngineCheck, FlagFinding } from "../protocol/engine-check.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import type { Engine, EngineCommand, Flag } from "./engine.ts";
import { checkFlags, readHelp } from "./help.ts";
import { renamed } from "./renames.ts";
import { sampleLaunch } from "./sample-launch.ts";

/** Where the commands of a check are said to run; nothing of it is there. */
const NOWHERE = "/nonexistent";

/**
 * The widest commands llmgw would ever give an engine, made by the same function as those it starts: each rank of a gang,
 * with every option, for text and for embeddings.
 * @param program what stands before the flags, to run them for a trial
 */
export function widestCommands(engine: Engine, program: readonly [string, ...string[]] = [NOWHERE]): EngineCommand[] {
  const variants: readonly Partial<RankLaunch>[] = [{}, { embeddings: true }, ...engine.telling_args.map((args) => ({ args }))];
  const ranks = engine.gangs ? ([0, 1] as const) : ([null] as const);
  return variants.flatMap((more) =>
    ranks.map((rank) =>
      engine.command({
        launch: { ...sampleLaunch(engine.kind, 8, rank), ...more },
        program,
        weights_path: `${NOWHERE}/model`,
        endpoint:
          engine.listens === "socket"
            ? { kind: "socket", path: `${NOWHERE}/e.sock` }
            : { kind: "loopback", port: 20_003, spare_ports: [20_004, 20_005].slice(0, engine.spare_ports), key: "" },
        folder: NOWHERE,
        cache: NOWHERE,
      }),
    ),
  );
}

/** Every flag of the widest commands, once. */
export function widestFlags(engine: Engine): Flag[] {
  const flags = new Map<string, Flag>();
  for (const command of widestCommands(engine)) for (const each of command.flags) if (!flags.has(each.name)) flags.set(each.name, each);
  return [...flags.values()];
}

const isGood = ({ verdict }: FlagFinding) => verdict === "accepted" || verdict === "deprecated";

/** Who was asked, and what it said beside its help. */
interface Asked {
  readonly subject: string;
  readonly version: string | null;
  /** See {@link EngineCheck}. */
  readonly trial: string | null;
}

/**
 * Checks every flag llmgw would ever give an engine against the text of its help.
 * @param output what the engine printed, stdout and stderr in any order
 */
export function checkHelp(engine: Engine, output: string, { subject, version, trial }: Asked): EngineCheck {
  const help = readHelp(engine.kind, output);
  const warnings = help.reason === "" ? [] : [help.reason];
  if (help.state !== "none" && !help.flags.has("--help"))
    warnings.push("the text does not document --help itself: it is not the whole help, or another program's");
  const found = checkFlags(help, widestFlags(engine));
  // What the engine took from a real command needs no word of its help.
  const flags = trial === "" ? found.map(undocumented) : found;
  const passed = flags.every(isGood) && (trial ?? "") === "";
  return { engine: engine.kind, subject, version, help: help.state, warnings, flags, trial, passed };
}

function undocumented(finding: FlagFinding): FlagFinding {
  const { verdict } = finding;
  if (verdict !== "missing" && verdict !== "unproved") return finding;
  return { ...finding, verdict: "accepted", text: "its help does not show it, but the engine takes it" };
}

/** What speaks against starting with these flags, in a sentence; null when nothing is known to. A text that is not whole proves nothing. */
export function refusalBy(engine: Engine, output: string, flags: readonly Flag[]): string | null {
  const bad = checkFlags(readHelp(engine.kind, output), flags).filter((finding) => !isGood(finding) && finding.verdict !== "unproved");
  return bad.length === 0 ? null : bad.map(({ flag, text }) => `it does not take ${flag}: ${text}`).join("; ");
}

/**
 * Why an engine that was to read its arguments refused them: its own last line of error, and what is known of the flag.
 * @param output what it printed before it ended
 */
export function refusalIn(engine: Engine, output: string): string {
  const lines = output
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "");
  const said = lines.findLast((line) => /\berror\b|removed|invalid|unrecognized|unsupported/i.test(line)) ?? lines.at(-1) ?? "nothing";
  const name = /--[a-z][a-z0-9-]*/.exec(said)?.[0];
  const hint = name === undefined ? undefined : renamed(engine.kind, name);
  return hint === undefined ? said : `${said} (${hint})`;
}
