import { IB_QUERY_MS } from "../protocol/limits.ts";
import { runTool } from "./tool.ts";
import type { RunTool, ToolAnswer } from "./tool.ts";

/** One subnet manager a port's fabric has. */
export interface SubnetManager {
  /** GUID of the port it serves from: what fabrics are told apart by. */
  readonly guid: string;
  readonly state: "master" | "standby" | "discovering" | "not active";
  readonly priority: number | null;
}

/** What asking a port's subnet managers gave. A query that failed says nothing about which fabric the port is on. */
export type ManagerAnswer =
  | { readonly managers: readonly SubnetManager[]; readonly source: string }
  | { readonly unknown: "no tools" | "not allowed" | "no answer"; readonly why: string; readonly source: string };

const STATES: readonly SubnetManager["state"][] = ["not active", "discovering", "standby", "master"];

/** A GUID as `0x` and 16 lower-case hex digits. */
function guidOf(text: string): string {
  return `0x${text.toLowerCase().replace(/^0x/, "").padStart(16, "0")}`;
}

/** Reads `saquery SMIR`: one block per manager, values behind dots. */
export function parseSaquery(output: string): SubnetManager[] {
  const blocks = output.split(/SMInfoRecord dump|^\s*$/m);
  return blocks.flatMap((block) => {
    const value = (name: string) => new RegExp(`^\\s*${name}\\.+(\\S+)`, "m").exec(block)?.[1];
    const guid = value("GUID");
    if (guid === undefined || !/^0x[0-9a-fA-F]{1,16}$/.test(guid) || /^0x0+$/.test(guid)) return [];
    return [{ guid: guidOf(guid), state: STATES[Number(value("SMState"))] ?? "not active", priority: numberOf(value("Priority")) }];
  });
}

/** Reads `sminfo`: the one manager the port points at. Null when there is none in it. */
export function parseSminfo(output: string): SubnetManager | null {
  const found = /sm guid (0x[0-9a-fA-F]{1,16}),.*?priority (\d+) state (\d)/.exec(output);
  if (!found?.[1] || /^0x0+$/.test(found[1])) return null;
  return { guid: guidOf(found[1]), state: STATES[Number(found[3])] ?? "not active", priority: numberOf(found[2]) };
}

function numberOf(text: string | undefined): number | null {
  return text === undefined || Number.isNaN(Number(text)) ? null : Number(text);
}

/** Reads the switches in `ibnetdiscover`: their GUIDs, which no change of subnet manager changes. */
export function parseSwitches(output: string): string[] {
  const found = [...output.matchAll(/^(?:switchguid=(0x[0-9a-fA-F]+)|Switch\s+\d+\s+"S-([0-9a-fA-F]+)")/gm)];
  return [...new Set(found.map(([, named, drawn]) => guidOf(named ?? drawn ?? "")))].toSorted();
}

const failure = (answer: ToolAnswer) =>
  "failed" in answer ? answer.why : `${answer.err} ${answer.out}`.trim().split("\n").at(-1)?.slice(0, 200) || `exit code ${answer.code}`;

/**
 * Asks which subnet managers a port's fabric has: `saquery` names all of them, `sminfo` the one in charge. Device and port are always
 * named, or the tools would take the first active port of any adapter.
 */
export async function askManagers(device: string, port: number, run: RunTool = runTool): Promise<ManagerAnswer> {
  const where = ["-C", device, "-P", String(port)] as const;
  const source = `saquery ${where.join(" ")} SMIR`;
  const all = await run(["saquery", ...where, "SMIR"], IB_QUERY_MS);
  if ("code" in all && all.code === 0) {
    const managers = parseSaquery(all.out);
    if (managers.length > 0) return { managers, source };
  }
  const one = await run(["sminfo", ...where], IB_QUERY_MS);
  if ("code" in one && one.code === 0) {
    const manager = parseSminfo(one.out);
    if (manager) return { managers: [manager], source: `sminfo ${where.join(" ")}` };
  }
  if ("failed" in all && "failed" in one && all.failed === "missing" && one.failed === "missing")
    return { unknown: "no tools", why: "neither saquery nor sminfo is in PATH (package infiniband-diags)", source };
  const words = [all, one].map((answer) => ("code" in answer ? answer.err + answer.out : "")).join("\n");
  if (/Permission denied|umad.*(EACCES|not permitted)/i.test(words)) return { unknown: "not allowed", why: failure(all), source };
  return { unknown: "no answer", why: failure("failed" in all && all.failed === "missing" ? one : all), source };
}

/** Asks which switches a port's fabric has. Null when it cannot be told. Works without any subnet manager. */
export async function askSwitches(device: string, port: number, run: RunTool = runTool): Promise<string[] | null> {
  const answer = await run(["ibnetdiscover", "-C", device, "-P", String(port)], IB_QUERY_MS);
  if (!("code" in answer) || answer.code !== 0) return null;
  const switches = parseSwitches(answer.out);
  return switches.length > 0 ? switches : null;
}
