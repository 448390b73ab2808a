/**
 * cli/ctl/ holds the commands that ask a server through its admin API: one file per subject. Each reads flags, asks,
 * and prints; none knows how the server works, and `-o json` prints its documents as they came.
 */
import { makeAdminClient, type AdminClient } from "../admin-client.ts";
import { chooseContext, contextPath, readContexts } from "../context.ts";
import type { FlagSpecs, Io } from "../spec.ts";

/** Flags of every command that asks a server. */
export const reachFlags = {
  context: { type: "string", value: "NAME", about: "the fleet to ask; the current one when absent ($LLMGW_CONTEXT)" },
  config: { type: "string", value: "FILE", about: "the file of contexts ($LLMGW_CONFIG)" },
} as const satisfies FlagSpecs;

/** Flag of every command that changes something. */
export const dryRunFlag = { type: "boolean", about: "say what would be done, and do nothing" } as const;

export interface ReachFlags {
  readonly context: string | undefined;
  readonly config: string | undefined;
}

/** The client of the context that flags, environment and file choose. */
export async function reach(flags: ReachFlags, io: Io): Promise<AdminClient> {
  const path = contextPath(flags.config, io);
  return makeAdminClient(chooseContext(await readContexts(path), flags.context, io.env, path));
}
