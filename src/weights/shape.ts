import { open, readdir, readFile, stat } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { messageOf } from "../protocol/errors.ts";
import { GGUF_FIRST_READ_BYTES, GGUF_HEAD_BYTES, MODEL_CONFIG_BYTES, WEIGHTS_HEAD_MS } from "../protocol/limits.ts";
import type { ModelShape } from "../protocol/model-shape.ts";
import { readGguf } from "./gguf.ts";
import { indexedBytes, readConfig } from "./safetensors.ts";

/** What was found of weights: their shape, null when they are of a form that is not known, and why they cannot be used. */
export interface Found {
  readonly shape: ModelShape | null;
  /** "" when nothing speaks against them. */
  readonly fault: string;
}

/** Bytes of a file from its beginning, at most so many, and the size of the whole; 0 when that is not told. */
type ReadHead = (bytes: number) => Promise<{ readonly head: Uint8Array; readonly file_bytes: number }>;

/** Looks at weights on this machine: a GGUF file, the first part of a split one, or a folder of safetensors. Never rejects. */
export async function lookAt(path: string): Promise<Found> {
  try {
    const about = await stat(path);
    if (about.isDirectory()) return await folderAt(path);
    // To open a pipe or a device may never end, and would tell nothing.
    return about.isFile() ? await fileAt(path) : { shape: null, fault: "it is neither a file nor a folder" };
  } catch (error) {
    return { shape: null, fault: messageOf(error) };
  }
}

async function fileAt(path: string): Promise<Found> {
  const file = await open(path, "r");
  try {
    const { size } = await file.stat();
    const read: ReadHead = async (bytes) => {
      const buffer = Buffer.alloc(Math.min(bytes, size));
      const { bytesRead } = await file.read(buffer, 0, buffer.length, 0);
      return { head: buffer.subarray(0, bytesRead), file_bytes: size };
    };
    const head = await headOf(read);
    // What it is for the engine to judge.
    if (head === null) return { shape: null, fault: "" };
    return head.files === 1 ? { shape: head.shape, fault: "" } : await splitAt(path, head.shape, head.files);
  } finally {
    await file.close();
  }
}

const PART = /-\d{5}-of-/;

/** All parts of a split model lie beside the first: `NAME-00001-of-00003.gguf`. */
async function splitAt(path: string, shape: ModelShape, files: number): Promise<Found> {
  const name = basename(path);
  if (!PART.test(name)) return { shape: null, fault: `it is one of ${files} parts, and its name does not say which` };
  let weights_bytes = 0;
  for (let part = 1; part <= files; part++) {
    const beside = join(dirname(path), name.replace(PART, `-${String(part).padStart(5, "0")}-of-`));
    try {
      weights_bytes += (await stat(beside)).size;
    } catch {
      return { shape: null, fault: `part ${part} of ${files} is missing: ${beside}` };
    }
  }
  return { shape: { ...shape, weights_bytes }, fault: "" };
}

/** @returns null for what is not GGUF, has no header that can be read, or does not tell its size */
async function headOf(read: ReadHead) {
  for (let bytes = GGUF_FIRST_READ_BYTES; ; bytes *= 4) {
    const { head, file_bytes } = await read(Math.min(bytes, GGUF_HEAD_BYTES));
    if (file_bytes === 0) return null;
    const found = readGguf(head, file_bytes);
    if ("shape" in found) return found;
    if ("fault" in found || bytes >= GGUF_HEAD_BYTES) return null;
  }
}

async function folderAt(path: string): Promise<Found> {
  const names = await readdir(path);
  if (!names.includes("config.json")) return { shape: null, fault: "" };
  const config = await jsonAt(join(path, "config.json"));
  const indexed = names.includes("model.safetensors.index.json")
    ? indexedBytes(await jsonAt(join(path, "model.safetensors.index.json")))
    : null;
  const sizes = names.filter((name) => name.endsWith(".safetensors")).map(async (name) => (await stat(join(path, name))).size);
  const bytes = indexed ?? (await Promise.all(sizes)).reduce((sum, size) => sum + size, 0);
  const read = readConfig(config, bytes);
  return "shape" in read && bytes > 0 ? { shape: read.shape, fault: "" } : { shape: null, fault: "" };
}

/** @returns undefined for what is too long or no JSON */
async function jsonAt(path: string): Promise<unknown> {
  const about = await stat(path);
  if (!about.isFile() || about.size > MODEL_CONFIG_BYTES) return undefined;
  try {
    return JSON.parse(await readFile(path, "utf8"));
  } catch {
    return undefined;
  }
}

/**
 * Reads the header of a GGUF file at a URL without fetching the rest.
 * @returns null when it is no GGUF file, or does not say how large it is
 * @throws Error when the source does not answer as it should; it may later
 */
export async function shapeAtUrl(url: string, signal: AbortSignal): Promise<ModelShape | null> {
  const read: ReadHead = async (bytes) => {
    const stop = new AbortController();
    const over = AbortSignal.any([signal, stop.signal, AbortSignal.timeout(WEIGHTS_HEAD_MS)]);
    const response = await fetch(url, { headers: { range: `bytes=0-${bytes - 1}`, "accept-encoding": "identity" }, signal: over });
    if (response.status !== 200 && response.status !== 206) throw new Error(`it answered ${response.status} ${response.statusText}`.trim());
    const total = /\/(\d+)$/.exec(response.headers.get("content-range") ?? "")?.[1] ?? response.headers.get("content-length");
    try {
      return { head: await firstBytes(response, bytes), file_bytes: Number(total ?? 0) || 0 };
    } finally {
      stop.abort();
    }
  };
  const head = await headOf(read);
  return head?.files === 1 ? head.shape : null;
}

/** At most that many bytes of an answer; a source that knows no ranges sends more. */
async function firstBytes(response: Response, bytes: number): Promise<Uint8Array> {
  const whole = new Uint8Array(bytes);
  let at = 0;
  for await (const chunk of response.body ?? []) {
    const part = chunk.subarray(0, bytes - at);
    whole.set(part, at);
    at += part.length;
    if (at === bytes) break;
  }
  return whole.subarray(0, at);
}
