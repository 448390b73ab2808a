import { command, resolveEntry } from "./frame.ts";
import { GLOBAL_FLAGS, type Command, type FlagSpecs, type Group } from "./spec.ts";

const SHELLS = ["bash", "zsh", "fish"] as const;
type Shell = (typeof SHELLS)[number];

/** What may follow a command, as a shell has to know it. */
interface Step {
  /** The command as written: `llmgw ctl nodes`. */
  readonly path: string;
  readonly words: readonly { readonly word: string; readonly about: string }[];
  /** The values of flags that take one of a few: `-o` and `--output`. */
  readonly values: readonly { readonly flag: string; readonly choices: readonly string[] }[];
}

/** Every command of a tree that people see. */
async function stepsOf(path: string, entry: Command | Group): Promise<Step[]> {
  if (entry.kind === "group") {
    const commands = (await Promise.all(entry.commands().map(resolveEntry))).filter((each) => !each.hidden);
    const words = commands.map(({ name, about }) => ({ word: name, about }));
    const below = await Promise.all(commands.map((each) => stepsOf(`${path} ${each.name}`, each)));
    return [{ path, words: [...words, { word: "--help", about: GLOBAL_FLAGS.help.about }], values: [] }, ...below.flat()];
  }
  const specs: FlagSpecs = { ...entry.flags, ...GLOBAL_FLAGS };
  const flags = Object.entries(specs).filter(([, spec]) => !spec.hidden);
  const values = flags.flatMap(([name, { short, choices }]) => {
    const names = short ? [`--${name}`, `-${short}`] : [`--${name}`];
    return choices ? names.map((flag) => ({ flag, choices })) : [];
  });
  const words = flags.map(([name, { type, about, ...spec }]) => ({
    word: type === "boolean" && spec.default === true ? `--no-${name}` : `--${name}`,
    about,
  }));
  const choices = entry.args.flatMap((spec) => (spec.choices ?? []).map((word) => ({ word, about: spec.about })));
  return [{ path, words: [...choices, ...words], values }];
}

const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`;

function bashScript(steps: readonly Step[]): string {
  const list = (words: readonly string[]) => quoted(words.join(" "));
  const [, ...below] = steps;
  return [
    "_llmgw() {",
    '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" path=llmgw words= at',
    "  for ((at = 1; at < COMP_CWORD; at++)); do",
    '    case "$path ${COMP_WORDS[at]}" in',
    `      ${below.map(({ path }) => quoted(path)).join("|")}) path="$path \${COMP_WORDS[at]}" ;;`,
    "    esac",
    "  done",
    '  case "$path" in',
    ...steps.map(({ path, words }) => `    ${quoted(path)}) words=${list(words.map(({ word }) => word))} ;;`),
    "  esac",
    '  case "$path $previous" in',
    ...steps.flatMap(({ path, values }) =>
      values.map(({ flag, choices }) => `    ${quoted(`${path} ${flag}`)}) words=${list(choices)} ;;`),
    ),
    "  esac",
    '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
    "}",
    "complete -o default -F _llmgw llmgw",
  ].join("\n");
}

function fishScript(steps: readonly Step[]): string {
  const at = (path: string) => quoted(`test (__llmgw_path) = ${quoted(path).replaceAll("'", '"')}`);
  const [, ...below] = steps;
  return [
    "function __llmgw_path",
    "  set -l path llmgw",
    "  for word in (commandline -opc)[2..]",
    `    contains -- "$path $word" ${below.map(({ path }) => quoted(path)).join(" ")}; and set path "$path $word"`,
    "  end",
    "  echo $path",
    "end",
    ...steps.flatMap(({ path, words, values }) => [
      ...words.map(({ word, about }) => {
        const what = word.startsWith("--") ? `-l ${word.slice(2)}` : `-f -a ${word}`;
        return `complete -c llmgw -n ${at(path)} ${what} -d ${quoted(about)}`;
      }),
      ...values.map(({ flag, choices }) => {
        const name = flag.startsWith("--") ? `-l ${flag.slice(2)}` : `-s ${flag.slice(1)}`;
        return `complete -c llmgw -n ${at(path)} ${name} -x -a ${quoted(choices.join(" "))}`;
      }),
    ]),
  ].join("\n");
}

/** The script that teaches a shell the commands of a tree. */
export async function completionScript(shell: Shell, root: Group): Promise<string> {
  const steps = await stepsOf(root.name, root);
  if (shell === "fish") return fishScript(steps);
  return shell === "bash" ? bashScript(steps) : `autoload -U +X bashcompinit && bashcompinit\n${bashScript(steps)}`;
}

/** `llmgw completion`. The tree is given as a function because the command is itself part of it. */
export function makeCompletionCommand(root: () => Group): Command {
  return command({
    name: "completion",
    about: "Prints a script that teaches a shell llmgw's commands",
    examples: ["source <(llmgw completion bash)", "llmgw completion fish > ~/.config/fish/completions/llmgw.fish"],
    flags: {},
    args: [{ name: "SHELL", about: "one of bash, zsh, fish", choices: SHELLS }],
    run: async ({ args, io }) => io.out(await completionScript(args.SHELL, root())),
  });
}
