import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtemp, rm, stat } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makeFolderOnce, makePassableFolder, makePrivateFolder } from "../../../src/os/files.ts";

let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-files-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const modeOf = async (path: string) => (await stat(path)).mode & 0o777;

describe("a folder that is made", () => {
  test.each([
    ["private", makePrivateFolder, 0o700],
    ["passable", makePassableFolder, 0o711],
    ["once", (path: string) => makeFolderOnce(path, 0o700), 0o700],
  ] as const)("%s: has its mode, and others may pass through the ones above it", async (name, make, mode) => {
    await make(join(folder, name, "above", "own"));
    expect(await modeOf(join(folder, name, "above", "own"))).toBe(mode);
    expect((await modeOf(join(folder, name, "above"))) & 0o011).toBe(0o011);
  });

  test("that was there is closed by makePrivateFolder, and left as it is by makeFolderOnce", async () => {
    const path = join(folder, "there");
    await makePassableFolder(path);
    await makeFolderOnce(path, 0o700);
    expect(await modeOf(path)).toBe(0o711);
    await makePrivateFolder(path);
    expect(await modeOf(path)).toBe(0o700);
  });

  test("below a file is an error that says where", async () => {
    const closed = join(folder, "file");
    await Bun.write(closed, "");
    const path = join(closed, "in", "it");
    const error: unknown = await makeFolderOnce(path, 0o700).then(
      () => null,
      (thrown: unknown) => thrown,
    );
    expect(error).toMatchObject({ code: "E_FILE", message: `cannot make the folder ${path}` });
  });
});
