import { setTimeout as sleep } from "node:timers/promises";
import * as v from "valibot";
import { messageOf, OperatorError } from "../../protocol/errors.ts";
import { DEMO_ANSWER_MS, DEMO_POLL_MS } from "../../protocol/limits.ts";

const Answer = v.object({ choices: v.tupleWithRest([v.object({ message: v.object({ content: v.nullish(v.string()) }) })], v.unknown()) });

export interface Question {
  readonly endpoint: string;
  readonly key: string;
  readonly model: string;
  readonly text: string;
}

const body = ({ model, text }: Question) => ({ model, max_tokens: 48, messages: [{ role: "user", content: text }] });

/** The same question as a line for a shell. */
export function curlLine(question: Question): string {
  return [
    `curl ${question.endpoint}/v1/chat/completions \\`,
    `  -H 'Authorization: Bearer ${question.key}' -H 'Content-Type: application/json' \\`,
    `  -d '${JSON.stringify(body(question)).replaceAll("'", String.raw`'\''`)}'`,
  ].join("\n");
}

async function askOnce(question: Question): Promise<Response | string> {
  try {
    const response = await fetch(`${question.endpoint}/v1/chat/completions`, {
      method: "POST",
      headers: { authorization: `Bearer ${question.key}`, "content-type": "application/json" },
      body: JSON.stringify(body(question)),
      signal: AbortSignal.timeout(DEMO_ANSWER_MS),
    });
    return response.ok ? response : `${response.status}: ${(await response.text()).slice(0, 500)}`;
  } catch (error) {
    return messageOf(error);
  }
}

/**
 * Asks through the gateway as any client would, and returns the answer's text.
 * The key and the routes reach the gateway a moment after the server knows them, so early refusals are tried again.
 * @throws OperatorError E_UNREACHABLE with the gateway's last words
 */
export async function askQuestion(question: Question): Promise<string> {
  const end_ms = performance.now() + DEMO_ANSWER_MS;
  for (;;) {
    const answer = await askOnce(question);
    if (typeof answer !== "string") {
      const parsed = v.safeParse(Answer, await answer.json().catch(() => null));
      if (parsed.success) return parsed.output.choices[0].message.content ?? "";
      throw new OperatorError("E_BAD_REQUEST", "the answer is not one of the OpenAI API", "it has no choices", "llmgw ctl logs REPLICA");
    }
    if (performance.now() > end_ms)
      throw new OperatorError("E_UNREACHABLE", "the gateway did not answer", answer, "run it again with --keep DIR and see DIR/logs");
    await sleep(DEMO_POLL_MS);
  }
}
