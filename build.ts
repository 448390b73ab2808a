/**
 * Builds the release binaries: `node release/bun.mjs build.ts [--host] [--out FOLDER]`.
 *   dist/llmgw-linux-amd64, dist/llmgw-linux-arm64, and dist/llmgw for this machine; with --host only the last two of it.
 * The same sources give the same bytes: no time, no path and no name of the build machine goes in.
 */
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { copyFile, link, mkdir, mkdtemp, readdir, readFile, rename, rm } from "node:fs/promises";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";

const root = import.meta.dir;
const TARGETS = [
  { name: "linux-amd64", arch: "x64", target: "bun-linux-x64", runtime: "bun-linux-x64" },
  { name: "linux-arm64", arch: "arm64", target: "bun-linux-arm64", runtime: "bun-linux-aarch64" },
] as const;
type Target = (typeof TARGETS)[number];

async function output(command: string[], cwd = root): Promise<string> {
  const child = Bun.spawn(command, { cwd, stdout: "pipe", stderr: "pipe" });
  const [text, errors, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  if (code !== 0) throw new Error(`${command.join(" ")} failed: ${errors.trim()}`);
  return text.trim();
}

/** The commit of this folder's own repository, with a mark when tracked files differ from it. */
async function commitOf(): Promise<string> {
  try {
    if (resolve(await output(["git", "rev-parse", "--show-toplevel"])) !== root) return "unknown";
    const changed = await output(["git", "status", "--porcelain", "--untracked-files=no"]);
    return (await output(["git", "rev-parse", "--short=12", "HEAD"])) + (changed ? "-changed" : "");
  } catch {
    return "unknown";
  }
}

interface Lock {
  packages: Record<string, { version?: string; integrity?: string } | undefined>;
}

/**
 * The Bun that a target's binary carries: the pinned version from node_modules or else from npm, its package checked
 * against the lock file.
 */
async function runtimeOf({ runtime }: Target): Promise<string> {
  const installed = join(root, "node_modules", "@oven", runtime, "bin", "bun");
  if (existsSync(installed)) return installed;
  const lock = JSON.parse(await readFile(join(root, "package-lock.json"), "utf8")) as Lock;
  const { version = "", integrity = "" } = lock.packages[`node_modules/@oven/${runtime}`] ?? {};
  const folder = join(root, ".cache", "runtimes", `${runtime}-${version}`);
  const program = join(folder, "package", "bin", "bun");
  if (existsSync(program)) return program;
  console.error(`llmgw: fetching ${runtime} ${version}`);
  await mkdir(join(folder, ".."), { recursive: true });
  const staging = await mkdtemp(`${folder}.`);
  try {
    await output(["npm", "pack", "--silent", "--pack-destination", staging, `@oven/${runtime}@${version}`]);
    const [packed = ""] = (await readdir(staging)).filter((name) => name.endsWith(".tgz"));
    const archive = join(staging, packed);
    const digest = createHash("sha512")
      .update(await readFile(archive))
      .digest("base64");
    if (integrity !== `sha512-${digest}`) throw new Error(`${packed} is not the package that package-lock.json names`);
    await output(["tar", "-xzf", archive, "-C", staging]);
    await rm(archive);
    await rename(staging, folder);
  } catch (error) {
    await rm(staging, { recursive: true, force: true });
    throw error;
  }
  return program;
}

async function buildTarget(target: Target, out: string, define: Record<string, string>): Promise<string> {
  // The output's base name is part of the binary, so every target is built under the same one.
  const staging = await mkdtemp(join(out, ".build-"));
  try {
    await Bun.build({
      entrypoints: [join(root, "src", "main.ts")],
      target: "bun",
      format: "esm",
      minify: true,
      sourcemap: "linked",
      define,
      external: ["cpu-features"],
      compile: {
        target: target.target,
        outfile: join(staging, "llmgw"),
        executablePath: await runtimeOf(target),
        // Nothing of the working directory or of BUN_OPTIONS may run code in an operator's llmgw.
        autoloadDotenv: false,
        autoloadBunfig: false,
        autoloadPackageJson: false,
        autoloadTsconfig: false,
        execArgv: ["--disallow-code-generation-from-strings=strict"],
      },
    });
    const path = join(out, `llmgw-${target.name}`);
    await rename(join(staging, "llmgw"), path);
    for (const name of await readdir(staging)) if (name.endsWith(".map")) await rename(join(staging, name), `${path}.map`);
    return path;
  } finally {
    await rm(staging, { recursive: true, force: true });
  }
}

/** Puts a second name on a binary; a copy where the file system has no hard links. */
async function nameAgain(path: string, name: string): Promise<void> {
  const temporary = `${name}.new`;
  await rm(temporary, { force: true });
  await link(path, temporary).catch(() => copyFile(path, temporary));
  await rename(temporary, name);
}

async function build(): Promise<void> {
  const { values } = parseArgs({
    args: process.argv.slice(2),
    options: { host: { type: "boolean", default: false }, out: { type: "string", default: join(root, "dist") } },
  });
  const out = resolve(values.out);
  await mkdir(out, { recursive: true });
  const { version } = JSON.parse(await readFile(join(root, "package.json"), "utf8")) as { version: string };
  const define = {
    LLMGW_VERSION: JSON.stringify(version),
    LLMGW_COMMIT: JSON.stringify(await commitOf()),
    // CommonJS packages get the folder they were built in as a constant.
    __dirname: '"/"',
    __filename: '"/"',
  };
  for (const target of TARGETS) {
    const ours = process.platform === "linux" && target.arch === process.arch;
    if (values.host && !ours) continue;
    const path = await buildTarget(target, out, define);
    console.error(`llmgw: built ${path}`);
    if (ours) await nameAgain(path, join(out, "llmgw"));
  }
}

try {
  await build();
} catch (error) {
  console.error(`llmgw: the build failed: ${error instanceof Error ? error.message : String(error)}`);
  if (error instanceof AggregateError) for (const each of error.errors) console.error(String(each));
  process.exit(1);
}
