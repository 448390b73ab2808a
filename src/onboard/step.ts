import type { Binary } from "./binary.ts";
import type { AgentKeys } from "./agent-config.ts";
import type { ControlPlane } from "./control-plane.ts";
import type { NodeFacts } from "./facts.ts";
import type { NodeShell } from "./node-shell.ts";

/** An engine the operator named by its place on the node, and how it is asked whether it runs. */
export interface NamedEngine {
  readonly kind: string;
  readonly argv: readonly [string, ...string[]];
}

/** A folder of this machine that the node gets a copy of, under the same path. */
export interface Copy {
  readonly folder: string;
}

/** What a machine is to become. */
export interface Job {
  readonly node: string;
  readonly address: string;
  readonly servers: readonly string[];
  readonly binary: Binary;
  /** Keys of agent.yaml. */
  readonly config: AgentKeys;
  readonly engines: readonly NamedEngine[];
  readonly copies: readonly Copy[];
  /** The authority's folder, and its certificate (PEM). */
  readonly ca_folder: string;
  readonly ca: string;
  /** The text of the agent's unit. */
  readonly unit: string;
  readonly renew: boolean;
}

/** What a step works with. */
export interface Work {
  readonly job: Job;
  readonly facts: NodeFacts;
  readonly shell: NodeShell;
  readonly servers: ControlPlane;
  /** The servers' clock before anything was changed. */
  readonly since_ms: number;
  /** Whether the agent was started anew. */
  readonly restarted: boolean;
  readonly say: (text: string) => void;
}

/** One thing a node needs. */
export interface Step {
  readonly name: string;
  /** Nothing waits for it: it goes on beside the later stages. */
  readonly aside?: boolean;
  /**
   * Why it has to be done; null when the machine has it already; undefined when it was not asked for. Decided from
   * facts alone.
   * @param due names of the earlier steps that have to be done
   */
  readonly need: (job: Job, facts: NodeFacts, due: ReadonlySet<string>) => Promise<string | null> | string | null | undefined;
  /** Makes it so and says what was done. Safe to do again, also after it was cut off in the middle. */
  readonly apply: (work: Work) => Promise<string>;
}

/** A step and why it is due; null = nothing to do. */
export interface Due {
  readonly step: Step;
  readonly why: string | null;
}

/** Which of the steps a machine needs. Steps of one stage do not wait for each other. */
export async function planSteps(stages: readonly (readonly Step[])[], job: Job, facts: NodeFacts): Promise<Due[][]> {
  const due = new Set<string>();
  const plan: Due[][] = [];
  for (const stage of stages) {
    const row = await Promise.all(stage.map(async (step) => ({ step, why: await step.need(job, facts, due) })));
    const asked = row.flatMap(({ step, why }) => (why === undefined ? [] : [{ step, why }]));
    for (const { step, why } of asked) if (why !== null) due.add(step.name);
    plan.push(asked);
  }
  return plan;
}
