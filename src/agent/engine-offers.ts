import { access, constants } from "node:fs/promises";
import type { Engine } from "../engines/engine.ts";
import { ENGINES } from "../engines/registry.ts";
import { messageOf } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { EngineOffer } from "../protocol/inventory.ts";
import { ENGINE_VERSION_MS } from "../protocol/limits.ts";
import { VERSION } from "../protocol/version.ts";

/** Output of a program that has ended must be read within this time, in ms. */
const OUTPUT_MS = 1_000;

/** Engines the operator gave by path. */
export type EnginePaths = { readonly [K in EngineKind]?: string | undefined };

/** Looks which engines this node can run. An engine that does not even print its version is not offered. */
export async function discoverEngines(paths: EnginePaths): Promise<EngineOffer[]> {
  const offers = await Promise.all(ENGINES.map((engine) => offerOf(engine, paths[engine.kind])));
  return offers.filter((offer) => offer !== null);
}

async function offerOf(engine: Engine, path: string | undefined): Promise<EngineOffer | null> {
  const { kind } = engine;
  if (kind === "sim") return { kind, version: VERSION, path: "built in", origin: "built in", offered: true, reason: "" };
  if (path === undefined) return null;
  const offer = { kind, path, origin: "path" as const };
  const seen = await versionOf(engine, path);
  if ("reason" in seen) return { ...offer, version: "", offered: false, reason: seen.reason };
  return { ...offer, version: seen.version, offered: true, reason: "" };
}

async function versionOf(engine: Engine, path: string): Promise<{ version: string } | { reason: string }> {
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
