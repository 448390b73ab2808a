/** A streamed chat as a test sees it: every event, and how it ended. */
import type { Fleet } from "./fleet.ts";

export interface ChatEvent {
  readonly choices?: readonly { readonly delta?: { readonly content?: string | null }; readonly finish_reason?: string | null }[];
  readonly error?: { readonly message: string; readonly type?: string; readonly code?: string | null };
  readonly usage?: unknown;
}

export interface StreamEnd {
  readonly status: number;
  readonly events: readonly ChatEvent[];
  /** Whether the last event was `[DONE]`. */
  readonly done: boolean;
  /** The text of all deltas. */
  readonly text: string;
  /** What the connection threw, or null. */
  readonly broken: string | null;
  /** The whole answer when it was no stream. */
  readonly body: string;
}

export interface RunningStream {
  /** Content deltas so far. */
  readonly deltas: () => number;
  readonly end: Promise<StreamEnd>;
  readonly abort: () => void;
}

/** Starts a streamed chat. `tokens` is the most it may answer. */
export function streamChat(fleet: Fleet, key: string, model: string, tokens: number): RunningStream {
  const controller = new AbortController();
  const events: ChatEvent[] = [];
  let done = false;
  let deltas = 0;
  const take = (frame: string): void => {
    const data = frame
      .split("\n")
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5).trim())
      .join("\n");
    if (data === "[DONE]") done = true;
    else if (data) {
      const event = JSON.parse(data) as ChatEvent;
      events.push(event);
      if (event.choices?.[0]?.delta?.content) deltas++;
    }
  };
  const read = async (): Promise<StreamEnd> => {
    let status = 0;
    let broken: string | null = null;
    let rest = "";
    try {
      const response = await fetch(`${fleet.gateway}/v1/chat/completions`, {
        method: "POST",
        headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
        body: JSON.stringify({ model, stream: true, max_tokens: tokens, messages: [{ role: "user", content: "count for a long time" }] }),
        signal: controller.signal,
      });
      status = response.status;
      const decoder = new TextDecoder();
      for await (const bytes of response.body ?? []) {
        const frames = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
        rest = frames.pop() ?? "";
        if (status === 200) frames.forEach(take);
        else rest = [...frames, rest].join("\n\n");
      }
    } catch (error) {
      broken = String(error);
    }
    const text = events.map((event) => event.choices?.[0]?.delta?.content ?? "").join("");
    return { status, events, done, text, broken, body: rest };
  };
  return { deltas: () => deltas, end: read(), abort: () => controller.abort() };
}
