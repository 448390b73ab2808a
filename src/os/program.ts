import { resolve } from "node:path";

/** The command that starts this very program again: the binary itself, or Bun with the entry file. */
export function ownProgram(): [string, ...string[]] {
  if (Bun.isStandaloneExecutable) return [process.execPath];
  return [process.execPath, resolve(import.meta.dir, "..", "main.ts")];
}
