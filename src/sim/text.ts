const WORDS = (
  "the fleet answers while machines come and go and every token arrives in order from a node that was asked once " +
  "and a gateway that counts what it sends so that no request is lost when one engine stops and another one begins"
).split(" ");

/** A number from a text, the same each time (FNV-1a, 32 bits). */
function hash(text: string): number {
  let value = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) value = Math.imul(value ^ byte, 0x01000193) >>> 0;
  return value;
}

/** The answer to a prompt: `count` tokens, each a word with its blank before it but for the first. */
export function answerTokens(prompt: string, count: number): string[] {
  const start = hash(prompt) % WORDS.length;
  return Array.from({ length: count }, (_, index) => `${index === 0 ? "" : " "}${WORDS[(start + index * 7) % WORDS.length]}`);
}

/** How many tokens a text counts as: its words. */
export function countTokens(text: string): number {
  return text.split(/\s+/).filter((word) => word !== "").length;
}

/** A vector for a text: `size` numbers of length 1 together. */
export function embed(text: string, size: number): number[] {
  const raw = Array.from({ length: size }, (_, index) => hash(`${index}:${text}`) / 0xffffffff - 0.5);
  const length = Math.hypot(...raw) || 1;
  return raw.map((value) => value / length);
}
