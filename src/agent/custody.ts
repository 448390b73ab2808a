import { closeSync, openSync } from "node:fs";
import { join } from "node:path";
import { spawnDetached, sweepAttempt } from "../os/process.ts";
import { hasSystemd, killService, startService } from "../os/systemd.ts";
import type { AgentConfig } from "../protocol/config.ts";
import { RANK_SWEEP_MS } from "../protocol/limits.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { SHIM_LOG_FILE } from "../protocol/shim-api.ts";

/** Where a shim and its engine live, apart from the agent that started them. */
export interface Custody {
  readonly kind: "systemd" | "session";
  /**
   * Starts a shim; its output goes to `shim.log` in the folder of its rank.
   * @returns its process id
   * @throws OperatorError E_SYSTEMD, or Error when it cannot be started
   */
  start(launch: RankLaunch, argv: readonly [string, ...string[]], folder: string): Promise<number>;
  /** Kills what a dead shim left. @returns those processes that would not end */
  clear(attempt: string): Promise<number[]>;
}

/** A session of their own, and a mark in their environment by which they are found wherever they went. */
const session: Custody = {
  kind: "session",
  start: async (_launch, argv, folder) => {
    const log = openSync(join(folder, SHIM_LOG_FILE), "a", 0o600);
    try {
      return await spawnDetached(argv, process.env, log);
    } finally {
      closeSync(log);
    }
  },
  clear: (attempt) => sweepAttempt(attempt, null, RANK_SWEEP_MS),
};

const unitOf = (attempt: string) => `llmgw-rank-${attempt}`;

/**
 * A service of systemd for each rank: its processes cannot leave its control group, it is accounted for by itself, and an
 * engine that runs out of memory takes nobody along.
 */
const systemd: Custody = {
  kind: "systemd",
  start: ({ attempt, replica, rank }, argv, folder) =>
    startService(
      {
        name: unitOf(attempt),
        slice: "llmgw.slice",
        description: `llmgw rank ${rank} of ${replica}`,
        argv,
        environment_file: join(folder, "environment"),
        log_file: join(folder, SHIM_LOG_FILE),
        properties: [
          // A machine that shuts down tells the shim, which ends its engine in the order that this engine needs.
          "KillMode=mixed",
          "TimeoutStopSec=30",
          "OOMPolicy=continue",
          "LimitMEMLOCK=infinity",
          "LimitNOFILE=1048576",
          "TasksMax=infinity",
        ],
      },
      process.env,
    ),
  clear: async (attempt) => {
    await killService(unitOf(attempt));
    return sweepAttempt(attempt, null, RANK_SWEEP_MS);
  },
};

/** @param owned whether what is started ends with another process, which systemd would not know of */
export function custodyOf(wanted: AgentConfig["custody"], owned: boolean): Custody {
  if (wanted === "systemd") return systemd;
  return wanted === "auto" && !owned && hasSystemd() ? systemd : session;
}
