import * as v from "valibot";

const Usage = v.object({ prompt_tokens: v.optional(v.number(), 0), completion_tokens: v.optional(v.number(), 0) });
export type Usage = v.InferOutput<typeof Usage>;
const WithUsage = v.pipe(v.string(), v.parseJson(), v.object({ usage: Usage }));

const USAGE = Buffer.from('"usage"');
const LINE_END = 10;

/** Longest line of a stream that is looked at; a longer one cannot be the usage. */
const LINE_CHARACTERS = 65_536;

/** The usage in a whole JSON answer, or null. */
export function usageOf(document: string): Usage | null {
  const read = v.safeParse(WithUsage, document);
  return read.success ? read.output.usage : null;
}

/** Reads the usage out of a stream of server-sent events as it passes; the last one counts. */
export class UsageReader {
  readonly #decoder = new TextDecoder();
  #rest = "";
  usage: Usage | null = null;

  take(chunk: Uint8Array): void {
    // Nearly every piece is whole lines without a usage: those are not even decoded.
    const bytes = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
    if (this.#rest === "" && bytes.at(-1) === LINE_END && !bytes.includes(USAGE)) return;
    const lines = (this.#rest + this.#decoder.decode(chunk, { stream: true })).split("\n");
    this.#rest = (lines.pop() ?? "").slice(0, LINE_CHARACTERS);
    for (const line of lines) {
      if (line.startsWith("data:") && line.includes('"usage"')) this.usage = usageOf(line.slice(5).trim()) ?? this.usage;
    }
  }
}
