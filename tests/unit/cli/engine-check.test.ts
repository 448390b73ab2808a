// Which program `llmgw ctl engine-check` asks when it is told none.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, utimes, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { programHere } from "../../../src/cli/ctl/engine-check.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import { INSTALLABLE_KINDS } from "../../../src/protocol/ids.ts";

let state: string;
beforeAll(async () => {
  state = await mkdtemp(join(tmpdir(), "llmgw-check-"));
  const mark = (version: string) => JSON.stringify({ version, program: "bin/vllm", note: "", features: [] });
  for (const [version, age_s] of Object.entries({ "0.9.0": 10, "0.33.0": 20, "0.34.0": 0 })) {
    const folder = join(state, "engines", "vllm", version);
    await mkdir(join(folder, "bin"), { recursive: true });
    await writeFile(join(folder, "bin", "vllm"), "");
    // What came to nothing has no mark.
    if (age_s === 0) continue;
    await writeFile(join(folder, "installed.json"), mark(version));
    const at_s = 1_000_000 - age_s;
    await utimes(join(folder, "installed.json"), at_s, at_s);
  }
});
afterAll(() => rm(state, { recursive: true, force: true }));

test("it is the newest that was installed whole", async () => {
  expect(await programHere("vllm", { state })).toBe(join(state, "engines/vllm/0.9.0/bin/vllm"));
});

test("what the agent is told comes first, for each engine by its key", async () => {
  const told = { state, llamacpp_bin: "/opt/llamacpp", vllm_bin: "/opt/vllm", sglang_python: "/opt/sglang" };
  for (const kind of INSTALLABLE_KINDS) expect(await programHere(kind, told)).toBe(`/opt/${kind}`);
});

test("where there is none it says where it looked", async () => {
  const error = await programHere("sglang", { state }).catch((thrown: OperatorError) => thrown);
  expect(error).toMatchObject({ code: "E_NOT_FOUND", why: expect.stringContaining(join(state, "engines/sglang")) });
});

test("a file that this user may not read is not said to name none", async () => {
  const unread = join(state, "engines/vllm/0.9.0/bin/vllm", "agent.yaml");
  const error = await programHere("sglang", { state }, unread).catch((thrown: OperatorError) => thrown);
  expect(error).toMatchObject({ why: expect.stringContaining(`this user may not read ${unread}, and none is in `) });
});
