import { lstat, mkdir, readdir, readlink, realpath, rename, rm, statfs } from "node:fs/promises";
import { join, relative, sep } from "node:path";
import { runProgram, type Ran } from "../os/run-program.ts";
import { OperatorError } from "../protocol/errors.ts";
import { ARCHIVE_ENTRIES_COUNT, ARCHIVE_LISTING_BYTES, ARCHIVE_UNPACK_MS } from "../protocol/limits.ts";

/** Archives of engines, from wherever a mirror is: nothing of them lands or leads outside the folder they are unpacked into. */

/** An archive that lies on this machine, and who unpacks it. */
export interface Archive {
  readonly path: string;
  /** Its name where it came from. */
  readonly name: string;
  readonly signal: AbortSignal;
  /** Added to the environment of what unpacks it. */
  readonly env: Readonly<Record<string, string>>;
}

/**
 * Unpacks all of an archive into a folder, after a look at what is in it: only files, folders and links, not too many, and
 * no more than there is room for. What links lead to is for {@link wayOut} to say.
 * @throws OperatorError E_NO_ROOM, E_ENGINE; the signal's reason
 */
export async function unpackArchive(archive: Archive, folder: string): Promise<void> {
  await lookInto(archive, folder);
  // GNU tar puts nothing outside, whatever an archive says, and leaves out what would run as another user.
  const words = ["--extract", "--gzip", "--no-same-owner", "--no-same-permissions", "--file", archive.path, "--directory", folder];
  const ran = await tar(archive, folder, words, 64_000);
  if (ran.code !== 0) throw cannotUnpack(archive, ran);
}

async function lookInto(archive: Archive, folder: string): Promise<void> {
  const words = ["--list", "--verbose", "--numeric-owner", "--quoting-style=escape", "--gzip", "--file", archive.path];
  const ran = await tar(archive, folder, words, ARCHIVE_LISTING_BYTES);
  if (ran.code !== 0) throw cannotUnpack(archive, ran);
  const entries = ran.out.split("\n").filter((line) => line !== "");
  if (entries.length > ARCHIVE_ENTRIES_COUNT || ran.out.length >= ARCHIVE_LISTING_BYTES)
    throw refused(archive, `it has more than ${ARCHIVE_ENTRIES_COUNT} files`);
  let bytes = 0;
  for (const entry of entries) {
    const [, kind = "", size = "", name = ""] = /^(\S)\S* \d+\/\d+ +([\d,]+) \S+ \S+ (.*)$/.exec(entry) ?? [];
    if (!/^[-dlh]$/.test(kind)) throw refused(archive, `${name || entry} is neither a file nor a folder nor a link`);
    if (kind === "-") bytes += Number(size);
  }
  const { bavail, bsize } = await statfs(folder);
  const free = bavail * bsize;
  const mib = (count: number) => `${Math.ceil(count / 2 ** 20)} MiB`;
  if (bytes <= free) return;
  throw new OperatorError(
    "E_NO_ROOM",
    `cannot unpack ${archive.name}`,
    `what is in it needs ${mib(bytes)}, and ${mib(free)} are free`,
    "free some disk, or move the state folder",
  );
}

const tar = ({ env, signal }: Archive, cwd: string, words: readonly string[], max_bytes: number): Promise<Ran> =>
  runProgram(["tar", ...words], {
    env: { ...process.env, ...env, LC_ALL: "C" },
    cwd,
    within_ms: ARCHIVE_UNPACK_MS,
    max_bytes,
    signal,
  });

/** Its last line only counts the errors: the first one is the reason. */
function cannotUnpack({ name }: Archive, { err, late }: Ran): OperatorError {
  const lines = err
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "" && !/^tar: Removing leading|^tar: Exiting with failure|^tar: Child returned/.test(line));
  const full = lines.find((line) => /No space left|Disk quota exceeded/i.test(line));
  const why = full ?? (late ? "it was not unpacked in time" : (lines[0] ?? "tar does not say why"));
  const remedy = full ? "free some disk, or move the state folder" : "name another version in server.yaml, or mend the mirror";
  return new OperatorError(full ? "E_NO_ROOM" : "E_ENGINE", `cannot unpack ${name}`, why, remedy);
}

const refused = ({ name }: Archive, why: string): OperatorError =>
  new OperatorError("E_ENGINE", `${name} is not unpacked`, why, "name another version in server.yaml, or mend the mirror");

/** A runtime comes with a folder of its own; its libraries are looked for beside the program. */
export async function unpackBeside(archive: Archive, goal: string): Promise<void> {
  const apart = join(goal, ".runtime");
  await mkdir(apart);
  await unpackArchive(archive, apart);
  const way_out = await wayOut(apart);
  if (way_out !== "") throw refused(archive, way_out);
  for (const path of await filesIn(apart)) if (/\.so(\.|$)/.test(path)) await rename(path, join(goal, path.split(sep).at(-1) ?? ""));
  await rm(apart, { recursive: true });
}

/** Files and links under a folder, with their paths; what a link leads to is not gone into. */
async function filesIn(folder: string): Promise<string[]> {
  // Not by a recursive `readdir`: Bun's follows links, out of the folder and round in circles.
  const entries = await readdir(folder, { withFileTypes: true });
  const found: string[] = [];
  for (const entry of entries) {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) found.push(...(await filesIn(path)));
    else found.push(path);
  }
  return found;
}

/** The first file or link of a name under a folder; null when there is none. */
export async function findFile(folder: string, name: string): Promise<string | null> {
  return (await filesIn(folder)).find((path) => path.endsWith(`${sep}${name}`)) ?? null;
}

/** Which link leads out of a folder, or to nothing, or what is there that is neither a file nor a link; "" when nothing is. */
export async function wayOut(folder: string): Promise<string> {
  const inside = `${await realpath(folder)}${sep}`;
  for (const path of await filesIn(folder)) {
    const about = await lstat(path);
    if (about.isFile()) continue;
    const name = relative(folder, path);
    if (!about.isSymbolicLink()) return `${name} is neither a file nor a link`;
    const goal = await realpath(path).catch(() => null);
    if (goal === null || !goal.startsWith(inside)) return `the link ${name} leads to ${await readlink(path)}, which is not part of it`;
  }
  return "";
}
