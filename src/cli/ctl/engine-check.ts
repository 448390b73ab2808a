import { createReadStream } from "node:fs";
import { access, constants } from "node:fs/promises";
import { join, resolve } from "node:path";
import { installedEngines } from "../../agent/engine-install.ts";
import { EngineQuestions } from "../../agent/engine-questions.ts";
import { checkHelp } from "../../engines/check.ts";
import { engineOf } from "../../engines/registry.ts";
import { AGENT_FILE, agentConfigHere } from "../../os/config-file.ts";
import { ENGINE_PATH_KEYS, type AgentConfig } from "../../protocol/config.ts";
import { EngineCheck } from "../../protocol/engine-check.ts";
import type { FlagFinding, FlagVerdict } from "../../protocol/engine-check.ts";
import { messageOf, OperatorError } from "../../protocol/errors.ts";
import { INSTALLABLE_KINDS, type InstallableKind } from "../../protocol/ids.ts";
import { ENGINE_CHECK_MS, ENGINE_HELP_BYTES } from "../../protocol/limits.ts";
import { command } from "../frame.ts";
import { documentText, printable, table } from "../output.ts";
import type { Io } from "../spec.ts";
import { usageError } from "../parse.ts";
import { reach, reachFlags } from "./reach.ts";

const PATH = "llmgw ctl engine-check";

/** Worst first. */
const ORDER: readonly FlagVerdict[] = ["missing", "removed", "bad-value", "unproved", "deprecated", "accepted"];

/**
 * The engine's program on this machine: the one its agent is told of, else the newest installed.
 * @param config what the agent goes by
 * @param file where that is from
 * @throws OperatorError E_NOT_FOUND
 */
export async function programHere(
  kind: InstallableKind,
  config: Partial<AgentConfig> & Pick<AgentConfig, "state">,
  file = AGENT_FILE,
): Promise<string> {
  const folder = join(config.state, "engines");
  const program = config[ENGINE_PATH_KEYS[kind]] ?? (await installedEngines(folder, kind))[0]?.program;
  if (program !== undefined) return program;
  const unread = await access(file, constants.R_OK).then(
    () => false,
    (error: NodeJS.ErrnoException) => error.code !== "ENOENT",
  );
  const named = unread ? `this user may not read ${file}, and none is` : `neither ${file} names one, nor is one`;
  const why = `${named} in ${folder}/${kind}`;
  throw new OperatorError("E_NOT_FOUND", `there is no ${kind} on this machine`, why, `${PATH} ${kind} --bin PATH, or --node NODE`);
}

async function textOf(file: string, io: Io): Promise<string> {
  const source = file === "-" ? createReadStream("", { fd: process.stdin.fd, autoClose: false }) : createReadStream(resolve(io.cwd, file));
  const decoder = new TextDecoder();
  let text = "";
  try {
    // It may be a pipe that never ends.
    for await (const chunk of source) {
      text += decoder.decode(chunk as Buffer, { stream: true });
      if (text.length > ENGINE_HELP_BYTES) break;
    }
  } catch (error) {
    throw new OperatorError("E_USAGE", `cannot read ${file}`, messageOf(error), "llama-server --help > FILE 2>&1");
  }
  if (text.length <= ENGINE_HELP_BYTES) return text;
  throw new OperatorError("E_USAGE", `${file} is too long`, `a help text has at most ${ENGINE_HELP_BYTES} bytes`, "is it the right file?");
}

