import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

const LINES = 100_000;
const frame = join(import.meta.dir, "..", "..", "..", "src", "cli", "frame.ts");
const program = `
import { main, command, group } from ${JSON.stringify(frame)};
const many = command({ name: "many", about: "", examples: [], flags: {}, args: [], run: async ({ io }) => {
  for (let line = 0; line < ${LINES}; line++) io.out(\`line \${line} of many\`);
  return 4;
} });
const late = command({ name: "late", about: "", examples: [], flags: {}, args: [], run: () => {
  setTimeout(() => { throw new Error("too late"); }, 1);
  return new Promise(() => setTimeout(() => {}, 60_000));
} });
const lost = command({ name: "lost", about: "", examples: [], flags: {}, args: [], run: () => {
  void Promise.reject(new Error("nobody waits"));
  return new Promise(() => setTimeout(() => {}, 60_000));
} });
await main(group({ name: "llmgw", about: "", commands: () => [many, late, lost] }), "bun", process.argv.slice(2));
`;

let folder = "";
let script = "";
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-terminal-"));
  script = join(folder, "many.ts");
  await writeFile(script, program);
});
afterAll(() => rm(folder, { recursive: true, force: true }));

async function shell(line: string): Promise<{ out: string; err: string }> {
  const child = Bun.spawn(["bash", "-c", line, "bash", process.execPath, script], { stdout: "pipe", stderr: "pipe" });
  const [out, err] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { out: out.trim(), err };
}

test("a slow reader gets every line before the process ends", async () => {
  const { out } = await shell('"$1" "$2" many | { sleep 0.5; tail -n 1; }; echo "${PIPESTATUS[0]}"');
  expect(out).toBe(`line ${LINES - 1} of many\n4`);
});

test("a reader that goes away is no error", async () => {
  expect(await shell('"$1" "$2" many | head -n 1; echo "${PIPESTATUS[0]}"')).toEqual({ out: "line 0 of many\n0", err: "" });
});

test("a full disk is an error", async () => {
  const { out, err } = await shell('"$1" "$2" many > /dev/full; echo $?');
  expect(out).toBe("1");
  expect(err).toStartWith("llmgw: cannot write to standard output (E_FILE)");
});

test.each([
  ["late", "too late"],
  ["lost", "nobody waits"],
])("an error in the background (%s) has three lines too", async (name, what) => {
  const { out, err } = await shell(`"$1" "$2" ${name}; echo $?`);
  expect(out).toBe("1");
  expect(err.split("\n")[0]).toBe(`llmgw: ${what} (E_INTERNAL)`);
  expect(err.trimEnd().split("\n")).toHaveLength(3);
});
