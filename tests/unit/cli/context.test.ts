import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdtemp, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { chooseContext, contextPath, readContexts, writeContexts, type Context, type ContextFile } from "../../../src/cli/context.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-context-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const prod: Context = { servers: ["https://10.0.0.2:7443"], ca: "ca.crt", cert: "/abs/admin.crt", key: "admin.key" };
const lab: Context = { ...prod, servers: ["https://10.0.0.3:7443"] };

async function refusal(act: () => unknown): Promise<OperatorError> {
  try {
    await act();
  } catch (error) {
    if (error instanceof OperatorError) return error;
    throw error;
  }
  throw new Error("nothing was refused");
}

test.each([
  ["mine.yaml", { LLMGW_CONFIG: "/other", HOME: "/h" }, "/cwd/mine.yaml"],
  [undefined, { LLMGW_CONFIG: "/other", HOME: "/h" }, "/other"],
  [undefined, { LLMGW_CONFIG: "", XDG_CONFIG_HOME: "/x", HOME: "/h" }, "/x/llmgw/config.yaml"],
  [undefined, { XDG_CONFIG_HOME: "relative", HOME: "/h" }, "/h/.config/llmgw/config.yaml"],
])("--config %p and %p lead to %s", (flag, env, path) => {
  expect(contextPath(flag, { env, cwd: "/cwd" })).toBe(path);
});

test("without a home a file has to be named", async () => {
  expect((await refusal(() => contextPath(undefined, { env: {}, cwd: "/" }))).code).toBe("E_CONFIG");
});

test("what is written is read again, and is the owner's alone", async () => {
  const path = join(folder, "deep", "er", "config.yaml");
  const file: ContextFile = { current: "prod", contexts: { prod, lab } };
  await writeContexts(path, file);
  expect(await readContexts(path)).toEqual(file);
  expect((await stat(path)).mode & 0o777).toBe(0o600);
  expect((await stat(dirname(path))).mode & 0o777).toBe(0o700);
});

test.each([0o644, 0o640, 0o602])("a file of mode %o is refused", async (mode) => {
  const path = join(folder, `mode-${mode}.yaml`);
  await writeContexts(path, { contexts: { prod } });
  await chmod(path, mode);
  const { code, remedy } = await refusal(() => readContexts(path));
  expect({ code, remedy }).toEqual({ code: "E_CONFIG", remedy: `chmod 600 ${path}` });
});

test("no file is an empty one, and a wrong one names its place", async () => {
  expect(await readContexts(join(folder, "none.yaml"))).toEqual({ contexts: {} });
  const path = join(folder, "wrong.yaml");
  await writeFile(path, "contexts: {}\ncurent: prod\n", { mode: 0o600 });
  expect((await refusal(() => readContexts(path))).message).toBe(`${path}:2:1: unknown key "curent"`);
});

test.each([
  ["lab", {}, undefined, "lab"],
  [undefined, { LLMGW_CONTEXT: "lab" }, "prod", "lab"],
  [undefined, { LLMGW_CONTEXT: "" }, "prod", "prod"],
])("flag %p, environment %p and current %p choose %s", (flag, env, current, name) => {
  const file = { ...(current === undefined ? {} : { current }), contexts: { prod, lab } };
  expect(chooseContext(file, flag, env, "/f/config.yaml").name).toBe(name);
});

test("the only context needs no choice, and its paths are relative to its file", () => {
  const { name, context } = chooseContext({ contexts: { prod } }, undefined, {}, "/f/config.yaml");
  expect({ name, context }).toEqual({ name: "prod", context: { ...prod, ca: "/f/ca.crt", key: "/f/admin.key" } });
});

test.each([
  [{ contexts: { prod, lab } }, "prd", "--context prod"],
  [{ contexts: { prod, lab } }, "zzz", "llmgw ctl context ls"],
  [{ contexts: { prod, lab } }, undefined, "llmgw ctl context use NAME"],
  [{ contexts: {} }, undefined, "llmgw ctl context add NAME --server https://HOST:7443 --ca FILE --cert FILE --key FILE"],
  [{ contexts: { prod } }, "toString", "llmgw ctl context ls"],
])("%p has no context %p", async (file: ContextFile, flag: string | undefined, remedy) => {
  const error = await refusal(() => chooseContext(file, flag, {}, "/f"));
  expect({ code: error.code, remedy: error.remedy }).toEqual({ code: "E_CONFIG", remedy });
});
