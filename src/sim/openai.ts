import * as v from "valibot";
import { answerTokens, countTokens } from "./text.ts";

const Content = v.union([v.string(), v.null(), v.array(v.looseObject({ text: v.optional(v.string()) }))]);
const Common = {
  model: v.optional(v.string()),
  stream: v.optional(v.nullable(v.boolean()), false),
  stream_options: v.optional(v.nullable(v.looseObject({ include_usage: v.optional(v.boolean()) }))),
  max_tokens: v.optional(v.nullable(v.pipe(v.number(), v.integer(), v.minValue(1)))),
};
export const ChatRequest = v.looseObject({
  ...Common,
  messages: v.array(v.looseObject({ role: v.string(), content: v.optional(Content) })),
  max_completion_tokens: v.optional(v.nullable(v.pipe(v.number(), v.integer(), v.minValue(1)))),
});
export const CompletionRequest = v.looseObject({ ...Common, prompt: v.union([v.string(), v.array(v.string())]) });
export const EmbeddingRequest = v.looseObject({ model: v.optional(v.string()), input: v.union([v.string(), v.array(v.string())]) });

/** What one request asks for, whichever of the two surfaces it came by. */
export interface Job {
  readonly chat: boolean;
  readonly prompt: string;
  readonly tokens: readonly string[];
  readonly stream: boolean;
  readonly include_usage: boolean;
  readonly limited: boolean;
  readonly id: string;
  readonly model: string;
  readonly created_s: number;
}

type Shape = { readonly id: string; readonly model: string; readonly created_s: number; readonly tokens: number };

function textOf(content: v.InferOutput<typeof Content> | undefined): string {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? "").join("");
}

/** The job of a chat request. */
export function chatJob(request: v.InferOutput<typeof ChatRequest>, shape: Shape): Job {
  const prompt = request.messages.map((message) => `${message.role}: ${textOf(message.content)}`).join("\n");
  return job(true, prompt, request, request.max_completion_tokens ?? request.max_tokens ?? null, shape);
}

/** The job of a plain completion. */
export function completionJob(request: v.InferOutput<typeof CompletionRequest>, shape: Shape): Job {
  const prompt = typeof request.prompt === "string" ? request.prompt : request.prompt.join("\n");
  return job(false, prompt, request, request.max_tokens ?? null, shape);
}

function job(
  chat: boolean,
  prompt: string,
  request: {
    readonly stream?: boolean | null;
    readonly stream_options?: { readonly include_usage?: boolean | undefined } | null | undefined;
  },
  limit: number | null,
  { id, model, created_s, tokens }: Shape,
): Job {
  const count = limit === null ? tokens : Math.min(limit, tokens);
  return {
    chat,
    prompt,
    tokens: answerTokens(prompt, count),
    stream: request.stream === true,
    include_usage: request.stream_options?.include_usage === true,
    limited: limit !== null && limit < tokens,
    id: `${chat ? "chatcmpl" : "cmpl"}-${id}`,
    model,
    created_s,
  };
}

const head = (it: Job, object: string) => ({ id: it.id, object, created: it.created_s, model: it.model });

function usage(it: Job) {
  const prompt_tokens = countTokens(it.prompt);
  return { prompt_tokens, completion_tokens: it.tokens.length, total_tokens: prompt_tokens + it.tokens.length };
}

/** The whole answer of a request that does not stream. */
export function wholeAnswer(it: Job): unknown {
  const text = it.tokens.join("");
  const finish_reason = it.limited ? "length" : "stop";
  const choice = it.chat
    ? { index: 0, message: { role: "assistant", content: text }, finish_reason }
    : { index: 0, text, finish_reason, logprobs: null };
  return { ...head(it, it.chat ? "chat.completion" : "text_completion"), choices: [choice], usage: usage(it) };
}

/** One token of a stream as the document of its event. */
export function tokenEvent(it: Job, index: number): unknown {
  const content = it.tokens[index] ?? "";
  const delta = index === 0 ? { role: "assistant", content } : { content };
  const choice = it.chat ? { index: 0, delta, finish_reason: null } : { index: 0, text: content, finish_reason: null, logprobs: null };
  return { ...head(it, it.chat ? "chat.completion.chunk" : "text_completion"), choices: [choice] };
}

/** The documents that end a stream, before `[DONE]`. */
export function lastEvents(it: Job): unknown[] {
  const finish_reason = it.limited ? "length" : "stop";
  const object = it.chat ? "chat.completion.chunk" : "text_completion";
  const choice = it.chat ? { index: 0, delta: {}, finish_reason } : { index: 0, text: "", finish_reason, logprobs: null };
  const finish = { ...head(it, object), choices: [choice] };
  return it.include_usage ? [finish, { ...head(it, object), choices: [], usage: usage(it) }] : [finish];
}
