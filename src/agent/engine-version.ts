import { access, constants } from "node:fs/promises";
import type { Engine } from "../engines/engine.ts";
import { messageOf } from "../protocol/errors.ts";
import { ENGINE_VERSION_MS } from "../protocol/limits.ts";

/** Output of a program that has ended must be read within this time, in ms. */
const OUTPUT_MS = 1_000;

/** Runs an engine for its version. @returns the version, or why it does not run here */
export async function versionOf(engine: Engine, path: string): Promise<{ version: string } | { reason: string }> {
  try {
    await access(path, constants.X_OK);
  } catch (error) {
    return { reason: `cannot be run: ${messageOf(error)}` };
  }
  let child;
  try {
    child = Bun.spawn([path, ...engine.version_args], {
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
      timeout: ENGINE_VERSION_MS,
      killSignal: "SIGKILL",
    });
  } catch (error) {
    return { reason: `cannot be started: ${messageOf(error)}` };
  }
  const said = Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  const code = await child.exited;
  // What it left running may hold its output open for ever.
  const [out, err] = await Promise.race([said, Bun.sleep(OUTPUT_MS).then(() => ["", ""] as const)]);
  const output = `${out}\n${err}`;
  if (child.signalCode === "SIGILL") return { reason: "it died of an illegal instruction: this CPU lacks what the build needs" };
  if (child.signalCode === "SIGKILL") return { reason: `it did not print its version within ${ENGINE_VERSION_MS / 1_000} s` };
  const last = output.trim().split("\n").at(-1)?.slice(0, 300) ?? "";
  if (code !== 0) return { reason: `${engine.version_args.join(" ")} ended with ${child.signalCode ?? `code ${code}`}: ${last}` };
  const version = engine.readVersion(output);
  return version === null
    ? { reason: `${engine.version_args.join(" ")} does not print a version of ${engine.kind}: ${last}` }
    : { version };
}
