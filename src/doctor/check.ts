/**
 * doctor/ checks whether a machine can be a node, before it joins and while it runs. Every check is a row of data that reads and judges;
 * none changes anything, and none needs another node.
 */
import type { CheckResult, Verdict } from "../protocol/doctor.ts";
import type { Machine } from "./machine.ts";

export type Finding = Pick<CheckResult, "verdict" | "found" | "source" | "remedy">;

export interface Check {
  /** Stable: `gpu.count`. Its first word is its section. */
  readonly id: string;
  readonly title: string;
  /** What goes wrong without it, for the reference page. */
  readonly why: string;
  /** What to do in general, for the reference page. */
  readonly remedy: string;
  run(machine: Machine): Promise<Finding>;
}

const say =
  (verdict: Verdict) =>
  (found: string, source: string, remedy = "") => ({ verdict, found, source, remedy });
export const pass: (found: string, source: string) => Finding = say("pass");
export const warn = say("warn");
export const fail = say("fail");
export const unknown = say("unknown");
export const skipped = (reason: string): Finding => ({ verdict: "skipped", found: reason, source: "", remedy: "" });

/** The worst of several findings of one kind: failures first, then warnings, then what could not be read. */
export function worstOf(findings: readonly Finding[]): Finding {
  const order: readonly Verdict[] = ["fail", "warn", "unknown", "pass", "skipped"];
  const verdict = order.find((each) => findings.some((finding) => finding.verdict === each)) ?? "skipped";
  const same = findings.filter((finding) => finding.verdict === verdict);
  const join = (part: keyof Finding, by: string) =>
    [...new Set(same.map((finding) => finding[part]).filter((text) => text !== ""))].join(by);
  return { verdict, found: join("found", "; "), source: join("source", ", "), remedy: join("remedy", "; ") };
}
