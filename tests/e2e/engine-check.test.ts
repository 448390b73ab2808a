// `llmgw ctl engine-check` of the compiled binary: on texts, on a program, on a node; and what a node does with a renamed flag.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { EngineCheck } from "../../src/protocol/engine-check.ts";
import { parseAs } from "../../src/protocol/errors.ts";
import { OLD_LLAMACPP, sglangHelp, VLLM_NO_ACCELERATOR, VLLM_SUMMARY, vllmHelp } from "../fixtures/help-texts.ts";
import { llamaServer } from "../fixtures/llama-server.ts";
import { writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { Fleet, runBinary } from "./fleet.ts";

const SET_UP_MS = 240_000;
const TEST_MS = 60_000;
const program = await llamaServer();
let folder = "";

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "le-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const check = (...words: string[]) => runBinary(["ctl", "engine-check", ...words], {}, folder);

async function checkText(engine: string, text: string, ...words: string[]) {
  const file = join(folder, "help.txt");
  await writeFile(file, text);
  return check(engine, "--help-file", file, ...words);
}

describe("on a text, with no server and no context", () => {
  test.each([
    ["vllm", vllmHelp(), 0, "passed: of "],
    ["vllm", vllmHelp(["--nnodes"]), 1, "--nnodes  2      missing"],
    ["vllm", VLLM_SUMMARY, 1, "warning: this is vLLM's summary: give the output of vllm serve --help=all"],
    ["vllm", VLLM_NO_ACCELERATOR, 1, "run the check on a GPU node"],
    ["sglang", sglangHelp(), 0, "passed: of "],
    ["llamacpp", OLD_LLAMACPP, 1, "calls it --no-webui"],
    ["llamacpp", OLD_LLAMACPP.slice(0, OLD_LLAMACPP.indexOf("--no-webui")), 1, "warning: the text is cut"],
  ])("%s %#", async (engine, text, code, said) => {
    const ran = await checkText(engine, text);
    expect(ran.out).toContain(said);
    expect(ran).toMatchObject({ code, err: "" });
  });

  test("a text that never ends is no help text", async () => {
    const ran = await check("llamacpp", "--help-file", "/dev/zero");
    expect(ran).toMatchObject({ code: 2, out: "" });
    expect(ran.err).toContain("/dev/zero is too long");
  });

  test("as JSON, from an argument, from stdin", async () => {
    const file = await checkText("sglang", sglangHelp(), "-o", "json");
    const found = parseAs(EngineCheck, JSON.parse(file.out), "the check");
    expect(found).toMatchObject({ engine: "sglang", passed: true, help: "whole", trial: null, version: null });
    expect(found.flags.map(({ verdict }) => verdict)).not.toContain("missing");
    const argument = await check("sglang", "--help-output", sglangHelp(), "-o", "json");
    expect(JSON.parse(argument.out)).toEqual({ ...found, subject: "the given text" });
    const child = Bun.spawn([binary, "ctl", "engine-check", "sglang", "--help-file", "-"], {
      cwd: folder,
      env: {},
      stdin: new Blob([sglangHelp()]),
      stdout: "pipe",
      stderr: "pipe",
    });
    expect(await child.stdout.text()).toContain("passed");
    expect(await child.exited).toBe(0);
  });

  test.each([
    [["nonsense"], 2],
    [["vllm", "--bin", "/bin/true", "--node", "a"], 2],
    [["vllm", "--help-file", "/nonexistent"], 2],
    [["vllm", "--bin", "/nonexistent"], 1],
  ])("%j ends with %d and says why", async (words, code) => {
    const ran = await check(...words);
    expect(ran).toMatchObject({ code, out: "" });
    expect(ran.err.trim().split("\n")).toHaveLength(3);
  });
});

// It needs a llama-server from Debian's archive.
describe.skipIf(program === null)("on a real llama-server (needs Debian's archive)", () => {
  let fleet: Fleet;
  let model = "";
  beforeAll(async () => {
    model = join(folder, "tiny.gguf");
    await writeTinyGguf(model);
    fleet = await Fleet.start({ nodes: 1, llama_server: program ?? "", models: [] });
  }, SET_UP_MS);
  afterAll(() => fleet?.stop());

  test(
    "as a program, and on a node that uses it",
    async () => {
      const here = await check("llamacpp", "--bin", program ?? "", "-o", "json");
      expect(here).toMatchObject({ code: 0, err: "" });
      const found = parseAs(EngineCheck, JSON.parse(here.out), "the check");
      expect(found).toMatchObject({ passed: true, help: "whole", trial: "", version: expect.stringMatching(/^\d/) });
      expect(await fleet.ctl("engine-check", "llamacpp", "--node", "n1")).toEqual(found);
    },
    TEST_MS,
  );

  test.each([
    [["vllm", "--node", "n1"], "it has no vllm"],
    [["llamacpp", "--node", "n9"], 'there is no node "n9"'],
  ])(
    "%j is an error that says why",
    async (words, said) => {
      const ran = await runBinary(["ctl", "engine-check", ...words], { LLMGW_CONFIG: fleet.ctlConfig }, folder);
      expect(ran).toMatchObject({ code: 1, out: "" });
      expect(ran.err).toContain(said);
    },
    TEST_MS,
  );

  test(
    "a renamed flag in the catalog is a reason on the replica, and no engine was started",
    async () => {
      await fleet.serve([{ name: "renamed", engine: "llamacpp", source: model, context: 512, args: { "no-mmap": true } }]);
      const replica = await fleet.waitFor("it to fail", async () =>
        (await fleet.replicas()).find(({ state, failures }) => state === "failed" && failures > 0),
      );
      expect(replica.reason).toContain("invalid argument: --no-mmap (removed in 0.7.0: use --load-mode none)");
      expect(replica.last_lines.join("\n")).toContain("--no-mmap");
      expect((await fleet.must("ctl", "why", replica.id)).out).toContain("--load-mode none");
      expect(replica.ranks.every(({ engine_pid }) => engine_pid === null)).toBe(true);
    },
    TEST_MS,
  );

  test(
    "args that are llmgw's own are refused with the catalog, by any name",
    async () => {
      for (const [args, said] of [
        [{ port: 80 }, "args may not set port"],
        [{ m: "/etc/passwd" }, "it means -m"],
      ] as const) {
        const failure = await fleet.serve([{ name: "own", engine: "llamacpp", source: model, args }]).catch((error: unknown) => error);
        expect(String(failure)).toContain(said);
      }
    },
    TEST_MS,
  );
});
