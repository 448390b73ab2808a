import { ANSWER_HEAD_BYTES } from "../protocol/limits.ts";

/** What an HTTP/1.1 answer begins with. */
export interface AnswerHead {
  readonly status: number;
  readonly headers: Headers;
}

/** Told about an answer as it comes. */
export interface AnswerSink {
  head(head: AnswerHead): void;
  /** A piece of the body, never empty, without the framing; it may be kept. */
  body(bytes: Uint8Array): void;
  end(): void;
}

type State = "head" | "length" | "until-close" | "chunk-size" | "chunk" | "chunk-end" | "trailer" | "ended";

/** Longest line between two chunks. */
const CHUNK_LINE_BYTES = 4_096;
const CRLF = Buffer.from("\r\n");
const HEAD_END = Buffer.from("\r\n\r\n");

/** Reads one HTTP/1.1 answer to a POST or GET (RFC 9112), however its bytes are cut. Strict: what is ambiguous is refused. */
export class AnswerReader {
  readonly #sink: AnswerSink;
  #state: State = "head";
  /** Bytes of a head or line that is not whole yet. */
  #held: Buffer = Buffer.alloc(0);
  /** Bytes left of the body, or of the chunk. */
  #left = 0;
  #keep = true;

  constructor(sink: AnswerSink) {
    this.#sink = sink;
  }

  /** Whether the connection may carry another request: the answer is whole and its sender did not say otherwise. */
  get reusable(): boolean {
    return this.#state === "ended" && this.#keep;
  }

  /** Takes the next bytes. @throws Error when they are no answer of HTTP/1.1 */
  take(bytes: Uint8Array): void {
    let rest: Buffer | null = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    while (rest !== null && rest.length > 0) rest = this.#step(rest);
  }

  /** The connection is closed. @throws Error when the answer was not whole */
  close(): void {
    this.#keep = false;
    if (this.#state === "until-close") this.#end();
    if (this.#state !== "ended") throw new Error("the connection was closed before the answer was whole");
  }

  /** Reads what it can; the bytes that are left, or null when it needs more first. */
  #step(bytes: Buffer): Buffer | null {
    switch (this.#state) {
      case "head": {
        const found = this.#until(bytes, HEAD_END, ANSWER_HEAD_BYTES);
        if (found) this.#readHead(found.text);
        return found && found.rest;
      }
      case "until-close":
        this.#sink.body(bytes);
        return null;
      case "length":
      case "chunk": {
        const piece = bytes.subarray(0, this.#left);
        this.#left -= piece.length;
        this.#sink.body(piece);
        if (this.#left > 0) return null;
        if (this.#state === "length") this.#end();
        else this.#state = "chunk-end";
        return bytes.subarray(piece.length);
      }
      case "chunk-size":
      case "chunk-end":
      case "trailer": {
        const found = this.#until(bytes, CRLF, CHUNK_LINE_BYTES);
        if (found) this.#readLine(found.text);
        return found && found.rest;
      }
      case "ended":
        throw new Error("bytes after the end of the answer");
    }
  }

  /** The text before a mark, with what was held back; holds everything back when the mark has not come. */
  #until(bytes: Buffer, mark: Buffer, limit: number): { text: string; rest: Buffer } | null {
    const all = this.#held.length === 0 ? bytes : Buffer.concat([this.#held, bytes]);
    const at = all.indexOf(mark);
    if ((at < 0 ? all.length : at) > limit) throw new Error(`more than ${limit} bytes where a line should end`);
    if (at < 0) {
      this.#held = all;
      return null;
    }
    this.#held = Buffer.alloc(0);
    return { text: all.toString("latin1", 0, at), rest: all.subarray(at + mark.length) };
  }

  #readHead(text: string): void {
    const [first = "", ...lines] = text.split("\r\n");
    const match = /^HTTP\/1\.([01]) ([1-5]\d\d)(?: |$)/.exec(first);
    if (!match) throw new Error("no HTTP/1.1 answer");
    const status = Number(match[2]);
    if (status === 101) throw new Error("it changed the protocol");
    if (status < 200) return;
    const headers = new Headers();
    for (const line of lines) {
      const colon = line.indexOf(":");
      // A blank before the colon or at the start of the line is how answers are smuggled.
      if (colon < 1 || /\s/.test(line.slice(0, colon))) throw new Error("a header that is none");
      headers.append(line.slice(0, colon), line.slice(colon + 1).trim());
    }
    const connection = headers.get("connection")?.toLowerCase() ?? "";
    this.#keep = match[1] === "1" && !/(^|,)\s*close\s*(,|$)/.test(connection);
    const state = this.#bodyState(status, headers);
    this.#sink.head({ status, headers });
    this.#state = state;
    if (state === "length" && this.#left === 0) this.#end();
  }

  #bodyState(status: number, headers: Headers): State {
    const coding = headers.get("transfer-encoding");
    const length = headers.get("content-length");
    if (status === 204 || status === 304) return "length";
    if (coding !== null) {
      if (coding.toLowerCase() !== "chunked" || length !== null) throw new Error("its length is ambiguous");
      return "chunk-size";
    }
    if (length === null) {
      this.#keep = false;
      return "until-close";
    }
    if (!/^\d{1,15}$/.test(length)) throw new Error("its length is no number");
    this.#left = Number(length);
    return "length";
  }

  #readLine(line: string): void {
    if (this.#state === "chunk-end") {
      if (line !== "") throw new Error("a chunk is longer than it says");
      this.#state = "chunk-size";
    } else if (this.#state === "trailer") {
      if (line === "") this.#end();
    } else {
      const size = /^([0-9a-fA-F]{1,8})\s*(;|$)/.exec(line)?.[1];
      if (size === undefined) throw new Error("a chunk without a size");
      this.#left = Number.parseInt(size, 16);
      this.#state = this.#left === 0 ? "trailer" : "chunk";
    }
  }

  #end(): void {
    this.#state = "ended";
    this.#sink.end();
  }
}
