import { closeSync, existsSync, fstatSync, openSync, readFileSync, renameSync, writeSync } from "node:fs";
import { join } from "node:path";
import { EXIT_LOG_BYTES, EXIT_LOG_LINES_COUNT, LOG_LINE_BYTES, LOG_TAIL_LINES_COUNT, RANK_LOG_BYTES } from "../protocol/limits.ts";

/** The file of what an engine printed; the lines before them are in a second one, with `.1` behind its name. */
const ENGINE_LOG = "engine.log";

/**
 * Lines in two files of an attempt's folder that never grow past their bound together: what an engine printed, or
 * what its shim has to say. A full disk loses lines, never the engine.
 */
export class RankLog {
  readonly #folder: string;
  readonly #name: string;
  readonly #half_bytes: number;
  readonly #followers = new Set<(line: string) => void>();
  #fd: number;
  #written: number;

  constructor(folder: string, bound_bytes = RANK_LOG_BYTES, name = ENGINE_LOG) {
    this.#folder = folder;
    this.#name = name;
    this.#half_bytes = bound_bytes / 2;
    this.#fd = openSync(join(folder, name), "a", 0o600);
    this.#written = fstatSync(this.#fd).size;
  }

  /** Adds a line, cut to its bound. */
  add(line: string): void {
    const kept = line.length > LOG_LINE_BYTES ? `${line.slice(0, LOG_LINE_BYTES)}…` : line;
    const bytes = Buffer.from(`${kept}\n`);
    try {
      if (this.#written + bytes.length > this.#half_bytes) this.#turn();
      writeSync(this.#fd, bytes);
      this.#written += bytes.length;
    } catch {
      // No room or no disk: the followers still get it.
    }
    for (const follower of this.#followers) follower(kept);
  }

  #turn(): void {
    const path = join(this.#folder, this.#name);
    renameSync(path, `${path}.1`);
    const next = openSync(path, "w", 0o600);
    closeSync(this.#fd);
    this.#fd = next;
    this.#written = 0;
  }

  /** Calls with each line to come, until the returned function is called. */
  follow(take: (line: string) => void): () => void {
    this.#followers.add(take);
    return () => this.#followers.delete(take);
  }

  tail(lines: number): string[] {
    return tailOf(this.#folder, lines);
  }
}

/**
 * The last lines an attempt's engine printed, oldest first; also of an attempt that has ended. Read in one go (the files
 * are bounded), so that no line falls between a tail and the lines to come.
 * @param lines how many, as somebody asked: none for less than one or no number, and never more than LOG_TAIL_LINES_COUNT
 */
export function tailOf(folder: string, lines: number): string[] {
  const path = join(folder, ENGINE_LOG);
  const paths = [`${path}.1`, path];
  const texts = paths.map((path) => (existsSync(path) ? readFileSync(path, "utf8") : ""));
  const all = texts.join("").split("\n");
  if (all.at(-1) === "") all.pop();
  const most = Math.min(lines, LOG_TAIL_LINES_COUNT);
  return most >= 1 ? all.slice(-most) : [];
}

/** The last lines of an engine that has ended, as they travel with its exit: the newest, as many as fit. */
export function lastLinesOf(folder: string): string[] {
  const lines = tailOf(folder, EXIT_LOG_LINES_COUNT);
  let bytes = 0;
  const first = lines.findLastIndex((line) => (bytes += Buffer.byteLength(JSON.stringify(line))) > EXIT_LOG_BYTES);
  return lines.slice(first + 1);
}

/** What no log may hold, and what stands for it. */
export interface Secret {
  hide(text: string): string;
  /** How many characters of a text without an end may be the beginning of a secret. */
  readonly held_chars: number;
}

const NOTHING: Secret = { hide: (text) => text, held_chars: 0 };

/** Cuts a byte stream into lines, less the secret; a line longer than the bound comes in pieces, of which none holds a part of it. */
export function lineSplitter(take: (line: string) => void, { hide, held_chars }: Secret = NOTHING): (chunk: Uint8Array | null) => void {
  const decoder = new TextDecoder();
  let rest = "";
  return (chunk) => {
    if (chunk === null) {
      if (rest !== "") take(rest);
      rest = "";
      return;
    }
    const parts = hide(rest + decoder.decode(chunk, { stream: true })).split(/\r?\n/);
    rest = parts.pop() ?? "";
    for (const line of parts) take(line);
    if (rest.length > LOG_LINE_BYTES + held_chars) {
      const piece = rest.length - held_chars;
      take(rest.slice(0, piece));
      rest = rest.slice(piece);
    }
  };
}
