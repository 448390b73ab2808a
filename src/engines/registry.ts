import { OperatorError } from "../protocol/errors.ts";
import type { EngineKind } from "../protocol/ids.ts";
import type { Engine } from "./engine.ts";
import { llamacpp } from "./llamacpp.ts";
import { sglang } from "./sglang.ts";
import { sim } from "./sim.ts";
import { vllm } from "./vllm.ts";

/** Every engine this build can run. The only list of them. */
export const ENGINES: readonly Engine[] = [llamacpp, vllm, sglang, sim];

/** @throws OperatorError E_ENGINE when this build cannot run that kind */
export function engineOf(kind: EngineKind): Engine {
  const engine = ENGINES.find((candidate) => candidate.kind === kind);
  if (engine) return engine;
  throw new OperatorError(
    "E_ENGINE",
    `this build cannot run ${kind} yet`,
    `it knows ${ENGINES.map((known) => known.kind).join(", ")}`,
    "use another engine for the model",
  );
}
