import { chmod, mkdir, mkdtemp, readdir, rename, rm, stat, statfs } from "node:fs/promises";
import { dirname, join, relative } from "node:path";
import * as v from "valibot";
import { pythonFault } from "../engines/python-fault.ts";
import { chooseBuild } from "../engines/releases.ts";
import { readIfThere, writeAtomic } from "../os/files.ts";
import { sweepTagged } from "../os/process.ts";
import { runProgram } from "../os/run-program.ts";
import type { EngineInstall, Recipe, ReleaseFile, WantedEngine } from "../protocol/engine-release.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { Inventory } from "../protocol/inventory.ts";
import { ARCHIVE_ROOM_TIMES, ENGINE_VERSION_MS, INSTALL_SWEEP_MS, PACKAGES_INSTALL_MS, PACKAGES_ROOM_BYTES } from "../protocol/limits.ts";
import { fetchFile } from "../weights/fetch.ts";
import { findFile, unpackArchive, unpackBeside, wayOut } from "./engine-archive.ts";

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

/** What is to be installed, on which machine. */
export interface InstallJob {
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
  const { engine } = job;
  job.signal.throwIfAborted();
  const folder = folderOf(job);
  // An earlier try that was cut off: a virtual environment cannot be moved, so it is made where it stays. What that try
  // started may be at work there still.
  const left = await sweepTagged(...tagOf(job), INSTALL_SWEEP_MS);
  if (left.length > 0) throw cannot(engine, `processes ${left.join(", ")} of an earlier try do not end`, "end them by hand");
  await rm(folder, { recursive: true, force: true });
  await mkdir(folder, { recursive: true, mode: 0o755 });
  const { recipe } = engine;
  try {
    const made = recipe.how === "archives" ? await fromArchives(job, recipe, folder) : await fromPackages(job, recipe, folder);
    const program = relative(folder, made.program);
    // A machine that loses power must not come up with a mark and empty files.
    await runProgram(["sync", "--file-system", folder], { env: process.env, cwd: "/", within_ms: PACKAGES_INSTALL_MS, max_bytes: 1_000 });
    job.signal.throwIfAborted();
    await writeAtomic(join(folder, MARK), JSON.stringify({ version: engine.version, program, note: made.note, features: made.features }));
    return { kind: engine.kind, version: engine.version, folder, ...made };
  } catch (error) {
    // Until the next try its room is for others.
    await rm(folder, { recursive: true, force: true }).catch(() => {});
    throw error;
  }
}

const folderOf = ({ root, engine }: InstallJob): string => join(root, engine.kind, engine.version);
/** By this in their environment the programs of an installation are found again, whoever started them. */
const tagOf = (job: InstallJob): [name: string, value: string] => ["LLMGW_INSTALL", folderOf(job)];
const markOf = (job: InstallJob): Record<string, string> => Object.fromEntries([tagOf(job)]);

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
  for (const runtime of more) await unpack(job, runtime, dirname(program), unpackBeside);
  const way_out = await wayOut(folder);
  if (way_out !== "") throw cannot(engine, way_out, "name another version in server.yaml");
  await chmod(program, 0o755);
  const beside = await readdir(dirname(program));
  const features = ["cuda", "rpc"].filter((feature) => beside.some((name) => name.startsWith(`libggml-${feature}.so`)));
  return { program, note: chosen.reason, features };
}

/** Fetches an archive and unpacks all of it into a folder. */
async function unpack(job: InstallJob, file: ReleaseFile, folder: string, how = unpackArchive): Promise<void> {
  const path = await fetched(job, file);
  job.tell("unpacking", file.name);
  await how({ path, name: file.name, signal: job.signal, env: markOf(job) }, folder);
  await rm(path, { force: true });
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
      signal.throwIfAborted();
      if (error instanceof OperatorError && (error.code === "E_NO_ROOM" || error.code === "E_FILE")) throw error;
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

async function fromPackages(job: InstallJob, recipe: Extract<Recipe, { how: "packages" }>, folder: string): Promise<Made> {
  const { engine } = job;
  await needRoom(job, PACKAGES_ROOM_BYTES);
  const uv = await uvProgram(job, recipe).catch(() => null);
  job.signal.throwIfAborted();
  const tool = uv === null ? venvAndPip : uvTool(uv);
  job.tell("installing", `making a virtual environment with ${tool.name}`);
  const more = recipe.index === null ? {} : { [tool.index_variable]: recipe.index };
  for (const argv of tool.steps(folder, recipe)) await step(job, argv, folder, more);
  const program = join(folder, "bin", engine.kind === "vllm" ? "vllm" : "python");
  if ((await stat(program).catch(() => null)) === null)
    throw cannot(engine, `the packages brought no ${program}`, "name another version in server.yaml");
  if (engine.kind === "vllm") await downloadKernels(job, program, folder);
  return { program, note: "", features: ["cuda"] };
}

/** One way to install Python packages into a folder. */
interface PythonTool {
  readonly name: string;
  /** The variable that names the index: it may hold a password, which an argument would show to every user of the machine. */
  readonly index_variable: string;
  steps(folder: string, recipe: Extract<Recipe, { how: "packages" }>): readonly (readonly [string, ...string[]])[];
}

const venvAndPip: PythonTool = {
  name: "venv and pip",
  index_variable: "PIP_INDEX_URL",
  steps: (folder, { requirements }) => [
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
      ...requirements,
    ],
  ],
};

