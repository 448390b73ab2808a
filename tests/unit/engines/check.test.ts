import { describe, expect, test } from "bun:test";
import { checkHelp, refusalBy, refusalIn, widestCommands, widestFlags } from "../../../src/engines/check.ts";
import { readHelp } from "../../../src/engines/help.ts";
import { ENGINES, engineOf } from "../../../src/engines/registry.ts";
import type { FlagVerdict } from "../../../src/protocol/engine-check.ts";
import type { EngineKind } from "../../../src/protocol/ids.ts";
import { OLD_LLAMACPP, sglangHelp, VLLM_GROUP, VLLM_NO_ACCELERATOR, VLLM_SUMMARY, vllmHelp } from "../../fixtures/help-texts.ts";
import { llamaServer } from "../../fixtures/llama-server.ts";
import { inGang, inputOf } from "./launches.ts";

const program = await llamaServer();

/** The help of the real llama-server, as it prints it. */
async function realHelp(): Promise<string> {
  const child = Bun.spawn([program ?? "", "--help"], { stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  return `${out}\n${err}`;
}

const real_help = program === null ? null : await realHelp();

const check = (kind: EngineKind, text: string, trial: string | null = null) =>
  checkHelp(engineOf(kind), text, { subject: "a test", version: null, trial });

/** The flags of each verdict but `accepted`. */
function notAccepted(kind: EngineKind, text: string, trial: string | null = null): Partial<Record<FlagVerdict, string[]>> {
  const bad = check(kind, text, trial).flags.filter(({ verdict }) => verdict !== "accepted");
  return Object.fromEntries(
    Map.groupBy(bad, ({ verdict }) => verdict)
      .entries()
      .map(([verdict, all]) => [verdict, all.map(({ flag }) => flag)]),
  );
}

describe("the widest command", () => {
  test("has every flag that any command of the engine has", () => {
    for (const engine of ENGINES) {
      const names = new Set(widestFlags(engine).map(({ name }) => name));
      const gangs = engine.gangs ? [inGang(0), inGang(1)] : [];
      const launches = [{}, { embeddings: true }, { gpus: ["GPU-1"], context: 1, parallel: 1, embeddings: true }, ...gangs];
      for (const launch of launches) {
        for (const { name } of engine.command(inputOf(engine.kind, launch)).flags) expect(names).toContain(name);
      }
    }
  });

  test("is one of several nodes, and never has llama.cpp's --rpc", () => {
    const vllm = widestFlags(engineOf("vllm")).map(({ name }) => name);
    expect(vllm).toEqual(expect.arrayContaining(["--nnodes", "--headless", "--pipeline-parallel-size", "--runner", "--max-num-seqs"]));
    const sglang = widestFlags(engineOf("sglang")).map(({ name }) => name);
    expect(sglang).toEqual(expect.arrayContaining(["--dist-init-addr", "--pp-size", "--is-embedding", "--config"]));
    expect(widestCommands(engineOf("llamacpp")).flatMap(({ argv }) => argv)).not.toContain("--rpc");
  });
});

describe("vLLM", () => {
  test("its whole help proves every flag", () => {
    expect(check("vllm", vllmHelp())).toMatchObject({ passed: true, help: "whole", warnings: [] });
  });

  test.each([
    ["its summary", VLLM_SUMMARY, "--help=all"],
    ["its error where no accelerator is", VLLM_NO_ACCELERATOR, "GPU node"],
    ["an empty text", "", "--help=all"],
  ])("%s proves nothing, and says what to give", (_what, text, said) => {
    const found = check("vllm", text);
    expect(found).toMatchObject({ passed: false, help: "none" });
    expect(found.warnings.join()).toContain(said);
    expect(new Set(found.flags.map(({ verdict }) => verdict))).toEqual(new Set(["unproved"]));
  });

  test("one of its groups proves what is in it", () => {
    const found = check("vllm", VLLM_GROUP);
    expect(found.help).toBe("cut");
    expect(found.warnings.join()).toContain("--help=all");
    expect(found.warnings.join()).toContain("does not document --help itself");
    expect(found.flags.find(({ flag }) => flag === "--nnodes")?.verdict).toBe("accepted");
    expect(found.flags.find(({ flag }) => flag === "--uds")?.verdict).toBe("unproved");
  });

  test("a flag an older version does not have is missing, with what is known of it", () => {
    const found = check("vllm", vllmHelp(["--shutdown-timeout"]));
    expect(notAccepted("vllm", vllmHelp(["--shutdown-timeout"]))).toEqual({ missing: ["--shutdown-timeout"] });
    expect(found.flags.find(({ flag }) => flag === "--shutdown-timeout")?.text).toContain("0.18");
    expect(found.passed).toBe(false);
  });

  test("a value that is no choice any more is refused", () => {
    const text = vllmHelp().replace("{external_launcher,mp,ray,uni}", "{external_launcher,multi,ray,uni}");
    expect(notAccepted("vllm", text)).toEqual({ "bad-value": ["--distributed-executor-backend"] });
  });
});

describe("SGLang", () => {
  test("its whole help proves every flag", () => {
    expect(check("sglang", sglangHelp())).toMatchObject({ passed: true, help: "whole", warnings: [] });
  });

  test("cut in its list, what is only in the usage is unproved", () => {
    const text = sglangHelp();
    const found = check("sglang", text.slice(0, text.lastIndexOf("  --nnodes")));
    expect(found.help).toBe("cut");
    expect(found.flags.find(({ flag }) => flag === "--nnodes")?.verdict).toBe("unproved");
    expect(found.flags.find(({ flag }) => flag === "--dist-init-addr")?.verdict).toBe("accepted");
  });
});

describe("llama.cpp", () => {
  test("an older help is missing what the build calls otherwise, and says how", () => {
    expect(notAccepted("llamacpp", OLD_LLAMACPP)).toEqual({ missing: ["--no-ui"] });
    expect(check("llamacpp", OLD_LLAMACPP).flags.find(({ flag }) => flag === "--no-ui")?.text).toContain("--no-webui");
    const asked = (args: Record<string, string | boolean>) => {
      const flags = engineOf("llamacpp")
        .command(inputOf("llamacpp", { args }))
        .flags.filter(({ name }) => name !== "--no-ui");
      return refusalBy(engineOf("llamacpp"), OLD_LLAMACPP, flags);
    };
    expect(asked({ "no-mmap": true })).toBeNull();
    expect(asked({ "load-mode": "none" })).toContain("--no-mmap");
    expect(asked({ "flash-attn": "on" })).toContain("takes no value");
  });

  test("what it took as a whole command needs no word of its help", () => {
    expect(notAccepted("llamacpp", OLD_LLAMACPP, "")).toEqual({});
    expect(check("llamacpp", OLD_LLAMACPP, "error: invalid argument: --no-ui").passed).toBe(false);
  });

  test("its own last error is the reason, with what is known of the flag", () => {
    const said = "ggml: loading\nerror: invalid argument: --no-mmap\n\nusage: see --help\n";
    expect(refusalIn(engineOf("llamacpp"), said)).toBe("error: invalid argument: --no-mmap (removed in 0.7.0: use --load-mode none)");
    expect(refusalIn(engineOf("vllm"), "usage: a\n\nvllm serve: error: unrecognized arguments: --task=x\n")).toContain("--runner");
    expect(refusalIn(engineOf("llamacpp"), "")).toBe("nothing");
  });

  // Needs Debian's llama-server, which the fixtures fetch where apt-get and the archive can be had.
  test.skipIf(program === null)("the real one's help proves every flag (needs Debian's archive)", () => {
    expect(check("llamacpp", real_help ?? "")).toMatchObject({ passed: true, help: "whole", warnings: [] });
  });

  test.skipIf(program === null)(
    "the real one's help cut at 400 lines names what it misses as unproved, none as gone (needs Debian's archive)",
    async () => {
      const text = (real_help ?? "").split("\n").slice(0, 400).join("\n");
      const found = check("llamacpp", text);
      expect(found).toMatchObject({ passed: false, help: "cut" });
      expect(found.warnings.join()).toContain("example-specific params");
      const { unproved = [], ...rest } = notAccepted("llamacpp", text);
      expect(rest).toEqual({});
      expect(unproved).toEqual(expect.arrayContaining(["--host", "--alias", "--metrics", "--parallel", "--no-ui"]));
      expect(unproved).not.toContain("--model");
    },
  );
});

describe("the rules for args and the help", () => {
  const texts: readonly [EngineKind, string][] = [
    ["vllm", vllmHelp()],
    ["sglang", sglangHelp()],
    ...(real_help === null ? [] : [["llamacpp", real_help] as [EngineKind, string]]),
  ];
  test.each(texts)("%s: a flag that is owned is so by all its names, and no other flag is taken for its beginning", (kind, text) => {
    const { owned, whole, parser } = engineOf(kind).rules;
    const { flags } = readHelp(kind, text);
    for (const name of owned) for (const other of flags.get(name)?.names ?? []) expect(owned).toContain(other);
    if (parser !== "argparse") return;
    const mistaken = [...flags.keys()].filter(
      (name) => !owned.includes(name) && name.startsWith("--") && owned.some((each) => each.startsWith(name)),
    );
    expect(mistaken.filter((name) => !whole.includes(name))).toEqual([]);
  });
});
