import type { GangSettings } from "./rendezvous.ts";

/** How a simulated engine behaves. Each is a flag of `llmgw sim-engine` and so a key of `args` in the catalog. */
export interface SimSettings {
  readonly socket: string;
  /** The name it answers to; a request for another one is refused. */
  readonly model: string;
  readonly tokens_per_second: number;
  /** Tokens of an answer when the request does not limit them. */
  readonly tokens: number;
  /** Requests served at once; more wait in order. */
  readonly parallel: number;
  readonly load_ms: number;
  readonly crash_at_load: boolean;
  /** Ends with exit code 1 once it has made this many tokens; 0 = never. */
  readonly crash_after_tokens: number;
  /** Answers no request once it is ready, with its socket open. */
  readonly hang: boolean;
  readonly ignore_sigterm: boolean;
  /** Memory it takes and keeps once it has loaded, in bytes. */
  readonly hold_memory: number;
  /** The gang this engine is a rank of; null = it is alone. */
  readonly gang: GangSettings | null;
  /** Ends with exit code 1 this long after the gang has met; 0 = never. Only ranks other than 0 do. */
  readonly lose_rank_after_ms: number;
}
