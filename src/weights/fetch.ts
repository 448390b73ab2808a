import { createHash } from "node:crypto";
import { open, rename, rm, stat, writeFile } from "node:fs/promises";
import type { FileHandle } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { readIfThere } from "../os/files.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { FETCH_GROWTH_BYTES, FETCH_STALL_MS, FETCH_TRIES_COUNT } from "../protocol/limits.ts";
import { shownUrl } from "./source.ts";

/** Told how far it is: bytes fetched, or bytes whose digest was taken, of a total that may not be known. */
export type Progress = (done: number, total: number | null, doing: "fetching" | "checking") => void;

export interface FetchRequest {
  readonly url: string;
  /** Where the whole file goes; what is there of it lies beside it until then, in files that end in `.part`. */
  readonly path: string;
  readonly sha256: string | undefined;
  readonly size: number | undefined;
  readonly signal: AbortSignal;
  readonly progress: Progress;
  /** Free bytes on the file system of `path`. */
  readonly free: () => Promise<number>;
  readonly stall_ms?: number;
  readonly first_wait_ms?: number;
}

const wrong = (url: string, why: string, remedy: string): OperatorError =>
  new OperatorError("E_WEIGHTS", `cannot fetch ${shownUrl(url)}`, why, remedy);

/** A fault that another try will not mend. */
class Final extends Error {
  readonly error: OperatorError;
  constructor(error: OperatorError) {
    super(error.message);
    this.error = error;
  }
}

/**
 * Fetches a file, resuming what an earlier try left, and puts it in its place only when size and digest are right. Tries
 * that bring it further do not count.
 * @throws OperatorError E_WEIGHTS or E_NO_ROOM with the reason; the signal's reason when aborted
 */
export async function fetchFile(request: FetchRequest): Promise<void> {
  const { url, signal, first_wait_ms = 1_000 } = request;
  const { part } = partsOf(request.path);
  let last = "";
  for (let tried = 0; tried < FETCH_TRIES_COUNT; tried += 1) {
    if (tried > 0) await sleep(first_wait_ms * 2 ** (tried - 1), undefined, { signal });
    const before = await sizeOf(part);
    try {
      await tryOnce(request);
      return;
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof Final) throw error.error;
      last = messageOf(error);
      if ((await sizeOf(part)) - before >= FETCH_GROWTH_BYTES) tried = 0;
    }
  }
  throw wrong(url, `${FETCH_TRIES_COUNT} tries failed, the last with: ${last}`, "check the address and the network from the node");
}

/** What a fetch keeps beside its goal: the bytes so far, and by what the server knows the file they are of. */
function partsOf(path: string): { readonly part: string; readonly tag: string } {
  return { part: `${path}.part`, tag: `${path}.tag.part` };
}

async function tryOnce(request: FetchRequest): Promise<void> {
  const { part, tag } = partsOf(request.path);
  const stall = new AbortController();
  const { stall_ms = FETCH_STALL_MS, size } = request;
  const timer = setTimeout(() => stall.abort(new Error(`no byte came for ${stall_ms / 1_000} s`)), stall_ms);
  try {
    const have = await resumable(request);
    if (have > 0 && have === size) return await finish(request, have);
    const known = await readIfThere(tag);
    const range = { range: `bytes=${have}-`, ...(known !== null && { "if-range": known }) };
    const headers = { "accept-encoding": "identity", ...(have > 0 && range) };
    const signal = AbortSignal.any([request.signal, stall.signal]);
    const response = await fetch(request.url, { headers, signal, decompress: false, timeout: false } as RequestInit);
    if (response.status === 416 && have > 0 && rangeOf(response).total === have) return await finish(request, have);
    const { offset, total } = await judge(request, response, have, known);
    if (offset === 0) await remember(tag, validatorOf(response));
    const file = await open(part, offset === 0 ? "w" : "r+", 0o644);
    try {
      await pour(request, response, file, offset, total, () => timer.refresh());
    } finally {
      await file.close();
    }
    clearTimeout(timer);
    await finish(request, total);
  } finally {
    clearTimeout(timer);
  }
}

/** Bytes of an earlier try that can be gone on from: only with something by which the file is known again. */
async function resumable({ path, sha256 }: FetchRequest): Promise<number> {
  const { part, tag } = partsOf(path);
  return sha256 !== undefined || (await readIfThere(tag)) !== null ? sizeOf(part) : 0;
}

/** What `If-Range` may name (RFC 9110 13.1.5): a strong entity tag, else a date; null when the server sends neither. */
function validatorOf({ headers }: Response): string | null {
  const etag = headers.get("etag");
  return etag !== null && !etag.startsWith("W/") ? etag : headers.get("last-modified");
}

async function remember(file: string, validator: string | null): Promise<void> {
  if (validator === null) await rm(file, { force: true });
  else await writeFile(file, validator);
}

/** First byte and length of the whole file, as a partial answer or a refused range names them. */
function rangeOf({ headers }: Response): { readonly from: number | null; readonly total: number | null } {
  const found = /^bytes (?:(\d+)-\d+|\*)\/(\d+|\*)$/.exec(headers.get("content-range") ?? "");
  const number = (text: string | undefined) => (text === undefined || text === "*" ? null : Number(text));
  return { from: number(found?.[1]), total: number(found?.[2]) };
}

