import { expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { addressOf, engineAt } from "../../../src/cli/add-node.ts";

test("an address may have its network's length", () => {
  expect(["10.0.0.145/24", "10.0.0.145", "fd00::5/64"].map(addressOf)).toEqual(["10.0.0.145", "10.0.0.145", "fd00::5"]);
});

test("a folder of a release is copied, anything else is a path on the node", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-engine-"));
  try {
    expect(await engineAt("/opt/none/llama-server", folder)).toMatchObject({ path: "/opt/none/llama-server", copies: [] });
    await mkdir(join(folder, "empty"));
    expect(await engineAt("empty", folder).then(() => "", String)).toContain("there is no llama-server in");
    await writeFile(join(folder, "empty", "llama-server"), "");
    const copied = { path: join(folder, "empty", "llama-server"), copies: [{ folder: join(folder, "empty") }] };
    expect(await engineAt("empty", folder)).toMatchObject(copied);
    expect(await engineAt("empty/llama-server", folder)).toMatchObject({ path: "empty/llama-server", copies: [] });
  } finally {
    await rm(folder, { recursive: true });
  }
});
