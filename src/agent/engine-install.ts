import { chmod, lstat, mkdir, readdir, readlink, realpath, rename, rm, stat, statfs } from "node:fs/promises";
import { dirname, join, relative, sep } from "node:path";
import * as v from "valibot";
import { chooseBuild } from "../engines/releases.ts";
import { readIfThere, writeAtomic } from "../os/files.ts";
import { runProgram } from "../os/run-program.ts";
import type { EngineInstall, Recipe, ReleaseFile, WantedEngine } from "../protocol/engine-release.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import { ARCHIVE_ROOM_TIMES, PACKAGES_INSTALL_MS, PACKAGES_ROOM_BYTES } from "../protocol/limits.ts";
import { fetchFile } from "../weights/fetch.ts";

/** Written last: a folder without it is no engine. */
const MARK = "installed.json";
const Mark = v.object({ version: v.string(), program: v.string(), note: v.string(), features: v.array(v.string()) });

/** An engine that was installed whole. */
export interface Installed {
  readonly kind: EngineKind;
  readonly version: string;
  readonly folder: string;
  /** Absolute path. */
  readonly program: string;
  /** Why it is not for the GPUs this node has; "" when it is. */
  readonly note: string;
  readonly features: readonly string[];
}

/** Tells how far an installation is. */
type Tell = (phase: EngineInstall["phase"], detail: string) => void;

/**
 * Engines of a kind under `<root>/<kind>/<version>/`, newest first. Folders that were never finished, or have lost their
 * program, are passed over.
 */
export async function installedEngines(root: string, kind: EngineKind): Promise<Installed[]> {
  const versions = await readdir(join(root, kind)).catch(() => []);
  const found = (await Promise.all(versions.map((version) => engineIn(join(root, kind, version), kind, version)))).flat();
  return found.sort((a, b) => b.at_ms - a.at_ms).map(({ engine }) => engine);
}

async function engineIn(folder: string, kind: EngineKind, name: string): Promise<{ at_ms: number; engine: Installed }[]> {
  const file = join(folder, MARK);
  const mark = v.safeParse(v.pipe(v.string(), v.parseJson(), Mark), await readIfThere(file).catch(() => null));
  // It may be removed at this very moment.
  const about = await stat(file).catch(() => null);
  if (!mark.success || about === null || mark.output.version !== name) return [];
  const { version, note, features } = mark.output;
  const program = join(folder, mark.output.program);
  if ((await stat(program).catch(() => null)) === null) return [];
  return [{ at_ms: about.mtimeMs, engine: { kind, version, folder, program, note, features } }];
}

interface InstallJob {
  readonly root: string;
  readonly engine: WantedEngine & { readonly recipe: Recipe };
  readonly inventory: Pick<Inventory, "host" | "gpus">;
  readonly signal: AbortSignal;
  readonly tell: Tell;
}

/**
 * Brings one version of an engine onto this machine, in a folder of its own. What fails leaves nothing that would be taken
 * for an engine; what was fetched stays for the next try.
 * @throws OperatorError E_NO_ROOM, E_WEIGHTS (a file that cannot be fetched or is not what was named), E_ENGINE
 */
export async function install(job: InstallJob): Promise<Installed> {
  const { root, engine } = job;
  const folder = join(root, engine.kind, engine.version);
  // An earlier try that was cut off: a virtual environment cannot be moved, so it is made where it stays.
  await rm(folder, { recursive: true, force: true });
  await mkdir(folder, { recursive: true, mode: 0o755 });
  const { recipe } = engine;
  const made = recipe.how === "archives" ? await fromArchives(job, recipe, folder) : await fromPackages(job, recipe, folder);
  const program = relative(folder, made.program);
  await writeAtomic(join(folder, MARK), JSON.stringify({ version: engine.version, program, note: made.note, features: made.features }));
  return { kind: engine.kind, version: engine.version, folder, ...made };
}

type Made = Pick<Installed, "program" | "note" | "features">;

async function fromArchives(job: InstallJob, { builds }: Extract<Recipe, { how: "archives" }>, folder: string): Promise<Made> {
  const { engine, inventory } = job;
  const chosen = chooseBuild(builds, inventory);
  if ("fault" in chosen) throw cannot(engine, chosen.fault, "name another version in server.yaml");
  const [main, ...more] = chosen.build.files;
  if (!main) throw cannot(engine, "the release names no file", "name another version in server.yaml");
  await needRoom(job, ARCHIVE_ROOM_TIMES * chosen.build.files.reduce((sum, { size }) => sum + size, 0));
  await unpack(job, main, folder);
  const program = await findFile(folder, "llama-server");
  if (program === null) throw cannot(engine, `there is no llama-server in ${main.name}`, "name another version in server.yaml");
  for (const runtime of more) await unpackBeside(job, runtime, dirname(program));
  await checkLinks(engine, folder);
  await chmod(program, 0o755);
  const beside = await readdir(dirname(program));
  const features = ["cuda", "rpc"].filter((feature) => beside.some((name) => name.startsWith(`libggml-${feature}.so`)));
  return { program, note: chosen.reason, features };
}

