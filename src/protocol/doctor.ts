import * as v from "valibot";

/** `unknown`: it could not be read, which is neither good nor bad. `skipped`: it does not apply here. */
const VERDICTS = ["pass", "warn", "fail", "unknown", "skipped"] as const;
export type Verdict = (typeof VERDICTS)[number];

/** What one check of `llmgw doctor` found. */
export const CheckResult = v.object({
  id: v.string(),
  title: v.string(),
  verdict: v.picklist(VERDICTS),
  /** What was found, in words with numbers. */
  found: v.string(),
  /** The file or command it was read from. */
  source: v.string(),
  /** What to do; "" when there is nothing to do. */
  remedy: v.string(),
});
export type CheckResult = v.InferOutput<typeof CheckResult>;

/** What `llmgw doctor -o json` prints. */
export const DoctorReport = v.object({ version: v.string(), node: v.string(), checks: v.array(CheckResult) });
export type DoctorReport = v.InferOutput<typeof DoctorReport>;
