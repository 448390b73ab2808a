/** Why Python packages could not be installed, and what to try. */
interface PythonFault {
  readonly why: string;
  readonly remedy: string;
  /** The disk has no room. */
  readonly full: boolean;
}

/** What tells the reason, the most telling first: the tools say much after it. */
const TELLING: readonly { readonly words: RegExp; readonly remedy: string; readonly full?: true }[] = [
  { words: /no space left|disk quota exceeded/i, remedy: "free some disk, or move the state folder", full: true },
  { words: /ensurepip is not|no module named '?(venv|ensurepip)/i, remedy: "install python3 with its venv module on the node" },
  {
    words: /requires? a different python|requires-python|requires python|no interpreter found/i,
    remedy: "install a python3 that this version knows, or name another version in server.yaml",
  },
];

/** Lengths to which an operator reads on. */
const SHOWN_CHARACTERS = 500;

/**
 * Reads what `venv`, `pip` or `uv` printed before it failed.
 * @param output stdout and stderr, or the ends of them
 */
export function pythonFault(output: string): PythonFault {
  const lines = output
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "");
  for (const { words, remedy, full = false } of TELLING) {
    const said = lines.find((line) => words.test(line));
    if (said !== undefined) return { why: said.slice(0, SHOWN_CHARACTERS), remedy, full };
  }
  const errors = lines.filter((line) => /^error:/i.test(line));
  const said = errors.at(-1) ?? lines.findLast((line) => /error|no such|not found|cannot|failed/i.test(line)) ?? lines.at(-1);
  return { why: (said ?? "it says nothing").slice(0, SHOWN_CHARACTERS), remedy: "try it by hand on the node", full: false };
}
