import type { ModelSpec } from "../protocol/catalog.ts";
import type { EngineKind } from "../protocol/ids.ts";
import { argFaults } from "./args.ts";
import type { Engine } from "./engine.ts";
import { llamacpp } from "./llamacpp.ts";
import { sglang } from "./sglang.ts";
import { sim } from "./sim.ts";
import { vllm } from "./vllm.ts";

const BY_KIND: Readonly<Record<EngineKind, Engine>> = { llamacpp, vllm, sglang, sim };

/** Every engine. The only list of them. */
export const ENGINES: readonly Engine[] = Object.values(BY_KIND);

export const engineOf = (kind: EngineKind): Engine => BY_KIND[kind];

/** What is wrong with a model's `args` whatever version of its engine runs it, one sentence each. */
export function argFaultsOf({ name, engine, args, context, parallel }: ModelSpec): string[] {
  const entry = { args, context: context ?? null, parallel: parallel ?? null };
  return argFaults(engineOf(engine), entry).map((fault) => `model ${name}: ${fault}`);
}