/** `--prerelease=allow`: older versions of uv pick an old SGLang without it. */
export const uvTool = (uv: string): PythonTool => ({
  name: "uv",
  index_variable: "UV_DEFAULT_INDEX",
  steps: (folder, { requirements }) => [
    [uv, "venv", "--python", "3.12", "--seed", folder],
    [uv, "pip", "install", "--python", join(folder, "bin", "python"), "--prerelease=allow", ...requirements],
  ],
});

/** The pinned `uv`, fetched once; null when there is none for this machine, or it does not run here. */
async function uvProgram(job: InstallJob, { uv }: Extract<Recipe, { how: "packages" }>): Promise<string | null> {
  const file = uv.find(({ arch }) => arch === job.inventory.host.arch)?.files[0];
  if (!file) return null;
  const folder = join(job.root, "uv", file.sha256.slice(0, 16));
  const there = await findFile(folder, "uv").catch(() => null);
  if (there !== null) return (await runs(there, folder)) ? there : null;
  // One of several engines' installations at once: each unpacks its own, and the last one in place stays.
  const beside = await mkdtemp(join(await made(join(job.root, "uv")), "new-"));
  try {
    await unpack(job, file, beside);
    const way_out = await wayOut(beside);
    const program = await findFile(beside, "uv");
    if (way_out !== "" || program === null || !(await runs(program, beside))) return null;
    await rm(folder, { recursive: true, force: true });
    await rename(beside, folder);
    return await findFile(folder, "uv");
  } finally {
    await rm(beside, { recursive: true, force: true });
  }
}

async function made(folder: string): Promise<string> {
  await mkdir(folder, { recursive: true });
  return folder;
}

/** Whether a program starts on this machine. */
async function runs(program: string, cwd: string): Promise<boolean> {
  const ran = await runProgram([program, "--version"], { env: {}, cwd, within_ms: ENGINE_VERSION_MS, max_bytes: 1_000 }).catch(() => null);
  return ran?.code === 0;
}

async function step(
  job: InstallJob,
  argv: readonly [string, ...string[]],
  folder: string,
  more: Readonly<Record<string, string>>,
): Promise<void> {
  const { engine, signal, tell } = job;
  tell("installing", argv.slice(0, 4).join(" "));
  const env = {
    PATH: process.env["PATH"],
    HOME: folder,
    TMPDIR: process.env["TMPDIR"],
    LANG: "C.UTF-8",
    ...proxies(),
    ...markOf(job),
    ...more,
  };
  const bounds = { env, cwd: folder, within_ms: PACKAGES_INSTALL_MS, max_bytes: 1_000_000, signal, keep: "tail" as const };
  const ran = await runProgram([...argv], bounds).catch((error: unknown) => {
    signal.throwIfAborted();
    throw cannot(engine, messageOf(error), "install python3 with its venv module on the node");
  });
  if (ran.code === 0) return;
  if (ran.late) throw cannot(engine, `${argv[0]} did not end in time`, "try it by hand on the node");
  const { why, remedy, full } = pythonFault(`${ran.out}\n${ran.err}`);
  if (full) throw new OperatorError("E_NO_ROOM", `no room for ${engine.kind} ${engine.version}`, why, remedy);
  throw cannot(engine, why, remedy);
}

/** Ways out of a closed network are the node's own affair. */
function proxies(): Record<string, string> {
  const names = Object.keys(process.env).filter((name) => /^(https?|no|all)_proxy$/i.test(name) || name === "SSL_CERT_FILE");
  return Object.fromEntries(names.map((name) => [name, process.env[name] ?? ""]));
}

/** Kernels that would else be compiled at the first start, for minutes; a version that does not know the command goes without. */
async function downloadKernels(job: InstallJob, program: string, folder: string): Promise<void> {
  const { tell, signal } = job;
  tell("installing", "vllm download-kernels");
  const env = { PATH: `${dirname(program)}:${process.env["PATH"]}`, HOME: folder, LANG: "C.UTF-8", ...proxies(), ...markOf(job) };
  const bounds = { env, cwd: folder, within_ms: PACKAGES_INSTALL_MS, max_bytes: 64_000, signal };
  await runProgram([program, "download-kernels"], bounds).catch(() => null);
  signal.throwIfAborted();
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
