/**
 * sim/ is the simulated engine: an OpenAI-compatible server without a model, for trying llmgw out, rehearsing
 * outages and testing. What it says is a function of what it is asked. It knows nothing of llmgw's own protocols.
 */
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import * as v from "valibot";
import { serveUnix } from "../os/unix-http.ts";
import { messageOf } from "../protocol/errors.ts";
import { chatJob, ChatRequest, completionJob, CompletionRequest, EmbeddingRequest, lastEvents, tokenEvent, wholeAnswer } from "./openai.ts";
import type { Job } from "./openai.ts";
import { meet, type Gang } from "./rendezvous.ts";
import type { SimSettings } from "./settings.ts";
import { countTokens, embed } from "./text.ts";

const EMBEDDING_SIZE = 64;
const HELD_CHUNK_BYTES = 2 ** 24;

const Named = v.object({ model: v.string() });

interface Counters {
  running: number;
  waiting: number;
  prompt_tokens: number;
  generated_tokens: number;
  requests: number;
  cancelled: number;
}

/** Runs a simulated engine until it is told to stop; resolves with its exit code. */
export async function runSimEngine(settings: SimSettings): Promise<number> {
  const say = (line: string) => console.error(line);
  let gang: Gang | null = null;
  try {
    gang = settings.gang && (await meet(settings.gang, say));
  } catch (error) {
    say(messageOf(error));
    return 1;
  }
  if (gang && settings.gang && settings.gang.rank > 0) return follow(gang, settings, say);
  const code = await serve(settings, gang);
  gang?.close();
  return code;
}

/** A rank that serves nothing: it lives as long as rank 0 does. */
async function follow(gang: Gang, { lose_rank_after_ms, ignore_sigterm }: SimSettings, say: (line: string) => void): Promise<number> {
  say("all ranks have met");
  const told = new Promise<number>((resolve) => {
    process.on("SIGTERM", () => {
      if (!ignore_sigterm) resolve(0);
    });
  });
  const lost = gang.lost.then((what) => {
    say(what);
    return 1;
  });
  const dropped = lose_rank_after_ms > 0 ? sleep(lose_rank_after_ms).then(() => 1) : new Promise<number>(() => {});
  return Promise.race([told, lost, dropped]);
}

async function serve(settings: SimSettings, gang: Gang | null): Promise<number> {
  const engine = new SimEngine(settings);
  gang?.lost
    .then((what) => {
      console.error(`${what}: the gang is at its end`);
      engine.stop(1);
    })
    .catch(() => {});
  const server = await serveUnix(settings.socket, (request) => engine.answer(request));
  process.on("SIGTERM", () => {
    if (settings.ignore_sigterm) console.error("SIGTERM ignored, as asked");
    else engine.stop(0);
  });
  engine.load().catch(() => engine.stop(1));
  const code = await engine.stopped;
  await server.close();
  return code;
}

const json = (document: unknown, status = 200): Response => Response.json(document, { status });
const fault = (status: number, type: string, message: string): Response => json({ error: { message, type, code: status } }, status);

class SimEngine {
  readonly #settings: SimSettings;
  readonly #counters: Counters = { running: 0, waiting: 0, prompt_tokens: 0, generated_tokens: 0, requests: 0, cancelled: 0 };
  readonly #queue: (() => void)[] = [];
  #ready = false;
  /** Memory it was told to hold. */
  held: readonly Buffer[] = [];
  stop: (code: number) => void = () => {};
  readonly stopped = new Promise<number>((resolve) => {
    this.stop = resolve;
  });

  constructor(settings: SimSettings) {
    this.#settings = settings;
  }

  async load(): Promise<void> {
    const { load_ms, crash_at_load, hold_memory, model } = this.#settings;
    const steps = Math.max(1, Math.min(100, Math.floor(load_ms / 50)));
    for (let step = 1; step <= steps; step += 1) {
      await sleep(load_ms / steps);
      console.error(`loading ${Math.round((100 * step) / steps)}%`);
    }
    if (crash_at_load) {
      console.error(`cannot load ${model}: told to crash at load`);
      this.stop(1);
      return;
    }
    // Filled, so that it is really taken.
    this.held = Array.from({ length: Math.ceil(hold_memory / HELD_CHUNK_BYTES) }, () => Buffer.alloc(HELD_CHUNK_BYTES, 1));
    console.error(`model ${model} is loaded`);
    this.#ready = true;
  }

