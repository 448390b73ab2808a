/** Simulated models for tests, and what they answer. */
import type { CatalogEntry, Fleet } from "./fleet.ts";

/** A model that answers slowly enough to be disturbed while it does. */
export const SLOW_SIM = { engine: "sim", args: { "tokens-per-second": 20, tokens: 200 } } as const satisfies Omit<CatalogEntry, "name">;

/** Tokens of a stream through a test: some 10 s of {@link SLOW_SIM}. */
export const SLOW_TOKENS = 200;

/** The text the same question gets when nothing disturbs it. */
export async function wholeText(fleet: Fleet, key: string, model: string): Promise<string> {
  const response = await fetch(`${fleet.gateway}/v1/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify({ model, max_tokens: SLOW_TOKENS, messages: [{ role: "user", content: "count for a long time" }] }),
  });
  const answer = (await response.json()) as { choices: [{ message: { content: string } }] };
  return answer.choices[0].message.content;
}