/** Fetches an archive and unpacks all of it into a folder. */
async function unpack(job: InstallJob, file: ReleaseFile, folder: string): Promise<void> {
  const path = await fetched(job, file);
  job.tell("unpacking", file.name);
  // GNU tar puts nothing outside, whatever an archive says; what links point at is looked at afterwards.
  const ran = await runProgram(
    ["tar", "--extract", "--gzip", "--no-same-owner", "--no-same-permissions", "--file", path, "--directory", folder],
    {
      env: process.env,
      cwd: folder,
      within_ms: PACKAGES_INSTALL_MS,
      max_bytes: 64_000,
    },
  );
  await rm(path, { force: true });
  if (ran.code === 0) return;
  const last = ran.err.trim().split("\n").at(-1) ?? "";
  const full = /No space left/.test(ran.err);
  throw new OperatorError(
    full ? "E_NO_ROOM" : "E_ENGINE",
    `cannot unpack ${file.name}`,
    last,
    full ? "free some disk" : "see the agent's log",
  );
}

/** A runtime comes with a folder of its own; its libraries are looked for beside the program. */
async function unpackBeside(job: InstallJob, file: ReleaseFile, goal: string): Promise<void> {
  const apart = join(goal, ".runtime");
  await mkdir(apart);
  await unpack(job, file, apart);
  for (const path of await filesIn(apart)) if (/\.so(\.|$)/.test(path)) await rename(path, join(goal, path.split(sep).at(-1) ?? ""));
  await rm(apart, { recursive: true });
}

async function fetched({ root, signal, tell, engine }: InstallJob, file: ReleaseFile): Promise<string> {
  const folder = join(root, "downloads");
  await mkdir(folder, { recursive: true, mode: 0o700 });
  const path = join(folder, file.sha256);
  if ((await stat(path).catch(() => null)) === null) {
    await fetchFile({
      url: file.url,
      path,
      sha256: file.sha256,
      size: file.size,
      signal,
      progress: (done, total) =>
        tell("fetching", `${file.name}, ${total === null ? `${done} bytes` : `${Math.floor((100 * done) / Math.max(1, total))} %`}`),
      free: () => freeAt(folder),
    }).catch((error: unknown) => {
      const why = error instanceof OperatorError ? `${error.message}: ${error.why}` : messageOf(error);
      throw cannot(engine, why, "check the network, or name a mirror in server.yaml");
    });
  }
  return path;
}

async function freeAt(folder: string): Promise<number> {
  const { bavail, bsize } = await statfs(folder);
  return bavail * bsize;
}

async function needRoom({ root, engine }: InstallJob, bytes: number): Promise<void> {
  const free = await freeAt(root);
  if (bytes <= free) return;
  const mib = (count: number) => `${Math.ceil(count / 2 ** 20)} MiB`;
  const why = `it needs ${mib(bytes)} in ${root}, and ${mib(free)} are free`;
  throw new OperatorError("E_NO_ROOM", `no room for ${engine.kind} ${engine.version}`, why, "free some disk, or move the state folder");
}

/** Files and links under a folder, with their paths. */
async function filesIn(folder: string): Promise<string[]> {
  const entries = await readdir(folder, { withFileTypes: true, recursive: true });
  return entries.filter((entry) => !entry.isDirectory()).map((entry) => join(entry.parentPath, entry.name));
}

async function findFile(folder: string, name: string): Promise<string | null> {
  return (await filesIn(folder)).find((path) => path.endsWith(`${sep}${name}`)) ?? null;
}

/** Links must lead to something inside, and nothing may be there but files, folders and links. */
async function checkLinks(engine: WantedEngine, folder: string): Promise<void> {
  const inside = `${await realpath(folder)}${sep}`;
  for (const path of await filesIn(folder)) {
    const about = await lstat(path);
    if (about.isFile()) continue;
    const name = relative(folder, path);
    if (!about.isSymbolicLink()) throw cannot(engine, `${name} is neither a file nor a link`, "name another version in server.yaml");
    const goal = await realpath(path).catch(() => null);
    if (goal === null || !goal.startsWith(inside))
      throw cannot(
        engine,
        `the link ${name} leads to ${await readlink(path)}, which is not part of it`,
        "name another version in server.yaml",
      );
  }
}

async function fromPackages(job: InstallJob, recipe: Extract<Recipe, { how: "packages" }>, folder: string): Promise<Made> {
  const { engine } = job;
  await needRoom(job, PACKAGES_ROOM_BYTES);
  const uv = await uvProgram(job, recipe).catch(() => null);
  const tool = uv === null ? venvAndPip : uvTool(uv);
  job.tell("installing", `making a virtual environment with ${tool.name}`);
  for (const argv of tool.steps(folder, recipe)) await step(job, argv, folder);
  const program = join(folder, "bin", engine.kind === "vllm" ? "vllm" : "python");
  if ((await stat(program).catch(() => null)) === null)
    throw cannot(engine, `the packages brought no ${program}`, "name another version in server.yaml");
  if (engine.kind === "vllm") await downloadKernels(job, program, folder);
  return { program, note: "", features: ["cuda"] };
}

