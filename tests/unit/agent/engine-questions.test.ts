import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, readFile, rm, utimes, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EngineQuestions } from "../../../src/agent/engine-questions.ts";
import { OLD_LLAMACPP, VLLM_NO_ACCELERATOR, VLLM_SUMMARY, vllmHelp } from "../../fixtures/help-texts.ts";
import { llamaServer } from "../../fixtures/llama-server.ts";
import { launchOf } from "../engines/launches.ts";

const program = await llamaServer();
let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-questions-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

let made = 0;

/** A program that plays vLLM: it writes down what it is asked, and prints what it has for it. */
async function playVllm(whole: string, code = 0): Promise<{ path: string; asked: () => Promise<string[]> }> {
  made += 1;
  const base = join(folder, `vllm-${made}`);
  await writeFile(`${base}.all`, whole);
  await writeFile(`${base}.summary`, VLLM_SUMMARY);
  const script = `#!/bin/sh
echo "$* device=$VLLM_TARGET_DEVICE offline=$HF_HUB_OFFLINE port=$VLLM_PORT" >> '${base}.asked'
case "$*" in
  --version) echo 0.33.0 ;;
  "serve --help=all") cat '${base}.all'; exit ${code} ;;
  *) cat '${base}.summary' ;;
esac
`;
  await writeFile(base, script, { mode: 0o755 });
  const asked = async () => (await readFile(`${base}.asked`, "utf8").catch(() => "")).split("\n").filter((line) => line !== "");
  return { path: base, asked };
}

const ask = (kept: string | null = null) => new EngineQuestions({ engine_user: null, folder: kept && join(folder, kept) });

describe("vLLM, played by a program", () => {
  test("is asked with --help=all, for a device it need not have, with nothing of its own inherited", async () => {
    const vllm = await playVllm(vllmHelp());
    process.env["VLLM_PORT"] = "1";
    const check = await ask().check("vllm", vllm.path);
    delete process.env["VLLM_PORT"];
    expect(check).toMatchObject({ passed: true, version: "0.33.0", help: "whole", subject: vllm.path, trial: null });
    expect(await vllm.asked()).toEqual(["--version device=cpu offline=1 port=", "serve --help=all device=cpu offline=1 port="]);
  });

  test("is not asked for its version when that is known", async () => {
    const vllm = await playVllm(vllmHelp());
    expect(await ask().check("vllm", vllm.path, "0.32.0")).toMatchObject({ passed: true, version: "0.32.0" });
    expect((await vllm.asked()).filter((line) => line.startsWith("--version"))).toEqual([]);
  });

  test("its help is kept as long as the program is the same file, also by the next agent", async () => {
    const vllm = await playVllm(vllmHelp());
    const launch = launchOf("vllm", { args: { "max-model-len": 1_024 } });
    const first = ask("kept");
    expect(await Promise.all([first.refusal(launch, vllm.path, "/m"), first.refusal(launch, vllm.path, "/m")])).toEqual([null, null]);
    expect(await ask("kept").refusal(launch, vllm.path, "/m")).toBeNull();
    expect(await vllm.asked()).toHaveLength(1);
    await utimes(vllm.path, 1, 1);
    await ask("kept").refusal(launch, vllm.path, "/m");
    expect(await vllm.asked()).toHaveLength(2);
  });

  test("a flag it does not have is a reason before any start; where its help proves nothing it may try", async () => {
    const launch = launchOf("vllm", { args: { task: "embed", "enable-lora": false } });
    expect(await ask().refusal(launch, (await playVllm(vllmHelp())).path, "/m")).toContain("--task: removed in 0.13: use --runner");
    const blind = await playVllm(VLLM_NO_ACCELERATOR, 1);
    expect(await ask("blind").refusal(launch, blind.path, "/m")).toBeNull();
    expect(await ask("blind").refusal(launch, blind.path, "/m")).toBeNull();
    expect(await blind.asked()).toHaveLength(2);
  });

  test("one that is not there, or is no program, is an error that names it", async () => {
    const path = join(folder, "nothing");
    const failure = (questions: EngineQuestions, of: string) =>
      questions.check("vllm", of).then(
        () => null,
        (error: unknown) => error,
      );
    expect(await failure(ask(), path)).toMatchObject({ code: "E_ENGINE", message: `cannot ask vllm at ${path}` });
    await writeFile(join(folder, "text"), "hello");
    expect(await failure(ask(), join(folder, "text"))).toMatchObject({ code: "E_ENGINE" });
    const nobody = new EngineQuestions({ engine_user: "llmgw-no-such-user", folder: null });
    expect(await failure(nobody, "/bin/true")).toMatchObject({ code: "E_ENGINE", why: "there is no user llmgw-no-such-user" });
  });
});

describe("llama.cpp", () => {
  test("a program that ends well without being llama-server has passed nothing", async () => {
    const check = await ask().check("llamacpp", "/bin/true");
    expect(check).toMatchObject({ passed: false, version: null, help: "none" });
    expect(check.trial).toContain("no version");
  });

  test("what it took counts more than what its help shows", async () => {
    const path = join(folder, "old-llama");
    await writeFile(`${path}.help`, OLD_LLAMACPP);
    await writeFile(path, `#!/bin/sh\nif [ "$1" = --help ]; then cat '${path}.help'; else echo 'version: 6123 (abc)' >&2; fi\n`, {
      mode: 0o755,
    });
    const check = await ask().check("llamacpp", path);
    expect(check).toMatchObject({ passed: true, version: "6123", trial: "" });
    expect(check.flags.find(({ flag }) => flag === "--no-ui")?.text).toContain("but the engine takes it");
  });

  // Needs Debian's llama-server, which the fixtures fetch where apt-get and the archive can be had.
  describe.skipIf(program === null)("the real one (needs Debian's archive)", () => {
    test("takes the widest command", async () => {
      expect(await ask().check("llamacpp", program ?? "")).toMatchObject({ passed: true, help: "whole", trial: "", warnings: [] });
    });

    test.each<[Record<string, string | number | boolean>, RegExp | null]>([
      [{ "load-mode": "none", threads: 2 }, null],
      [{ "flash-attn": "auto" }, null],
      [{ "no-mmap": true }, /invalid argument: --no-mmap \(removed in 0\.7\.0: use --load-mode none\)/],
      [{ "draft-max": 3 }, /--draft-max|removed/],
      [{ "flash-attn": "sometimes" }, /flash-attn/],
      [{ "no-such-flag": 1 }, /invalid argument: --no-such-flag/],
      [{ "cache-type-k": "nonsense" }, /nonsense|cache/i],
    ])("args %j", async (args, refused) => {
      const said = await ask().refusal(launchOf("llamacpp", { args, context: 512 }), program ?? "", "/nonexistent.gguf");
      if (refused === null) expect(said).toBeNull();
      else expect(said).toMatch(refused);
    });
  });
});
