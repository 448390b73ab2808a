/**
 * Between an agent and its shims, over each shim's unix socket (mode 0600, HTTP/1.1). A shim accepts the
 * previous protocol number too, because it outlives the agent.
 *
 *   GET  /status?after=<revision>   ShimStatus   held up to BLOCKING_QUERY_MS while the revision is the same
 *   GET  /spec                      ShimSpec     what it was started with, for an agent that has lost its folder
 *   POST /stop                      StopRequest -> {}      answers at once; /status tells the rest
 *   POST /trust                     ShimTrust   -> {}      reload the certificate, take new revocations
 *   GET  /log?lines=N               text/plain
 *
 * At its mutual TLS door a shim serves roles gateway and server only:
 *   /llmgw/log?lines=N&follow=1     text/plain, role server
 *   /llmgw/alive                    204, whatever the engine does
 *   everything else                 forwarded to the engine, role gateway or server, with ATTEMPT_HEADER
 */
import * as v from "valibot";
import { RankExit, RANK_PHASES } from "./agent-api.ts";
import { AttemptId, Count, TimeMs } from "./ids.ts";
import { ENGINE_STUCK_MS } from "./limits.ts";
import { RankLaunch, Revocation } from "./plan.ts";

/** Where a door says that it is there. */
export const ALIVE_PATH = "/llmgw/alive";
/** Where a door shows what its engine printed. */
export const LOG_PATH = "/llmgw/log";

/** Files of an attempt's folder: what the agent wrote to start it, what the shim left when it had ended, what the shim said. */
export const SPEC_FILE = "spec.json";
export const EXIT_FILE = "exit.json";
export const SHIM_LOG_FILE = "shim.log";

/** Names the attempt a caller means; a shim of another attempt answers 421. */
export const ATTEMPT_HEADER = "x-llmgw-attempt";

/** On answers that are the door's own and not the engine's: why the request was not passed on. */
export const DOOR_REFUSED_HEADER = "x-llmgw-refused";
/** Why a door refuses. Only with `engine-closed` can the engine have seen the request. */
const DOOR_REFUSALS = ["other-attempt", "not-allowed", "not-ready", "engine-closed"] as const;
export type DoorRefusal = (typeof DOOR_REFUSALS)[number];

/** The file `spec.json` (0600) an agent writes for a shim before it starts it: `llmgw shim --spec FILE`. */
export const ShimSpec = v.object({
  protocol: Count,
  node: v.string(),
  launch: RankLaunch,
  /** Absolute path of the engine's program; "" for the built-in one. */
  engine_path: v.string(),
  /** Version of that program, for whoever asks what a running rank was started with. */
  engine_version: v.optional(v.string()),
  /** Absolute path of the weights on this node, or null. */
  weights_path: v.nullable(v.string()),
  /** The attempt's folder: log files, exit.json. */
  folder: v.string(),
  /** The shim's control socket and the engine's own, both short. */
  control_socket: v.string(),
  engine_socket: v.string(),
  tls: v.object({ ca: v.string(), cert: v.string(), key: v.string() }),
  revocations: v.array(Revocation),
  /** Where the engine keeps what it compiles; a folder beside its log when absent. */
  cache_folder: v.optional(v.string()),
  /** A ready engine that owes answers and gets on with none for this long is stuck. */
  stuck_ms: v.optional(Count, ENGINE_STUCK_MS),
  /** User the engine runs as; null = the shim's own. */
  engine_user: v.nullable(v.string()),
  /** When this process is gone the shim ends its rank; null = never. */
  owner_pid: v.nullable(Count),
});
export type ShimSpec = v.InferOutput<typeof ShimSpec>;
export type WrittenShimSpec = v.InferInput<typeof ShimSpec>;

export const ShimStatus = v.object({
  protocol: Count,
  attempt: AttemptId,
  revision: Count,
  pid: Count,
  phase: v.picklist(RANK_PHASES),
  since_ms: TimeMs,
  detail: v.string(),
  engine_pid: v.nullable(Count),
  progress: v.nullable(v.object({ done: Count, total: v.nullable(Count) })),
  exit: v.nullable(RankExit),
});
export type ShimStatus = v.InferOutput<typeof ShimStatus>;

export const StopRequest = v.object({ reason: v.string() });
export const ShimTrust = v.object({ revocations: v.array(Revocation) });
export type ShimTrust = v.InferOutput<typeof ShimTrust>;
