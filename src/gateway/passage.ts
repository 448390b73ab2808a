import type { Log } from "../os/log.ts";
import { messageOf } from "../protocol/errors.ts";
import type { Target } from "../protocol/gateway-api.ts";
import { BUFFERED_ANSWER_BYTES } from "../protocol/limits.ts";
import type { Answer } from "./exchange.ts";
import type { GatewayMetrics } from "./gateway-metrics.ts";
import type { Loads } from "./loads.ts";
import { ApiError } from "./openai.ts";
import { usageOf, UsageReader } from "./usage.ts";

/** What an answer on its way back needs to know of its request; not the body, which may be large. */
export interface Asked {
  readonly id: string;
  readonly model: string;
  /** Aborts when the user is gone. */
  readonly signal: AbortSignal;
  readonly started_ms: number;
}

export interface PassageParts {
  readonly loads: Loads;
  readonly metrics: GatewayMetrics;
  readonly log: Log;
}

/** Statuses whose answers have no body (RFC 9110 15). */
const WITHOUT_BODY = [204, 205, 304];

const NOT_RETURNED = ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "trailer", "upgrade", "date"];

/** The way back of one answer, byte for byte. Whatever happens on it, its end is counted once. */
export class Passage {
  readonly #parts: PassageParts;
  readonly #asked: Asked;
  readonly #target: Target;
  readonly #answer: Answer;
  readonly #release: () => void;
  #first = true;
  #over = false;

  /** @param release called once when the answer has ended, however it ended */
  constructor(parts: PassageParts, asked: Asked, target: Target, answer: Answer, release: () => void) {
    this.#parts = parts;
    this.#asked = asked;
    this.#target = target;
    this.#answer = answer;
    this.#release = release;
    if (asked.signal.aborted) this.#left();
    else asked.signal.addEventListener("abort", this.#left, { once: true });
  }

  /** @throws ApiError when the answer broke and nothing of it has been sent */
  async respond(): Promise<Response> {
    const { status, headers } = this.#answer;
    // 501 is an engine's answer to a wrong wish (embeddings of a model without them), not a fault of it.
    if (status >= 500 && status !== 501) this.#parts.loads.failed(this.#target, null, Date.now());
    else this.#parts.loads.answered(this.#target, Date.now());
    const returned = { status, headers: returnedHeaders(headers, this.#asked.id) };
    if (WITHOUT_BODY.includes(status)) {
      this.#end(status);
      return new Response(null, returned);
    }
    const length = Number(headers.get("content-length") ?? Number.NaN);
    if (length <= BUFFERED_ANSWER_BYTES) return new Response(await this.#whole(), returned);
    return new Response(this.#stream(), returned);
  }

  readonly #left = () => this.#end(499);

  #end(status: number): void {
    if (this.#over) return;
    this.#over = true;
    const { signal, model, started_ms } = this.#asked;
    signal.removeEventListener("abort", this.#left);
    this.#release();
    this.#parts.metrics.requests.add({ model, status: String(status) });
    this.#parts.metrics.duration.observe({ model }, (Date.now() - started_ms) / 1_000);
  }

  /** An answer of known and modest length is read first, so that a replica that dies on it is a clean error. */
  async #whole(): Promise<Uint8Array<ArrayBuffer>> {
    const pieces: Uint8Array[] = [];
    try {
      for (let piece = await this.#read(); piece !== null; piece = await this.#read()) pieces.push(piece);
    } catch (error) {
      this.#asked.signal.throwIfAborted();
      this.#broke(error);
      this.#end(502);
      throw new ApiError("upstream_failed", "the replica broke off its answer");
    }
    const bytes = Buffer.concat(pieces);
    const usage = usageOf(bytes.toString());
    if (usage) this.#parts.metrics.countTokens(this.#asked.model, usage);
    this.#end(this.#answer.status);
    return bytes;
  }

  async #read(): Promise<Uint8Array | null> {
    const piece = await this.#answer.body.read();
    if (piece !== null && this.#first) {
      this.#first = false;
      const { model, started_ms } = this.#asked;
      this.#parts.metrics.first_byte.observe({ model }, (Date.now() - started_ms) / 1_000);
    }
    return piece;
  }

  #stream(): ReadableStream<Uint8Array> {
    const { status, headers, body } = this.#answer;
    const events = headers.get("content-type")?.startsWith("text/event-stream") === true && !headers.has("content-encoding");
    const usage = events ? new UsageReader() : null;
    const end = (ended: number) => {
      if (usage?.usage && !this.#over) this.#parts.metrics.countTokens(this.#asked.model, usage.usage);
      this.#end(ended);
    };
    return new ReadableStream(
      {
        pull: async (controller) => {
          try {
            const piece = await this.#read();
            if (piece !== null) {
              usage?.take(piece);
              controller.enqueue(piece);
              return;
            }
            end(status);
          } catch (error) {
            if (!this.#asked.signal.aborted) {
              this.#broke(error);
              end(502);
              // Where no event can say so, the client sees a connection cut short, never an answer that looks whole.
              if (!events) throw new CutShort();
              controller.enqueue(this.#lastEvent());
            }
          }
          controller.close();
        },
        cancel: () => {
          body.cancel();
          end(499);
        },
      },
      { highWaterMark: 0 },
    );
  }

  /** The status is long sent, so the last event says what happened. It ends whatever event was cut before it. */
  #lastEvent(): Uint8Array {
    return Buffer.from(`\n\n${new ApiError("upstream_failed", "the replica broke off its answer").toEvent(this.#asked.id)}`);
  }

  #broke(error: unknown): void {
    const { id, model } = this.#asked;
    this.#parts.loads.failed(this.#target, null, Date.now());
    this.#parts.metrics.upstream_failures.add({ model });
    this.#parts.log.warn("a replica broke off its answer", { request: id, model, replica: this.#target.replica, why: messageOf(error) });
  }
}

/** Ends a response in a way its client notices. */
class CutShort extends Error {
  override readonly name = "CutShort";
}

function returnedHeaders(headers: Headers, id: string): Headers {
  const returned = new Headers(headers);
  for (const name of [...NOT_RETURNED, ...namedBy(headers)]) returned.delete(name);
  returned.set("x-request-id", id);
  return returned;
}

/** Headers that a `connection` header says belong to the link alone (RFC 9110 7.6.1). */
export function namedBy(headers: Headers): string[] {
  const named = (headers.get("connection") ?? "").split(",").map((name) => name.trim());
  return named.filter((name) => /^[\w!#$%&'*+.^`|~-]+$/.test(name));
}
