import { writeSync } from "node:fs";
import { isatty } from "node:tty";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import type { Io } from "./spec.ts";

const STDOUT = 1;
const STDERR = 2;
const RETRY_MS = 1;

/**
 * Writes all of a text before it returns. `process.stdout` of Bun holds back what a slow pipe does not take, and
 * ending the process loses it (tried: 80 kB of 10 MB arrived), so llmgw writes to the descriptor itself.
 */
function writeAll(descriptor: number, text: string): void {
  let rest: Uint8Array = Buffer.from(text.endsWith("\n") ? text : `${text}\n`);
  while (rest.length > 0) {
    try {
      rest = rest.subarray(writeSync(descriptor, rest));
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      // A pipe that another program made non-blocking: its reader has to catch up.
      if (code === "EAGAIN") Bun.sleepSync(RETRY_MS);
      else if (descriptor === STDERR) return;
      // A reader that went away (`| head`) has all it wanted.
      else if (code === "EPIPE") process.exit(0);
      else throw new OperatorError("E_FILE", "cannot write to standard output", messageOf(error), "check the free space");
    }
  }
}

function mayColor(words: readonly string[], env: Io["env"]): boolean {
  if (words.includes("--no-color") || (env["NO_COLOR"] ?? "") !== "" || env["TERM"] === "dumb") return false;
  return isatty(STDOUT);
}

/** The process's own input and output. */
export function processIo(words: readonly string[]): Io {
  return {
    out: (text) => writeAll(STDOUT, text),
    err: (text) => writeAll(STDERR, text),
    isTerminal: isatty(STDOUT),
    isErrTerminal: isatty(STDERR),
    color: mayColor(words, process.env),
    env: process.env,
    cwd: process.cwd(),
  };
}