  async answer(request: Request): Promise<Response> {
    const { pathname } = new URL(request.url);
    if (pathname === "/metrics") return new Response(this.#metrics(), { headers: { "content-type": "text/plain; version=0.0.4" } });
    if (!this.#ready) return fault(503, "unavailable_error", "Loading model");
    if (pathname === "/health") return json({ status: "ok" });
    if (request.method === "GET" && pathname === "/v1/models") return json(this.#models());
    if (request.method !== "POST") return fault(404, "not_found_error", "no such path");
    if (this.#settings.hang) await new Promise((resolve) => request.signal.addEventListener("abort", resolve));
    let body: unknown;
    try {
      body = await request.json();
    } catch {
      return fault(400, "invalid_request_error", "the body is not JSON");
    }
    const asked = v.safeParse(Named, body);
    if (asked.success && asked.output.model !== this.#settings.model)
      return fault(404, "not_found_error", `The model ${asked.output.model} does not exist.`);
    try {
      return await this.#route(pathname, body, request.signal);
    } catch (error) {
      if (error instanceof v.ValiError) return fault(400, "invalid_request_error", error.message);
      throw error;
    }
  }

  async #route(pathname: string, body: unknown, signal: AbortSignal): Promise<Response> {
    const { model, tokens } = this.#settings;
    const shape = { id: randomBytes(8).toString("hex"), model, created_s: Math.floor(Date.now() / 1_000), tokens };
    switch (pathname) {
      case "/v1/chat/completions":
        return this.#generate(chatJob(v.parse(ChatRequest, body), shape), signal);
      case "/v1/completions":
        return this.#generate(completionJob(v.parse(CompletionRequest, body), shape), signal);
      case "/v1/embeddings":
        return json(this.#embeddings(v.parse(EmbeddingRequest, body)));
      default:
        return fault(404, "not_found_error", "no such path");
    }
  }

  #models(): unknown {
    return { object: "list", data: [{ id: this.#settings.model, object: "model", created: 0, owned_by: "sim" }] };
  }

  #embeddings({ input }: v.InferOutput<typeof EmbeddingRequest>): unknown {
    const texts = typeof input === "string" ? [input] : input;
    const prompt_tokens = texts.reduce((sum, text) => sum + countTokens(text), 0);
    const data = texts.map((text, index) => ({ object: "embedding", index, embedding: embed(text, EMBEDDING_SIZE) }));
    return { object: "list", model: this.#settings.model, data, usage: { prompt_tokens, total_tokens: prompt_tokens } };
  }

  async #generate(job: Job, signal: AbortSignal): Promise<Response> {
    await this.#turn(signal);
    this.#counters.requests += 1;
    this.#counters.prompt_tokens += countTokens(job.prompt);
    if (job.stream) {
      return new Response(this.#stream(job, signal), { headers: { "content-type": "text/event-stream", "cache-control": "no-cache" } });
    }
    try {
      for (let index = 0; index < job.tokens.length; index += 1) await this.#token(signal);
      return json(wholeAnswer(job));
    } finally {
      this.#leave(signal.aborted);
    }
  }

  #stream(job: Job, signal: AbortSignal): ReadableStream<Uint8Array> {
    const encoder = new TextEncoder();
    const event = (document: unknown) => encoder.encode(`data: ${JSON.stringify(document)}\n\n`);
    let index = 0;
    let done = false;
    const gone = new AbortController();
    const either = AbortSignal.any([signal, gone.signal]);
    const finish = (cancelled: boolean) => {
      if (!done) this.#leave(cancelled);
      done = true;
    };
    return new ReadableStream({
      pull: async (controller) => {
        try {
          if (index < job.tokens.length) {
            await this.#token(either);
            controller.enqueue(event(tokenEvent(job, index)));
            index += 1;
            return;
          }
          for (const document of lastEvents(job)) controller.enqueue(event(document));
          controller.enqueue(encoder.encode("data: [DONE]\n\n"));
          controller.close();
          finish(false);
        } catch {
          finish(true);
          controller.error(new Error("the client is gone"));
        }
      },
      cancel: () => {
        gone.abort();
        finish(true);
      },
    });
  }

  /** Takes the time of one token; throws when the client is gone. */
  async #token(signal: AbortSignal): Promise<void> {
    await sleep(1_000 / this.#settings.tokens_per_second, undefined, { signal });
    this.#counters.generated_tokens += 1;
    const limit = this.#settings.crash_after_tokens;
    if (limit > 0 && this.#counters.generated_tokens >= limit) {
      console.error(`told to crash after ${limit} tokens`);
      process.exit(1);
    }
  }

  /** Waits for a place among those that run; throws when the client is gone before it has one. */
  async #turn(signal: AbortSignal): Promise<void> {
    if (this.#counters.running >= this.#settings.parallel) await this.#wait(signal);
    else this.#counters.running += 1;
  }

  async #wait(signal: AbortSignal): Promise<void> {
    this.#counters.waiting += 1;
    try {
      // Who leaves hands its place to who is called here, so the number of those that run stays.
      await new Promise<void>((resolve, reject) => {
        this.#queue.push(resolve);
        signal.addEventListener("abort", () => {
          const place = this.#queue.indexOf(resolve);
          if (place < 0) return;
          this.#queue.splice(place, 1);
          this.#counters.cancelled += 1;
          reject(new Error("the client is gone"));
        });
      });
    } finally {
      this.#counters.waiting -= 1;
    }
  }

  #leave(cancelled: boolean): void {
    if (cancelled) this.#counters.cancelled += 1;
    const next = this.#queue.shift();
    if (next) next();
    else this.#counters.running -= 1;
  }

  #metrics(): string {
    const { running, waiting, prompt_tokens, generated_tokens, requests, cancelled } = this.#counters;
    const lines: readonly [string, string, number][] = [
      ["requests_running", "gauge", running],
      ["requests_waiting", "gauge", waiting],
      ["prompt_tokens_total", "counter", prompt_tokens],
      ["generated_tokens_total", "counter", generated_tokens],
      ["requests_total", "counter", requests],
      ["cancelled_total", "counter", cancelled],
    ];
    return lines.map(([name, kind, value]) => `# TYPE sim:${name} ${kind}\nsim:${name} ${value}\n`).join("");
  }
}
