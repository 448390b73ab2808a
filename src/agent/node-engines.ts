import { join } from "node:path";
import type { NodeResult } from "../protocol/agent-api.ts";
import type { AgentConfig } from "../protocol/config.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { EngineQuestions } from "./engine-questions.ts";

/** Where the engine programs of a node are, and what they say of themselves. */
export class NodeEngines {
  readonly #config: AgentConfig;
  readonly #questions: EngineQuestions;
  /** Where engines keep what they compile. */
  readonly cache_folder: string;

  /** @param engine_user user engines run as; null = as the agent does */
  constructor(config: AgentConfig, engine_user: string | null) {
    this.#config = config;
    this.cache_folder = join(config.state, "cache");
    this.#questions = new EngineQuestions({ engine_user, folder: join(this.cache_folder, "help") });
  }

  /** An engine's program; "" for the built-in one, null when this node has none. */
  path(kind: EngineKind): string | null {
    return kind === "sim" ? "" : kind === "llamacpp" ? (this.#config.llamacpp_bin ?? null) : null;
  }

  /** Why an engine would refuse what it is to be started with, in a sentence; null when nothing is known to speak against it. */
  async refusal(launch: RankLaunch, weights_path: string | null): Promise<string | null> {
    const path = this.path(launch.engine);
    return path === null ? null : this.#questions.refusal(launch, path, weights_path);
  }

  /** Whether an engine takes every flag llmgw would ever give it. @throws OperatorError E_ENGINE */
  async check(kind: EngineKind): Promise<NodeResult> {
    const path = this.path(kind);
    if (path === null || path === "") return { error: path === null ? `it has no ${kind}` : `${kind} is part of llmgw itself` };
    return { check: await this.#questions.check(kind, path) };
  }
}
