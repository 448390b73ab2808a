/**
 * Asks for something secret on the terminal, without showing it.
 * @returns null when there is no terminal to ask on
 */
export async function askSecret(question: string): Promise<string | null> {
  const { stdin } = process;
  if (!stdin.isTTY) return null;
  process.stderr.write(question);
  stdin.setRawMode(true);
  let text = "";
  try {
    for await (const chunk of stdin as AsyncIterable<Buffer>) {
      for (const character of chunk.toString("utf8")) {
        if (character === "\r" || character === "\n") return text;
        if (character === "\u0003") process.exit(130);
        text = character === "\u007f" ? text.slice(0, -1) : text + character;
      }
    }
    return text;
  } finally {
    stdin.setRawMode(false);
    stdin.pause();
    process.stderr.write("\n");
  }
}
