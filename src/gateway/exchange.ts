import { UPSTREAM_BUFFER_BYTES } from "../protocol/limits.ts";
import { AnswerReader } from "./answer-reader.ts";
import type { AnswerHead, AnswerSink } from "./answer-reader.ts";

/** Body of an answer: read piece by piece, so that who reads slowly slows the engine down. */
export interface AnswerBody {
  /** The next bytes, or null at the end. Rejects when the answer broke off. */
  read(): Promise<Uint8Array | null>;
  /** Nobody wants the rest: the engine is told by the end of the connection. */
  cancel(): void;
}

export interface Answer extends AnswerHead {
  readonly body: AnswerBody;
}

type Socket = Bun.Socket<undefined>;

interface Asked {
  readonly signal: AbortSignal;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: unknown) => void;
}

/** One request on a connection, until its answer is whole, broken or unwanted. */
export class Exchange implements AnswerSink, AnswerBody {
  readonly #socket: Socket;
  readonly #asked: Asked;
  readonly #over: (reusable: boolean) => void;
  readonly #reader = new AnswerReader(this);
  #outgoing: Uint8Array[] = [];
  #pieces: Uint8Array[] = [];
  #held_bytes = 0;
  #paused = false;
  #whole = false;
  #finished = false;
  #error: unknown = null;
  #wake: (() => void) | null = null;

  constructor(socket: Socket, asked: Asked, over: (reusable: boolean) => void) {
    this.#socket = socket;
    this.#asked = asked;
    this.#over = over;
  }

  start(head: string, body: Uint8Array): void {
    const { signal } = this.#asked;
    if (signal.aborted) return this.#fail(signal.reason);
    signal.addEventListener("abort", this.#abort, { once: true });
    this.#outgoing = [Buffer.concat([Buffer.from(head, "latin1"), body])];
    this.flush();
  }

  /** Writes as much of the request as the socket takes; called again when it has drained. */
  flush(): void {
    for (;;) {
      const [next] = this.#outgoing;
      if (!next) return;
      const written = this.#socket.write(next);
      if (written < next.length) {
        if (written > 0) this.#outgoing[0] = next.subarray(written);
        return;
      }
      this.#outgoing.shift();
    }
  }

  take(bytes: Uint8Array): void {
    try {
      this.#reader.take(bytes);
    } catch (error) {
      this.#fail(error);
    }
    this.#hold();
  }

  closed(error: Error | null): void {
    if (this.#finished) return;
    try {
      this.#reader.close();
    } catch (broken) {
      this.#fail(error ?? broken);
    }
  }

  head({ status, headers }: AnswerHead): void {
    this.#asked.resolve({ status, headers, body: this });
  }

  body(bytes: Uint8Array): void {
    this.#pieces.push(bytes);
    this.#held_bytes += bytes.length;
    this.#wake?.();
  }

  end(): void {
    this.#whole = true;
    // Later than this call, which may yet find bytes that belong to nothing. An answer that came before the whole
    // request was taken leaves half a request on the connection.
    queueMicrotask(() => this.#finish(this.#reader.reusable && this.#outgoing.length === 0));
    this.#wake?.();
  }

  async read(): Promise<Uint8Array | null> {
    while (this.#pieces.length === 0) {
      if (this.#error !== null) throw this.#error;
      if (this.#whole) return null;
      await new Promise<void>((resolve) => (this.#wake = resolve));
      this.#wake = null;
    }
    const pieces = this.#pieces;
    this.#pieces = [];
    this.#held_bytes = 0;
    this.#hold();
    return pieces.length === 1 ? (pieces[0] as Uint8Array) : Buffer.concat(pieces);
  }

  cancel(): void {
    this.#fail(new Error("nobody wants the answer"));
  }

  /** Stops the engine when more is held than a client takes, and lets it go on. */
  #hold(): void {
    const full = this.#held_bytes > UPSTREAM_BUFFER_BYTES;
    // Once finished, the connection may be another request's.
    if (full === this.#paused || this.#finished) return;
    this.#paused = full;
    if (full) this.#socket.pause();
    else this.#socket.resume();
  }

  readonly #abort = () => this.#fail(this.#asked.signal.reason);

  #fail(error: unknown): void {
    if (this.#finished) return;
    this.#error = error;
    this.#finish(false);
    this.#asked.reject(error);
    this.#wake?.();
  }

  #finish(reusable: boolean): void {
    if (this.#finished) return;
    this.#finished = true;
    this.#outgoing = [];
    if (this.#paused) this.#socket.resume();
    this.#asked.signal.removeEventListener("abort", this.#abort);
    this.#over(reusable);
  }
}
