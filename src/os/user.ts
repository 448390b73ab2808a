import { existsSync } from "node:fs";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { USER_LOOKUP_MS } from "../protocol/limits.ts";
import { runProgram } from "./run-program.ts";

/** A user of this machine. */
export interface UnixUser {
  readonly name: string;
  readonly uid: number;
  readonly gid: number;
  /** "" when there is no such folder. */
  readonly home: string;
}

/** What getent ends with when it has asked everywhere and found nobody: getent(1). */
const NOBODY_FOUND = 2;

/**
 * Looks a user up as the system does; null when there is none of that name.
 * @throws OperatorError E_NODE when the system cannot say: that must not pass for "there is none"
 */
export async function userOf(name: string, within_ms = USER_LOOKUP_MS): Promise<UnixUser | null> {
  const asked = { env: process.env, cwd: "/", within_ms, max_bytes: 4_096 };
  const ran = await runProgram(["getent", "passwd", name], asked).catch((error: unknown) => messageOf(error));
  if (typeof ran !== "string" && ran.code === NOBODY_FOUND) return null;
  const [, , uid, gid, , home = ""] = typeof ran === "string" ? [] : ran.out.trim().split(":");
  if (typeof ran !== "string" && ran.code === 0 && uid !== undefined && gid !== undefined)
    return { name, uid: Number(uid), gid: Number(gid), home: existsSync(home) ? home : "" };
  const why = typeof ran === "string" ? ran : ran.late ? `no answer within ${within_ms / 1_000} s` : `it ended with ${ran.code}`;
  throw new OperatorError("E_NODE", `cannot look up the user ${name}`, `getent passwd: ${why}`, "see to the machine's user directory");
}
