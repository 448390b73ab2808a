import { object } from "valibot";
import { ModelList, type ScaleWish } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import { MODEL_REPLICAS_COUNT } from "../../protocol/limits.ts";
import { nearest } from "../../protocol/nearest.ts";
import { command } from "../frame.ts";
import { dryRunFlag, reach, reachFlags } from "./reach.ts";

/** @throws OperatorError E_USAGE */
function numberOf(text: string | undefined, catalog: boolean): number | null {
  const usage = (why: string) => new OperatorError("E_USAGE", "how many replicas?", why, "llmgw ctl scale coder 3, or --catalog");
  if (catalog && text !== undefined) throw usage("--catalog stands instead of a number");
  if (catalog) return null;
  if (text === undefined || !/^\d+$/.test(text) || Number(text) > MODEL_REPLICAS_COUNT)
    throw usage(`a number from 0 to ${MODEL_REPLICAS_COUNT} is needed`);
  return Number(text);
}

export const scaleCommand = command({
  name: "scale",
  about: "Wants another number of replicas of a model than the catalog says, until taken back",
  examples: ["llmgw ctl scale coder 3", "llmgw ctl scale coder 0", "llmgw ctl scale coder --catalog"],
  flags: {
    ...reachFlags,
    catalog: { type: "boolean", about: "take it back: the catalog's number counts again" },
    "dry-run": dryRunFlag,
  },
  args: [
    { name: "MODEL", about: "the model, from llmgw ctl models" },
    { name: "REPLICAS", about: "how many", optional: true },
  ],
  run: async ({ flags, args, io }) => {
    const replicas = numberOf(args.REPLICAS, flags.catalog);
    const client = await reach(flags, io);
    const { items } = await client.get("/admin/v1/models", ModelList);
    const model = items.find(({ name }) => name === args.MODEL);
    if (!model) {
      const meant = nearest(
        args.MODEL,
        items.map(({ name }) => name),
      );
      throw new OperatorError("E_NOT_FOUND", `there is no model "${args.MODEL}"`, "the catalog names none", meant ?? "llmgw ctl models");
    }
    const wanted = replicas ?? model.catalog_replicas;
    if (flags["dry-run"]) return io.err(`would want ${wanted} replicas of ${model.name} instead of ${model.wanted}`);
    await client.send("POST", `/admin/v1/models/${encodeURIComponent(model.name)}/scale`, { replicas } satisfies ScaleWish, object({}));
    const back = replicas === null ? "as the catalog says" : `llmgw ctl scale ${model.name} --catalog takes it back`;
    io.err(`${wanted} replicas of ${model.name} are wanted; ${back}`);
  },
});
