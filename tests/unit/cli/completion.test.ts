import { expect, test } from "bun:test";
import { completionScript } from "../../../src/cli/completion.ts";
import { command, group } from "../../../src/cli/frame.ts";

const run = async () => 0;
const nodes = command({
  name: "nodes",
  about: "Lists the fleet's nodes",
  examples: [],
  flags: {
    output: { type: "string", short: "o", choices: ["table", "json"], about: "form" },
    watch: { type: "boolean", default: true, about: "go on" },
    inner: { type: "string", hidden: true, about: "" },
  },
  args: [],
  run,
});
const shell = command({
  name: "shell",
  about: "A shell",
  examples: [],
  flags: {},
  args: [{ name: "S", about: "", choices: ["bash", "zsh"] }],
  run,
});
const shim = command({ name: "shim", about: "", hidden: true, examples: [], flags: {}, args: [], run });
const ctl = group({ name: "ctl", about: "Speaks to the server", commands: () => [nodes] });
const root = group({ name: "llmgw", about: "", commands: () => [ctl, shell, shim] });

async function complete(...words: string[]): Promise<string[]> {
  const tail = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _llmgw; printf "%s\\n" "${COMPREPLY[@]}"';
  const script = `${await completionScript("bash", root)}\n${tail}`;
  const { stdout, stderr } = Bun.spawnSync(["bash", "--norc", "-c", script, "bash", ...words]);
  expect(stderr.toString()).toBe("");
  return stdout.toString().trim().split("\n");
}

test("bash completes commands, flags and the values of flags", async () => {
  expect(await complete("llmgw", "")).toEqual(["ctl", "shell", "--help"]);
  expect(await complete("llmgw", "ctl", "n")).toEqual(["nodes"]);
  expect(await complete("llmgw", "ctl", "nodes", "--")).toEqual(["--output", "--no-watch", "--help", "--debug", "--no-color"]);
  expect(await complete("llmgw", "ctl", "nodes", "-o", "")).toEqual(["table", "json"]);
  expect(await complete("llmgw", "ctl", "nodes", "--output", "j")).toEqual(["json"]);
  expect(await complete("llmgw", "shell", "z")).toEqual(["zsh"]);
});

test("fish gets every command that people see", async () => {
  const script = await completionScript("fish", root);
  expect(script).toContain("-f -a nodes -d 'Lists the fleet'\\''s nodes'");
  expect(script).not.toContain("shim");
  expect(script).not.toContain("inner");
});
