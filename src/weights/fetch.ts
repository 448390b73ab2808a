import { createHash } from "node:crypto";
import { open, rename, rm, stat } from "node:fs/promises";
import type { FileHandle } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { FETCH_STALL_MS, FETCH_TRIES_COUNT } from "../protocol/limits.ts";
import { shownUrl } from "./source.ts";

export interface FetchRequest {
  readonly url: string;
  /** Where the whole file goes; the part lies beside it until then. */
  readonly path: string;
  readonly sha256: string | undefined;
  readonly size: number | undefined;
  readonly signal: AbortSignal;
  readonly progress: (done: number, total: number | null) => void;
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
 * Fetches a file, resuming what an earlier try left, and puts it in its place only when size and digest are right.
 * @throws OperatorError E_WEIGHTS or E_NO_ROOM with the reason; the signal's reason when aborted
 */
export async function fetchFile(request: FetchRequest): Promise<void> {
  const { url, signal, first_wait_ms = 1_000 } = request;
  let last = "";
  for (let tried = 0; tried < FETCH_TRIES_COUNT; tried += 1) {
    if (tried > 0) await sleep(first_wait_ms * 2 ** (tried - 1), undefined, { signal });
    try {
      await tryOnce(request);
      return;
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof Final) throw error.error;
      last = messageOf(error);
    }
  }
  throw wrong(url, `${FETCH_TRIES_COUNT} tries failed, the last with: ${last}`, "check the address and the network from the node");
}

async function tryOnce(request: FetchRequest): Promise<void> {
  const part = `${request.path}.part`;
  const have = await sizeOf(part);
  const stall = new AbortController();
  const { stall_ms = FETCH_STALL_MS } = request;
  const timer = setTimeout(() => stall.abort(new Error(`no byte came for ${stall_ms / 1_000} s`)), stall_ms);
  try {
    const signal = AbortSignal.any([request.signal, stall.signal]);
    const headers = { "accept-encoding": "identity", ...(have > 0 && { range: `bytes=${have}-` }) };
    const response = await fetch(request.url, { headers, signal, decompress: false, timeout: false } as RequestInit);
    const { offset, total } = await judge(request, response, have, part);
    const file = await open(part, offset === 0 ? "w" : "r+", 0o644);
    try {
      await pour(request, response, file, offset, total, () => timer.refresh());
    } finally {
      await file.close();
    }
    await finish(request, part, total);
  } finally {
    clearTimeout(timer);
  }
}

/** Where the answer's body goes in the file and how long the whole will be. */
async function judge(
  request: FetchRequest,
  response: Response,
  have: number,
  part: string,
): Promise<{ offset: number; total: number | null }> {
  const { url, size } = request;
  if (response.status === 416) {
    await rm(part, { force: true });
    throw new Error("the server has less than was fetched before; starting again");
  }
  if (response.status !== 200 && response.status !== 206) {
    const error = wrong(url, `the server answered ${response.status} ${response.statusText}`.trim(), "check the address in the catalog");
    throw response.status >= 500 || response.status === 429 ? new Error(error.why) : new Final(error);
  }
  const range = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get("content-range") ?? "");
  if (response.status === 206 && Number(range?.[1]) !== have) throw new Error("the server sent another range than was asked for");
  const offset = response.status === 206 ? have : 0;
  const length = response.headers.get("content-length");
  const total = range && range[2] !== "*" ? Number(range[2]) : length === null ? null : Number(length) + offset;
  if (size !== undefined && total !== null && total !== size) {
    throw new Final(wrong(url, `the server has ${total} bytes, the catalog says ${size}`, "correct size in the catalog, or the address"));
  }
  const needed = (total ?? size ?? 0) - offset;
  const free = await request.free();
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
  let at = offset;
  request.progress(at, total);
  for await (const chunk of response.body ?? []) {
    alive();
    try {
      await file.write(chunk, 0, chunk.length, at);
    } catch (error) {
      const full = (error as NodeJS.ErrnoException).code === "ENOSPC";
      const why = full ? `the disk is full after ${at} bytes` : messageOf(error);
      throw new Final(
        new OperatorError("E_NO_ROOM", `cannot store ${shownUrl(request.url)}`, why, "free some disk, or move the state folder"),
      );
    }
    at += chunk.length;
    request.progress(at, total);
  }
  if (total !== null && at !== total) throw new Error(`the connection ended after ${at} of ${total} bytes`);
  await file.truncate(at);
  await file.sync();
}

async function finish({ url, path, sha256, size }: FetchRequest, part: string, total: number | null): Promise<void> {
  const got = await sizeOf(part);
  if (size !== undefined && got !== size)
    throw await spoiled(part, wrong(url, `it has ${got} bytes, the catalog says ${size}`, "correct size in the catalog"));
  if (total !== null && got !== total) throw new Error(`${got} bytes of ${total} came`);
  if (sha256 !== undefined) {
    const digest = await sha256Of(part);
    if (digest !== sha256)
      throw await spoiled(
        part,
        wrong(url, `its sha256 is ${digest}, the catalog says ${sha256}`, "correct sha256 in the catalog, or the address"),
      );
  }
  await rename(part, path);
}

async function spoiled(part: string, error: OperatorError): Promise<Final> {
  await rm(part, { force: true });
  return new Final(error);
}

/** Size in bytes; 0 when there is no such file. */
export async function sizeOf(path: string): Promise<number> {
  try {
    return (await stat(path)).size;
  } catch {
    return 0;
  }
}

/** Digest of a file, lower-case hex. */
export async function sha256Of(path: string): Promise<string> {
  const hash = createHash("sha256");
  for await (const chunk of Bun.file(path).stream()) hash.update(chunk);
  return hash.digest("hex");
}
