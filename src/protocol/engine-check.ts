import * as v from "valibot";
import { EngineKind } from "./ids.ts";

/**
 * What an engine's help proves of one flag. `unproved`: the text is not whole, and the flag is in no part of it.
 * Only `accepted` and `deprecated` are good.
 */
const FLAG_VERDICTS = ["accepted", "deprecated", "missing", "removed", "bad-value", "unproved"] as const;
export type FlagVerdict = (typeof FLAG_VERDICTS)[number];

export const FlagFinding = v.object({
  flag: v.string(),
  /** As llmgw would give it; null for a flag without one. */
  value: v.nullable(v.string()),
  verdict: v.picklist(FLAG_VERDICTS),
  /** Why, and what to use instead; "" for an accepted flag. */
  text: v.string(),
});
export type FlagFinding = v.InferOutput<typeof FlagFinding>;

/** Whether an engine takes every flag that llmgw would ever give it. `llmgw ctl engine-check -o json` prints it. */
export const EngineCheck = v.object({
  engine: EngineKind,
  /** The program, file or text that was asked, in words. */
  subject: v.string(),
  version: v.nullable(v.string()),
  /** `cut`: its end or a part is not there. `none`: it lists no flags at all. */
  help: v.picklist(["whole", "cut", "none"]),
  /** What speaks against the text as a whole. */
  warnings: v.array(v.string()),
  flags: v.array(FlagFinding),
  /** What the engine itself said to the whole commands, where it can be asked: "" when it took them; null when it was not asked. */
  trial: v.nullable(v.string()),
  passed: v.boolean(),
});
export type EngineCheck = v.InferOutput<typeof EngineCheck>;
