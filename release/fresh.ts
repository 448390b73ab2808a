/** release/ is what builds, tests and ships llmgw. Nothing of it is part of the binary. */
import { existsSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";

export const root = join(import.meta.dir, "..");
export const binary = join(root, "dist", "llmgw");

function newest(path: string): number {
  const { mtimeMs } = statSync(path);
  if (!statSync(path).isDirectory()) return mtimeMs;
  return Math.max(mtimeMs, ...readdirSync(path).map((name) => newest(join(path, name))));
}

/** Runs a program in the repository's folder to its end and returns its exit code. Ctrl-C is the child's to answer. */
export async function runHere(command: string[], env: Record<string, string> = {}): Promise<number> {
  const child = Bun.spawn(command, { cwd: root, stdio: ["inherit", "inherit", "inherit"], env: { ...process.env, ...env } });
  const ignore = () => {};
  const pass = () => child.kill("SIGTERM");
  process.on("SIGINT", ignore);
  process.on("SIGTERM", pass);
  await child.exited;
  process.off("SIGINT", ignore);
  process.off("SIGTERM", pass);
  return child.exitCode ?? (child.signalCode === "SIGINT" ? 130 : 1);
}

/** Builds `dist/llmgw` for this machine when it is missing or older than what it is made of. */
export async function buildIfStale(): Promise<void> {
  const sources = ["src", "build.ts", "package.json", "package-lock.json"].map((name) => newest(join(root, name)));
  if (existsSync(binary) && statSync(binary).mtimeMs >= Math.max(...sources)) return;
  const code = await runHere([process.execPath, "build.ts", "--host"]);
  if (code !== 0) process.exit(code);
}
