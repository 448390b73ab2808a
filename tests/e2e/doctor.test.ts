// `llmgw doctor` of the compiled binary on this very machine, whatever it has, and on folders shaped like others.
import { expect, test } from "bun:test";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { binary } from "../../release/fresh.ts";
import { DoctorReport } from "../../src/protocol/doctor.ts";
import { ibTree } from "../fixtures/hardware/ib-tree.ts";

const BUDGET_MS = 3_000;
const NO_TOOLS = { PATH: "/usr/bin:/bin" };

async function doctor(...args: string[]) {
  const start = performance.now();
  const child = Bun.spawn([binary, "doctor", ...args], { stdout: "pipe", stderr: "pipe", env: NO_TOOLS });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { out, err, code, took_ms: performance.now() - start };
}
const report = (out: string) => v.parse(v.pipe(v.string(), v.parseJson(), DoctorReport), out);
const verdicts = (out: string) => Object.fromEntries(report(out).checks.map((check) => [check.id, check.verdict]));

test("here: quick, at least fifteen checks, nothing made up", async () => {
  const { out, code, took_ms } = await doctor("-o", "json");
  expect(took_ms).toBeLessThan(BUDGET_MS);
  const { checks } = report(out);
  expect(checks.length).toBeGreaterThanOrEqual(15);
  expect(code).toBe(checks.some((check) => check.verdict === "fail") ? 1 : 0);
  for (const { id, verdict, source } of checks) if (verdict !== "skipped") expect(`${id} ${source}`).not.toBe(`${id} `);
});

test("for people: every verdict in a line, the sum at the end", async () => {
  const { out } = await doctor();
  expect(out).toMatch(/^pass {5}CPU features|^warn {5}CPU features/m);
  expect(out.trimEnd().split("\n").at(-1)).toMatch(/^\S+: \d+ pass/);
});

test("a script as nvidia-smi and a folder as InfiniBand are enough", async () => {
  const tree = await ibTree([{ name: "mlx5_2" }, { name: "mlx5_3" }]);
  const folder = await mkdtemp(join(tmpdir(), "llmgw-smi-"));
  const smi = join(folder, "nvidia-smi");
  await writeFile(smi, "#!/bin/sh\necho '0, GPU-0, 00000000:01:00.0, NVIDIA H100, 580.95, 81559, 4, Disabled'\n");
  await chmod(smi, 0o755);
  try {
    const { out, code } = await doctor("--nvidia-smi", smi, "--ib-root", tree.root, "--fabric", "ib-b:mlx5_2,mlx5_3", "-o", "json");
    expect(verdicts(out)).toMatchObject({ "gpu.smi": "pass", "ib.declared": "pass", "ib.link": "pass", "ib.count": "pass" });
    expect(code).toBe(report(out).checks.some((check) => check.verdict === "fail") ? 1 : 0);
  } finally {
    await tree.remove();
    await rm(folder, { recursive: true });
  }
});

test("a declared adapter that is not here fails, and strict counts warnings", async () => {
  const { out, code } = await doctor("--ib-root", "/nowhere", "--fabric", "ib-b:mlx5_2", "-o", "json");
  expect([verdicts(out)["ib.declared"], code]).toEqual(["fail", 1]);
  const loose = await doctor("-o", "json");
  const warned = report(loose.out).checks.some((check) => check.verdict === "warn");
  expect((await doctor("--strict", "-o", "json")).code).toBe(loose.code === 1 || warned ? 1 : 0);
});

test("a fabric that cannot be read is a usage error with three lines", async () => {
  const { err, code } = await doctor("--fabric", "IB");
  expect(code).toBe(2);
  expect(err.trimEnd().split("\n").length).toBe(3);
});
