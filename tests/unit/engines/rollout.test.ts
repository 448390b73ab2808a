import { expect, test } from "bun:test";
import { checkHelp } from "../../../src/engines/check.ts";
import { engineOf } from "../../../src/engines/registry.ts";
import { chooseProgram, faultOf, type Candidate } from "../../../src/engines/rollout.ts";
import { VLLM_SUMMARY, vllmHelp } from "../../fixtures/help-texts.ts";

const installed = (version: string, fault = ""): Candidate => ({ version, path: `/engines/${version}`, origin: "installed", fault });
const named = (fault = ""): Candidate => ({ version: "9.9", path: "/opt/vllm", origin: "path", fault });

test.each<[string, Candidate[], string, string | null, string | null, string]>([
  ["the wanted one, once it passed", [installed("2"), installed("1")], "2", "1", "2", ""],
  ["the one before, while the new one is not there", [installed("1")], "2", "1", "1", "2 is not installed; 1 stays in use"],
  [
    "the one before, when the new one fails",
    [installed("2", "it lacks --uds"), installed("1")],
    "2",
    "1",
    "1",
    "2 is installed but not used: it lacks --uds; 1 stays in use",
  ],
  [
    "the one used last, not any other",
    [installed("3"), installed("2", "bad"), installed("1")],
    "2",
    "1",
    "1",
    "2 is installed but not used: bad; 1 stays in use",
  ],
  ["back to an older one, when it is wanted", [installed("2"), installed("1")], "1", "2", "1", ""],
  ["none, when nothing passed", [installed("2", "bad"), installed("1", "worse")], "2", "1", null, "2 is installed but not used: bad"],
  ["the installed one, though another is named", [installed("2"), named()], "2", null, "2", "the installed one is used, and not /opt/vllm"],
  ["the named one, until the wanted one is there", [named()], "2", null, "9.9", "2 is not installed; 9.9 stays in use"],
  ["the named one, when no version is wanted", [installed("2"), named()], "", "2", "9.9", ""],
  ["none, when the named one has a fault", [named("no such file")], "", null, null, "no such file"],
  ["none, when there is none", [], "", null, null, "no version is wanted, and none is named by path"],
])("%s", (_what, candidates, wanted, last, used, reason) => {
  const choice = chooseProgram(candidates, wanted, last);
  expect(choice.use?.version ?? null).toBe(used);
  expect(choice.reason).toBe(reason);
});

test("a failed check is told in a sentence that names the flags", () => {
  const check = (text: string, trial: string | null = null) =>
    faultOf(checkHelp(engineOf("vllm"), text, { subject: "", version: null, trial }));
  expect(check(vllmHelp())).toBe("");
  expect(check(vllmHelp(["--uds"]))).toContain("it does not take --uds (");
  expect(check(VLLM_SUMMARY)).toContain("its help proves nothing: this is vLLM's summary");
  expect(check(vllmHelp(), "error: no")).toBe("it does not take its arguments: error: no");
});
