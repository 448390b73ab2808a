import { LOG_TAIL_LINES_COUNT } from "../../protocol/limits.ts";
import { command } from "../frame.ts";
import { printable } from "../output.ts";
import type { Io } from "../spec.ts";
import { reach, reachFlags } from "./reach.ts";

/** Prints a stream of text line by line; what an engine writes must not steer a terminal. */
async function printLines(stream: ReadableStream<Uint8Array>, io: Io): Promise<void> {
  const say = (line: string) => io.out(io.isTerminal ? printable(line) : line);
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of stream) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) say(line);
  }
  rest += decoder.decode();
  if (rest) say(rest);
}

export const logsCommand = command({
  name: "logs",
  about: "Prints the last lines an engine wrote",
  examples: ["llmgw ctl logs qwen2.5-coder-7b-x4k2p", "llmgw ctl logs qwen2.5-coder-7b-x4k2p --follow"],
  flags: {
    ...reachFlags,
    lines: { type: "number", value: "N", about: "how many lines", default: 100, min: 1, max: LOG_TAIL_LINES_COUNT },
    rank: { type: "number", value: "R", about: "which rank of the replica", default: 0, min: 0 },
    follow: { type: "boolean", short: "f", about: "go on with new lines as they come" },
  },
  args: [{ name: "REPLICA", about: "the replica, from llmgw ctl replicas" }],
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const query = `lines=${flags.lines}&rank=${flags.rank}${flags.follow ? "&follow=1" : ""}`;
    await printLines(await client.text(`/admin/v1/replicas/${encodeURIComponent(args.REPLICA)}/log?${query}`), io);
  },
});