/** The lines for people: what was asked, what speaks against the whole, then each flag that is not simply taken, or all of them. */
function checkLines(check: EngineCheck, all: boolean): string[] {
  const { engine, subject, version, help, warnings, flags, trial, passed } = check;
  const shown = flags.filter(({ verdict }) => all || (verdict !== "accepted" && !(help === "none" && verdict === "unproved")));
  const sorted = ORDER.flatMap((verdict) => shown.filter((finding) => finding.verdict === verdict));
  const columns = [
    { title: "FLAG", cell: ({ flag }: FlagFinding) => flag },
    { title: "VALUE", cell: ({ value }: FlagFinding) => value },
    { title: "VERDICT", cell: ({ verdict }: FlagFinding) => verdict },
    { title: "WHY", cell: ({ text }: FlagFinding) => text },
  ];
  const counts = ORDER.flatMap((verdict) => {
    const count = flags.filter((finding) => finding.verdict === verdict).length;
    return count === 0 ? [] : [`${count} ${verdict}`];
  });
  const said = trial === null ? "" : trial === "" ? "; it took the whole command" : "; it refused the whole command";
  return [
    `${engine}${version === null ? "" : ` ${version}`}, ${printable(subject)}`,
    ...warnings.map((warning) => `warning: ${printable(warning)}`),
    ...(trial ? [`it says: ${printable(trial)}`] : []),
    ...(sorted.length === 0 ? [] : table(columns, sorted)),
    `${passed ? "passed" : "failed"}: of ${flags.length} flags ${counts.join(", ")}${said}`,
  ];
}

export const engineCheckCommand = command({
  name: "engine-check",
  about: "Checks that an engine takes every flag llmgw would ever give it",
  examples: [
    "llmgw ctl engine-check llamacpp",
    "llmgw ctl engine-check llamacpp --bin /opt/llama.cpp/llama-server",
    "llmgw ctl engine-check vllm --node gpu-07 -o json",
    "vllm serve --help=all | llmgw ctl engine-check vllm --help-file -",
  ],
  flags: {
    ...reachFlags,
    "help-output": { type: "string", value: "TEXT", about: "what the engine printed for --help (vLLM: --help=all)" },
    "help-file": { type: "string", value: "FILE", about: "a file that holds it; - for stdin" },
    bin: { type: "string", value: "PATH", about: "the program to ask: llama-server, vllm, or the Python that has SGLang" },
    node: { type: "string", value: "NODE", about: "let this node ask the engine it uses" },
    output: {
      type: "string",
      short: "o",
      value: "FORM",
      choices: ["table", "wide", "json", "yaml"],
      default: "table",
      about: "form of the answer",
    },
  },
  args: [{ name: "ENGINE", about: "llamacpp, vllm or sglang", choices: INSTALLABLE_KINDS }],
  run: async ({ flags, args, io }) => {
    const sources = (["help-output", "help-file", "bin", "node"] as const).filter((name) => flags[name] !== undefined);
    if (sources.length > 1) throw usageError(PATH, `--${sources.join(" and --")} exclude each other`, "one engine is checked at a time");
    const check = await checkFrom(args.ENGINE, flags, io);
    if (flags.output === "json" || flags.output === "yaml") io.out(documentText(flags.output, check));
    else io.out(checkLines(check, flags.output === "wide").join("\n"));
    return check.passed ? 0 : 1;
  },
});

interface Sources {
  readonly "help-output": string | undefined;
  readonly "help-file": string | undefined;
  readonly bin: string | undefined;
  readonly node: string | undefined;
  readonly context: string | undefined;
  readonly config: string | undefined;
}

async function checkFrom(kind: InstallableKind, flags: Sources, io: Io): Promise<EngineCheck> {
  const { "help-output": text, "help-file": file, bin, node } = flags;
  const given = (output: string, subject: string) => checkHelp(engineOf(kind), output, { subject, version: null, trial: null });
  if (text !== undefined) return given(text, "the given text");
  if (file !== undefined) return given(await textOf(file, io), file === "-" ? "the given text" : file);
  if (node !== undefined) {
    const client = await reach(flags, io);
    const path = `/admin/v1/nodes/${encodeURIComponent(node)}/engine-check`;
    return client.send("POST", path, { engine: kind }, EngineCheck, ENGINE_CHECK_MS);
  }
  const program = bin === undefined ? await programHere(kind, await agentConfigHere()) : resolve(io.cwd, bin);
  return new EngineQuestions({ engine_user: null, folder: null }).check(kind, program);
}
