import { expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { checkYaml, parseYaml, readYaml } from "../../../src/os/yaml.ts";
import { Catalog } from "../../../src/protocol/catalog.ts";
import { AgentConfig, ServerConfig } from "../../../src/protocol/config.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import { CONFIG_FILE_BYTES } from "../../../src/protocol/limits.ts";

function refusal(run: () => unknown): OperatorError {
  try {
    run();
  } catch (error) {
    if (error instanceof OperatorError) return error;
    throw error;
  }
  throw new Error("nothing was refused");
}

test("a right file is read with its defaults", () => {
  const config = parseYaml("listen: { control: 127.0.0.1:1 }\n", "s.yaml", ServerConfig, "it");
  expect(config.listen).toEqual({ control: "127.0.0.1:1", gateway: "127.0.0.1:8080" });
});

test.each([
  ["lisen: {}\n", ServerConfig, '1:1: unknown key "lisen"', "write listen"],
  ["state: /x\ngateway:\n  auth: keys\n  tsl: {}\n", ServerConfig, '4:3: unknown key "tsl"', "write tls"],
  ["zzzzzzzzz: 1\n", Catalog, '1:1: unknown key "zzzzzzzzz"', "write one of models"],
  ["log:\n  level: wran\n", ServerConfig, "2:10: log.level: expected", "write warn"],
  ["listen:\n  control: nowhere\n", ServerConfig, "2:12: listen.control: write host:port", "correct it"],
  ["models:\n  - name: a\n    engine: sim\n    replicas: two\n", Catalog, "4:15: models.0.replicas: expected number", "correct it"],
  ["models:\n  - engine: sim\n", Catalog, '2:5: "name" is missing in models.0', "correct it"],
  ["models:\n  - name: a\n    engine: sim\n    argz: {}\n", Catalog, '4:5: unknown key "argz"', "write args"],
  [
    "models:\n  - { name: a, engine: sim }\n  - { name: a, engine: sim }\n",
    Catalog,
    '3:13: models.1.name: the name "a" is taken',
    "correct it",
  ],
  ["node: a\n", AgentConfig, '1:1: "servers" is missing', "correct it"],
  ["state: a\nstate: b\n", ServerConfig, "2:1: Map keys must be unique", "correct it"],
  ["state: [a\n", ServerConfig, "2:1: Flow sequence", "correct it"],
  ["state: a\n---\nrun: b\n", ServerConfig, "2:1: a second document starts here", "correct it"],
  ["listen: { ? [a, b] : 1 }\n", ServerConfig, "1:13: a key is a word, and not a list or a map", "correct it"],
  ["", ServerConfig, "1:1: the file is empty", "correct it"],
  ["just words\n", ServerConfig, "1:1: the file: expected Object", "correct it"],
] as const)("%j is refused with its place", (text, schema, what, remedy) => {
  const error = refusal(() => parseYaml(text, "f.yaml", schema, "it"));
  expect(error.code).toBe("E_CONFIG");
  expect(error.message).toStartWith(`f.yaml:${what}`);
  expect(error.remedy).toStartWith(remedy);
});

test("all faults are told, in the order of the file", () => {
  const { faults } = checkYaml("zzz: 1\nlog: { level: x }\nstate: 3\n", ServerConfig);
  expect(faults?.map(({ line }) => line)).toEqual([1, 2, 3]);
  expect(refusal(() => parseYaml("zzz: 1\nstate: 3\n", "f", ServerConfig, "it")).why).toBe("it is not valid; 1 more place is wrong");
});

test("aliases do not expand without end", () => {
  const bomb = ["a: &a [x,x,x,x,x,x,x,x,x]"];
  for (let level = 1; level < 9; level++) {
    const [name, before] = ["abcdefghi"[level], "abcdefghi"[level - 1]];
    bomb.push(`${name}: &${name} [${Array(9).fill(`*${before}`).join(",")}]`);
  }
  expect(refusal(() => parseYaml(bomb.join("\n"), "f", Catalog, "it")).message).toContain("Excessive alias count");
});

test("a file that is not there, or too large, is refused", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-yaml-"));
  try {
    const missing = await readYaml(join(folder, "none.yaml"), Catalog, "the catalog").catch((error: unknown) => error);
    expect(missing).toMatchObject({ code: "E_CONFIG", message: "cannot read the catalog" });
    const large = join(folder, "large.yaml");
    await writeFile(large, "#".repeat(CONFIG_FILE_BYTES + 1));
    expect(await readYaml(large, Catalog, "the catalog").catch((error: unknown) => error)).toMatchObject({ code: "E_CONFIG" });
    const good = join(folder, "good.yaml");
    await writeFile(good, "models: []\n");
    expect(await readYaml(good, Catalog, "the catalog")).toEqual({ models: [] });
  } finally {
    await rm(folder, { recursive: true });
  }
});
