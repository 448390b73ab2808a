import { messageOf } from "../protocol/errors.ts";
import type { CheckResult, DoctorReport } from "../protocol/doctor.ts";
import { CHECK_MS } from "../protocol/limits.ts";
import { VERSION } from "../protocol/version.ts";
import { unknown } from "./check.ts";
import type { Check } from "./check.ts";
import { CHECKS } from "./checks.ts";
import { Machine } from "./machine.ts";
import type { DoctorOptions } from "./machine.ts";

/** Runs every check, side by side. One that hangs or breaks is unknown and stops no other. */
export async function runDoctor(options: DoctorOptions, checks: readonly Check[] = CHECKS, deadline_ms = CHECK_MS): Promise<DoctorReport> {
  const machine = new Machine(options);
  return { version: VERSION, node: options.node, checks: await Promise.all(checks.map((check) => runCheck(check, machine, deadline_ms))) };
}

async function runCheck(check: Check, machine: Machine, deadline_ms: number): Promise<CheckResult> {
  const { id, title } = check;
  const { promise: late, resolve } = Promise.withResolvers<null>();
  const timer = setTimeout(() => resolve(null), deadline_ms);
  try {
    const finding = await Promise.race([check.run(machine), late]);
    return { id, title, ...(finding ?? unknown(`it did not end within ${deadline_ms / 1_000} s`, "", "see what hangs: ps, dmesg")) };
  } catch (error) {
    return { id, title, ...unknown(`it could not be checked: ${messageOf(error)}`, "") };
  } finally {
    clearTimeout(timer);
  }
}

/** The exit code: 1 when a check failed, or, when `strict`, warned. */
export function exitOf(report: DoctorReport, strict: boolean): 0 | 1 {
  return report.checks.some(({ verdict }) => verdict === "fail" || (strict && verdict === "warn")) ? 1 : 0;
}
