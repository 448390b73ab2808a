import { object } from "valibot";
import { ReplicaList, type ReplicaView } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { command, group } from "../frame.ts";
import type { Io } from "../spec.ts";
import { dryRunFlag, reach, reachFlags, type ReachFlags } from "./reach.ts";

const REPLICA = [{ name: "REPLICA", about: "the replica, from llmgw ctl replicas" }] as const;

/** @throws OperatorError E_NOT_FOUND with the nearest name */
export async function replicaOf(client: AdminClient, id: string): Promise<ReplicaView> {
  const { items } = await client.get("/admin/v1/replicas", ReplicaList);
  const found = items.find((replica) => replica.id === id);
  if (found) return found;
  const meant = nearest(
    id,
    items.map((replica) => replica.id),
  );
  throw new OperatorError("E_NOT_FOUND", `there is no replica "${id}"`, "no replica has that name", meant ?? "llmgw ctl replicas");
}

async function replace(how: "restart" | "move", id: string, flags: ReachFlags & { readonly "dry-run": boolean }, io: Io): Promise<void> {
  const client = await reach(flags, io);
  const { model, ranks } = await replicaOf(client, id);
  const where = ranks.map(({ node }) => node).join(", ");
  if (flags["dry-run"])
    return io.err(`would start another replica of ${model}${how === "move" ? ` elsewhere than on ${where}` : ""}, then stop ${id}`);
  await client.send("POST", `/admin/v1/replicas/${encodeURIComponent(id)}/replace`, { how }, object({}));
  io.err(`another replica of ${model} is started; ${id} stops once it is ready`);
}

const move = command({
  name: "move",
  about: "Starts another replica on another node, then stops this one",
  examples: ["llmgw ctl replica move coder-a1b2c"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: REPLICA,
  run: ({ flags, args, io }) => replace("move", args.REPLICA, flags, io),
});

export const replicaCommands = group({ name: "replica", about: "Acts on one replica", commands: () => [move] });

export const restartCommand = command({
  name: "restart",
  about: "Starts another replica, then stops this one",
  examples: ["llmgw ctl restart coder-a1b2c"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: REPLICA,
  run: ({ flags, args, io }) => replace("restart", args.REPLICA, flags, io),
});