/** One way to install Python packages into a folder. */
interface PythonTool {
  readonly name: string;
  steps(folder: string, recipe: Extract<Recipe, { how: "packages" }>): readonly (readonly [string, ...string[]])[];
}

const venvAndPip: PythonTool = {
  name: "venv and pip",
  steps: (folder, { requirements, index }) => [
    ["python3", "-m", "venv", folder],
    [
      join(folder, "bin", "python"),
      "-m",
      "pip",
      "install",
      "--no-input",
      "--disable-pip-version-check",
      "--no-cache-dir",
      "--progress-bar=off",
      ...(index === null ? [] : ["--index-url", index]),
      ...requirements,
    ],
  ],
};

/** `--prerelease=allow`: older versions of uv pick an old SGLang without it. */
export const uvTool = (uv: string): PythonTool => ({
  name: "uv",
  steps: (folder, { requirements, index }) => [
    [uv, "venv", "--python", "3.12", "--seed", folder],
    [
      uv,
      "pip",
      "install",
      "--python",
      join(folder, "bin", "python"),
      "--prerelease=allow",
      ...(index === null ? [] : ["--index-url", index]),
      ...requirements,
    ],
  ],
});

/** The pinned `uv`, fetched once; null when there is none for this machine, or it does not run here. */
async function uvProgram(job: InstallJob, { uv }: Extract<Recipe, { how: "packages" }>): Promise<string | null> {
  const file = uv.find(({ arch }) => arch === job.inventory.host.arch)?.files[0];
  if (!file) return null;
  const folder = join(job.root, "uv", file.sha256.slice(0, 16));
  const there = await findFile(folder, "uv").catch(() => null);
  if (there !== null) return there;
  const beside = `${folder}.new`;
  await rm(beside, { recursive: true, force: true });
  await mkdir(beside, { recursive: true });
  await unpack(job, file, beside);
  await rename(beside, folder);
  return findFile(folder, "uv");
}

async function step({ engine, signal, tell }: InstallJob, argv: readonly [string, ...string[]], folder: string): Promise<void> {
  tell("installing", argv.slice(0, 4).join(" "));
  const env = { PATH: process.env["PATH"], HOME: folder, TMPDIR: process.env["TMPDIR"], LANG: "C.UTF-8", ...proxies() };
  let ran;
  try {
    ran = await runProgram([...argv], { env, cwd: folder, within_ms: PACKAGES_INSTALL_MS, max_bytes: 1_000_000 });
  } catch (error) {
    throw cannot(engine, messageOf(error), "install python3 with its venv module on the node");
  }
  signal.throwIfAborted();
  if (ran.code === 0) return;
  const lines = `${ran.out}\n${ran.err}`
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "");
  const said = lines.findLast((line) => /error|no such|not found|no space|cannot|failed/i.test(line)) ?? lines.at(-1) ?? "nothing";
  if (/no space left/i.test(said))
    throw new OperatorError("E_NO_ROOM", `no room for ${engine.kind} ${engine.version}`, said, "free some disk");
  throw cannot(engine, ran.late ? `${argv[0]} did not end in time` : said.slice(0, 500), "try it by hand on the node");
}

/** Ways out of a closed network are the node's own affair. */
function proxies(): Record<string, string> {
  const names = Object.keys(process.env).filter((name) => /^(https?|no|all)_proxy$/i.test(name) || name === "SSL_CERT_FILE");
  return Object.fromEntries(names.map((name) => [name, process.env[name] ?? ""]));
}

/** Kernels that would else be compiled at the first start, for minutes; a version that does not know the command goes without. */
async function downloadKernels({ tell }: InstallJob, program: string, folder: string): Promise<void> {
  tell("installing", "vllm download-kernels");
  const env = { PATH: `${dirname(program)}:${process.env["PATH"]}`, HOME: folder, LANG: "C.UTF-8", ...proxies() };
  await runProgram([program, "download-kernels"], { env, cwd: folder, within_ms: PACKAGES_INSTALL_MS, max_bytes: 64_000 }).catch(
    () => null,
  );
}

function cannot({ kind, version }: WantedEngine, why: string, remedy: string): OperatorError {
  return new OperatorError("E_ENGINE", `cannot install ${kind} ${version}`, why, remedy);
}

/**
 * Removes versions, whole ones and what tries left that came to nothing; never those that are named. Nothing of this kind may
 * be being installed meanwhile.
 */
export async function removeOthers(root: string, kind: EngineKind, keep: ReadonlySet<string>): Promise<string[]> {
  const versions = await readdir(join(root, kind)).catch(() => []);
  const gone = versions.filter((version) => !keep.has(version));
  for (const version of gone) {
    // First what makes it an engine, so that one that is removed by half is none.
    await rm(join(root, kind, version, MARK), { force: true });
    await rm(join(root, kind, version), { recursive: true, force: true });
  }
  return gone;
}

/** Removes what was fetched and is needed no more. Nothing may be being fetched meanwhile. */
export async function removeDownloads(root: string): Promise<void> {
  await rm(join(root, "downloads"), { recursive: true, force: true });
}
