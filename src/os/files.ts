/**
 * os/ is the machine as llmgw sees it: files, processes, sockets, the log. It knows nothing of models,
 * engines or nodes, and decides nothing.
 */
import { randomBytes } from "node:crypto";
import { chmod, link, mkdir, open, readFile, rename, rm } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { messageOf, OperatorError } from "../protocol/errors.ts";

/**
 * Writes a whole file or nothing: a temporary file in the same folder, synced, then renamed over the target.
 * @param mode permission bits, set from the first byte on
 * @throws OperatorError E_FILE
 */
export async function writeAtomic(path: string, content: string | Uint8Array, mode = 0o644): Promise<void> {
  await writeBeside(path, content, mode, (temporary) => rename(temporary, path));
}

/**
 * Like {@link writeAtomic}, but what is there is never replaced.
 * @returns false when the name is taken
 * @throws OperatorError E_FILE
 */
export async function writeNew(path: string, content: string, mode: number): Promise<boolean> {
  let taken = false;
  await writeBeside(path, content, mode, async (temporary) => {
    // Unlike a rename, a link fails when its name is taken.
    await link(temporary, path).catch((error: NodeJS.ErrnoException) => {
      if (error.code !== "EEXIST") throw error;
      taken = true;
    });
  });
  return !taken;
}

/** Writes a temporary file in the target's folder, lets it take its place, and leaves nothing of it behind. */
async function writeBeside(
  path: string,
  content: string | Uint8Array,
  mode: number,
  place: (temporary: string) => Promise<void>,
): Promise<void> {
  const temporary = join(dirname(path), `.${basename(path)}.${randomBytes(6).toString("hex")}`);
  try {
    const file = await open(temporary, "wx", mode);
    try {
      await file.writeFile(content);
      await file.sync();
    } finally {
      await file.close();
    }
    await place(temporary);
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot write ${path}`, messageOf(error), "check the folder's owner and the free space");
  } finally {
    await rm(temporary, { force: true });
  }
}

/** Makes a folder that only this user can enter, also when it was there and open to others. @throws OperatorError E_FILE */
export function makePrivateFolder(path: string): Promise<void> {
  return makeFolder(path, 0o700, chmod);
}

/** Makes a folder that only this user can list; others can pass through to what is theirs in it. @throws OperatorError E_FILE */
export function makePassableFolder(path: string): Promise<void> {
  return makeFolder(path, 0o711, chmod);
}

/**
 * Makes a folder when it is not there; one that is stays as it is. The folders above are made too, and others may pass
 * through those: a private folder must not shut away what a neighbour keeps beside it.
 * @param mode permission bits
 * @throws OperatorError E_FILE
 */
export function makeFolderOnce(path: string, mode: number): Promise<void> {
  return makeFolder(path, mode, async () => {});
}

async function makeFolder(path: string, mode: number, settle: (path: string, mode: number) => Promise<void>): Promise<void> {
  try {
    await mkdir(dirname(path), { recursive: true, mode: 0o755 });
    await mkdir(path, { recursive: true, mode });
    await settle(path, mode);
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot make the folder ${path}`, messageOf(error), "check the owner of the folder above");
  }
}

/** The text of a file, or null when there is none. */
export async function readIfThere(path: string): Promise<string | null> {
  try {
    return await readFile(path, "utf8");
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return null;
    throw new OperatorError("E_FILE", `cannot read ${path}`, messageOf(error), "check the file's owner and mode");
  }
}

/**
 * The text of a small file; devices and pipes are read as well.
 * @throws OperatorError E_FILE when it cannot be read, or is longer than `max_bytes`
 */
export async function readSmall(path: string, max_bytes: number): Promise<string> {
  const parts: Uint8Array[] = [];
  let bytes = 0;
  try {
    const file = await open(path);
    try {
      while (bytes <= max_bytes) {
        const { bytesRead, buffer } = await file.read({ buffer: new Uint8Array(64 * 1024) });
        if (bytesRead === 0) return Buffer.concat(parts).toString("utf8");
        parts.push(buffer.subarray(0, bytesRead));
        bytes += bytesRead;
      }
    } finally {
      await file.close();
    }
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot read ${path}`, messageOf(error), "check the path, and the file's owner and mode");
  }
  throw new OperatorError("E_FILE", `cannot read ${path}`, `it has more than ${max_bytes} bytes`, "name the right file");
}