/** Where the answer's body goes in the file and how long the whole will be. */
async function judge(
  request: FetchRequest,
  response: Response,
  have: number,
  known: string | null,
): Promise<{ offset: number; total: number | null }> {
  const { url, size, path } = request;
  const startAgain = async (why: string) => {
    await drop(path);
    return new Error(`${why}; starting again`);
  };
  if (response.status === 416) throw await startAgain("the server has less than was fetched before");
  if (response.status !== 200 && response.status !== 206) {
    const error = wrong(url, `the server answered ${response.status} ${response.statusText}`.trim(), "check the address in the catalog");
    throw response.status >= 500 || response.status === 429 || response.status === 408 ? new Error(error.why) : new Final(error);
  }
  const partial = response.status === 206;
  const range = rangeOf(response);
  if (partial && range.from !== have) throw new Error("the server sent another range than was asked for");
  // Some servers know ranges but not If-Range.
  if (partial && known !== null && validatorOf(response) !== known) throw await startAgain("the file has changed on the server");
  const offset = partial ? have : 0;
  const length = response.headers.get("content-length");
  const total = range.total ?? (length === null ? null : Number(length) + offset);
  if (size !== undefined && total !== null && total !== size) {
    throw new Final(wrong(url, `the server has ${total} bytes, and ${size} were named`, "correct size in the catalog, or the address"));
  }
  const needed = (total ?? size ?? 0) - offset;
  const free = (await request.free()) + (partial ? 0 : await sizeOf(partsOf(path).part));
  if (needed > free) {
    const why = `it needs ${needed} more bytes, ${free} are free`;
    throw new Final(new OperatorError("E_NO_ROOM", `no room for ${shownUrl(url)}`, why, "free some disk, or move the state folder"));
  }
  return { offset, total };
}

async function pour(
  request: FetchRequest,
  response: Response,
  file: FileHandle,
  offset: number,
  total: number | null,
  alive: () => void,
): Promise<void> {
  const most = total ?? request.size ?? Infinity;
  let at = offset;
  request.progress(at, total, "fetching");
  for await (const chunk of response.body ?? []) {
    alive();
    if (at + chunk.length > most) {
      await drop(request.path);
      throw new Final(wrong(request.url, `it sends more than the ${most} bytes it is to have`, "check what the address gives"));
    }
    try {
      await writeWhole(file, chunk, at);
    } catch (error) {
      // Without a size it may never end: what cannot be told from garbage does not keep the disk full.
      if (most === Infinity) await drop(request.path);
      throw new Final(cannotStore(request.url, error, at));
    }
    at += chunk.length;
    request.progress(at, total, "fetching");
  }
  if (total !== null && at !== total) throw new Error(`the connection ended after ${at} of ${total} bytes`);
  await file.truncate(at);
  await file.sync();
}

/** A nearly full disk takes a part of what is written. */
async function writeWhole(file: FileHandle, chunk: Uint8Array, at: number): Promise<void> {
  for (let done = 0; done < chunk.length;) {
    const { bytesWritten } = await file.write(chunk, done, chunk.length - done, at + done);
    done += bytesWritten;
  }
}

function cannotStore(url: string, error: unknown, at: number): OperatorError {
  const full = (error as NodeJS.ErrnoException).code === "ENOSPC" || (error as NodeJS.ErrnoException).code === "EDQUOT";
  const why = full ? `the disk is full after ${at} bytes` : messageOf(error);
  return new OperatorError(
    full ? "E_NO_ROOM" : "E_FILE",
    `cannot store ${shownUrl(url)}`,
    why,
    full ? "free some disk, or move the state folder" : "check the disk of the state folder",
  );
}

async function finish(request: FetchRequest, total: number | null): Promise<void> {
  const { url, path, sha256, size, signal, progress } = request;
  const { part, tag } = partsOf(path);
  const got = await sizeOf(part);
  const spoiled = async (error: OperatorError) => {
    await drop(path);
    return new Final(error);
  };
  if (size !== undefined && got !== size)
    throw await spoiled(wrong(url, `it has ${got} bytes, and ${size} were named`, "correct size in the catalog"));
  if (total !== null && got !== total) throw new Error(`${got} bytes of ${total} came`);
  if (sha256 !== undefined) {
    const digest = await sha256Of(part, signal, (done) => progress(done, got, "checking"));
    const remedy = "correct sha256 in the catalog, or the address";
    if (digest !== sha256) throw await spoiled(wrong(url, `its sha256 is ${digest}, and ${sha256} was named`, remedy));
  }
  await rename(part, path);
  await rm(tag, { force: true });
}

async function drop(path: string): Promise<void> {
  const { part, tag } = partsOf(path);
  await Promise.all([rm(part, { force: true }), rm(tag, { force: true })]);
}

/** Size in bytes; 0 when there is no such file. */
export async function sizeOf(path: string): Promise<number> {
  try {
    return (await stat(path)).size;
  } catch {
    return 0;
  }
}

/** Digest of a file, lower-case hex. @throws the signal's reason when it aborts */
export async function sha256Of(path: string, signal: AbortSignal, progress: (done: number) => void): Promise<string> {
  const hash = createHash("sha256");
  let done = 0;
  for await (const chunk of Bun.file(path).stream()) {
    signal.throwIfAborted();
    hash.update(chunk);
    progress((done += chunk.length));
  }
  return hash.digest("hex");
}
