// Building both targets twice takes half a minute and 900 MB of disk, so it is not part of `npm test`.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { root } from "../../release/fresh.ts";

const BUILD_MS = 240_000;
let folder = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-build-"));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function build(name: string): Promise<Record<string, string>> {
  const out = join(folder, name);
  const child = Bun.spawn([process.execPath, "build.ts", "--out", out], { cwd: root, stdout: "ignore", stderr: "pipe" });
  const [errors, code] = await Promise.all([child.stderr.text(), child.exited]);
  if (code !== 0) throw new Error(errors);
  const hashes: Record<string, string> = {};
  for (const file of await readdir(out))
    hashes[file] = new Bun.CryptoHasher("sha256").update(await Bun.file(join(out, file)).bytes()).digest("hex");
  return hashes;
}

test(
  "the same sources give the same bytes",
  async () => {
    const first = await build("a");
    expect(Object.keys(first).toSorted((a, b) => a.localeCompare(b))).toEqual([
      "llmgw",
      "llmgw-linux-amd64",
      "llmgw-linux-amd64.map",
      "llmgw-linux-arm64",
      "llmgw-linux-arm64.map",
    ]);
    expect(await build("b")).toEqual(first);
    expect(first["llmgw"] === first[process.arch === "arm64" ? "llmgw-linux-arm64" : "llmgw-linux-amd64"]).toBe(true);
  },
  BUILD_MS,
);

test.each([
  ["llmgw-linux-amd64", 62],
  ["llmgw-linux-arm64", 183],
])(
  "%s is a 64-bit little-endian ELF program for machine %d",
  async (name, machine) => {
    const file = Bun.file(join(folder, "a", name));
    const header = Buffer.from(await file.slice(0, 20).arrayBuffer());
    expect(header.subarray(0, 6).toString("latin1")).toBe("\u007fELF\u0002\u0001");
    expect(header.readUInt16LE(18)).toBe(machine);
  },
  BUILD_MS,
);

test("no path of the build machine is in the binary", async () => {
  const bytes = Buffer.from(await Bun.file(join(folder, "a", "llmgw-linux-amd64")).arrayBuffer());
  expect(bytes.includes(root)).toBe(false);
  expect(bytes.includes("LLMGW_COMMIT")).toBe(false);
});
