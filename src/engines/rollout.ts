import type { EngineCheck } from "../protocol/engine-check.ts";

/** One program of an engine on a node, after it was proved and checked. */
export interface Candidate {
  readonly version: string;
  readonly path: string;
  /** `path`: an operator named it; `installed`: llmgw put it there. */
  readonly origin: "installed" | "path";
  /** Why it may not be used, in a sentence; "" when it may. */
  readonly fault: string;
}

export interface Choice {
  /** The program that new replicas start; null when the node has none. */
  readonly use: Candidate | null;
  /** Why it is not what was asked for; "" when it is. */
  readonly reason: string;
}

/** What a failed check says against an engine, in a sentence; "" when it passed. */
export function faultOf({ passed, trial, warnings, flags, help }: EngineCheck): string {
  if (passed) return "";
  if (trial) return `it does not take its arguments: ${trial}`;
  const bad = flags.filter(({ verdict }) => verdict !== "accepted" && verdict !== "deprecated");
  if (help !== "whole" && bad.every(({ verdict }) => verdict === "unproved")) return `its help proves nothing: ${warnings.join("; ")}`;
  return `it does not take ${bad.map(({ flag, text }) => (text === "" ? flag : `${flag} (${text})`)).join(", ")}`;
}

/**
 * Which program of an engine a node uses: the installed one of the wanted version when it passed; while that is not there or
 * has a fault, the installed one that was used last, else another that passed, and at last one named by path. With no version
 * wanted, the one named by path.
 * @param wanted the version the server names; "" = it leaves this engine to the node
 * @param last the version that was used until now; null = none
 * @param candidates newest first
 */
export function chooseProgram(candidates: readonly Candidate[], wanted: string, last: string | null): Choice {
  const named = candidates.find(({ origin }) => origin === "path");
  if (wanted === "")
    return { use: named?.fault === "" ? named : null, reason: named?.fault ?? "no version is wanted, and none is named by path" };
  const installed = candidates.filter(({ origin }) => origin === "installed");
  const meant = installed.find(({ version }) => version === wanted);
  if (meant?.fault === "") return { use: meant, reason: named ? `the installed one is used, and not ${named.path}` : "" };
  const why = meant ? `${wanted} is installed but not used: ${meant.fault}` : `${wanted} is not installed`;
  const good = [...installed, ...(named ? [named] : [])].filter(({ fault }) => fault === "");
  const use = good.find(({ version, origin }) => origin === "installed" && version === last) ?? good[0] ?? null;
  return { use, reason: use === null ? why : `${why}; ${use.version} stays in use` };
}
