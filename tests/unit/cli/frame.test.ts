import { expect, test } from "bun:test";
import { calledName, command, dispatch, errorLines, group, lazy } from "../../../src/cli/frame.ts";
import type { Io } from "../../../src/cli/spec.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";

interface Run {
  code: number | string;
  out: string;
  err: string;
}

const seen: unknown[] = [];
const move = command({
  name: "move",
  about: "Moves a replica",
  examples: ["llmgw ctl move a-abcde"],
  flags: {
    to: { type: "string", value: "NODE", about: "where to" },
    tries: { type: "number", default: 3, min: 1, max: 9, about: "how often" },
    label: { type: "list", about: "a label" },
    wait: { type: "boolean", default: true, about: "wait until it is done" },
    output: { type: "string", short: "o", choices: ["table", "json"], default: "table", about: "form" },
    "owner-pid": { type: "number", hidden: true, about: "internal" },
  },
  args: [
    { name: "REPLICA", about: "the replica" },
    { name: "OTHER", about: "another", optional: true },
  ],
  run: async ({ flags, args }) => {
    seen.push({ ...flags, ...args });
    return flags.tries === 9 ? 4 : 0;
  },
});
const secret = command({ name: "shim", about: "Hidden", hidden: true, examples: [], flags: {}, args: [], run: async () => undefined });
const all = command({
  name: "all",
  about: "Takes many",
  examples: [],
  flags: {},
  args: [{ name: "FILE", about: "files", rest: true }],
  run: async ({ args }) => args.FILE.length,
});
const ctl = group({ name: "ctl", about: "Speaks to the server", commands: () => [move] });
const root = group({ name: "llmgw", about: "Runs a fleet", commands: () => [ctl, secret, all, lazy("add-node", async () => secret)] });

async function run(...words: string[]): Promise<Run> {
  let out = "";
  let err = "";
  const io: Io = {
    out: (text) => (out += `${text}\n`),
    err: (text) => (err += `${text}\n`),
    isTerminal: false,
    isErrTerminal: false,
    color: false,
    env: {},
    cwd: "/",
  };
  try {
    return { code: await dispatch(root, words, io), out, err };
  } catch (error) {
    if (!(error instanceof OperatorError)) throw error;
    return { code: error.code, out, err: `${errorLines(error, false)}\n` };
  }
}

test("flags and arguments arrive with their types and defaults", async () => {
  seen.length = 0;
  const words = ["ctl", "move", "a", "--to=b", "--label", "x", "--label", "y", "--no-wait", "-o", "json", "--owner-pid", "7", "--", "-z"];
  expect((await run(...words)).code).toBe(0);
  expect((await run("ctl", "--debug", "move", "a")).code).toBe(0);
  expect(seen).toMatchObject([
    { REPLICA: "a", OTHER: "-z", to: "b", tries: 3, label: ["x", "y"], wait: false, output: "json", "owner-pid": 7, debug: false },
    { REPLICA: "a", OTHER: undefined, to: undefined, label: [], wait: true, output: "table", debug: true },
  ]);
});

test("a command's number is the exit code", async () => {
  expect((await run("ctl", "move", "a", "--tries", "9")).code).toBe(4);
  expect((await run("all", "a", "b")).code).toBe(2);
  expect((await run("shim")).code).toBe(0);
});

test.each([
  [["ctl", "move", "a", "--tires", "2"], "unknown flag --tires", "try: --tries"],
  [["ctl", "move", "a", "-x"], "unknown flag -x", "try: llmgw ctl move --help"],
  [["ctl", "move", "a", "--owner-pi", "2"], "unknown flag --owner-pi", "try: llmgw ctl move --help"],
  [["ctl", "move", "a", "b", "c"], 'unexpected argument "c"', "try: llmgw ctl move --help"],
  [["ctl", "move"], "REPLICA is missing", "try: llmgw ctl move --help"],
  [["all"], "FILE is missing", "try: llmgw all --help"],
  [["ctl", "move", "a", "--to"], "--to needs a value", "try: llmgw ctl move --help"],
  [["ctl", "move", "a", "--to", "--tries", "2"], "--to needs a value", "write --to NODE"],
  [["ctl", "move", "a", "--to", "b", "--to", "c"], "--to was given twice", "it takes one value"],
  [["ctl", "move", "a", "--tries", "two"], "--tries needs a number", '"two" is not one'],
  [["ctl", "move", "a", "--tries", "2.5"], "--tries needs a whole number", '"2.5" is not one'],
  [["ctl", "move", "a", "--tries", "10"], "--tries 10 is out of range", "it must be between 1 and 9"],
  [["ctl", "move", "a", "--wait=maybe"], "--wait takes no value", "try: --wait"],
  [["ctl", "move", "a", "-o", "jsn"], '--output cannot be "jsn"', "try: --output json"],
  [["ctl", "mvoe"], 'unknown command "mvoe"', "try: llmgw ctl move"],
  [["shm"], 'unknown command "shm"', "try: llmgw --help"],
  [["--config", "x"], "unknown flag --config", "llmgw takes a command first"],
  [["toString"], 'unknown command "toString"', "try: llmgw --help"],
  [["ctl", "move", "a", "--toString"], "unknown flag --toString", "llmgw ctl move has no such flag"],
])("%p is refused", async (words, what, hint) => {
  const { code, out, err } = await run(...words);
  expect({ code, out }).toEqual({ code: "E_USAGE", out: "" });
  expect(err.split("\n")[0]).toBe(`llmgw: ${what} (E_USAGE)`);
  expect(err).toContain(hint);
  expect(err.trimEnd().split("\n")).toHaveLength(3);
});

test("help goes to stdout when asked for and to stderr when a command is missing", async () => {
  const asked = await run("ctl", "--help");
  expect(asked.code).toBe(0);
  expect(asked.out).toContain("move  Moves a replica");
  const missing = await run("ctl");
  expect(missing).toMatchObject({ code: 2, out: "" });
  const help = (await run("ctl", "move", "--help", "--nonsense").catch(String)) as Run;
  expect(help.code).toBe("E_USAGE");
  const move_help = await run("ctl", "move", "-h");
  expect(move_help.out).toContain("llmgw ctl move REPLICA [OTHER] [flags]");
  expect(move_help.out).toContain("--no-wait");
  expect(move_help.out).not.toContain("owner-pid");
  expect((await run("--help")).out).not.toContain("shim");
});

test("links with the runbook's names are their subcommands", () => {
  expect(calledName("/usr/local/bin/llmgw-add-node", root)).toEqual(["add-node"]);
  expect(calledName("llmgw-ctl-node", root)).toEqual(["ctl"]);
  expect(calledName("llmgw-ctl", root)).toEqual(["ctl"]);
  expect(calledName("llmgw-linux-amd64", root)).toEqual([]);
  expect(calledName("/usr/bin/llmgw", root)).toEqual([]);
});

test("a stack trace shows only under --debug", () => {
  const error = new TypeError("oops\n  at line 2");
  expect(errorLines(error, false)).toBe(
    "llmgw: oops; at line 2 (E_INTERNAL)\n  this is a fault in llmgw itself\n  try: run it again with --debug and report what it prints",
  );
  expect(errorLines(error, true)).toContain("frame.test.ts");
});
