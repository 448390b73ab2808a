import { object } from "valibot";
import { NodeList, ReloadAnswer } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import { nearest } from "../../protocol/nearest.ts";
import { command } from "../frame.ts";
import { dryRunFlag, reach, reachFlags } from "./reach.ts";

export const revokeCommand = command({
  name: "revoke",
  about: "Refuses every certificate of a name issued until now; one issued later works",
  examples: ["llmgw ctl revoke gpu-07", "llmgw ctl revoke gpu-07 --dry-run"],
  flags: { ...reachFlags, force: { type: "boolean", about: "also when no node of that name ever joined" }, "dry-run": dryRunFlag },
  args: [{ name: "NODE", about: "the node, or the name of another certificate" }],
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const { items } = await client.get("/admin/v1/nodes", NodeList);
    const node = items.find(({ id }) => id === args.NODE);
    if (!node && !flags.force) {
      const meant = nearest(
        args.NODE,
        items.map(({ id }) => id),
      );
      const remedy = meant ? `llmgw ctl revoke ${meant}` : `llmgw ctl revoke ${args.NODE} --force, when its certificate was never used`;
      throw new OperatorError("E_NOT_FOUND", `there is no node "${args.NODE}"`, "no node of that name has joined", remedy);
    }
    const session = node
      ? `, drop its session (${node.state}) and leave what runs there (${node.replicas.join(", ") || "nothing"}) to be replaced`
      : "";
    if (flags["dry-run"]) return io.err(`would refuse every certificate of ${args.NODE} issued until now${session}`);
    await client.send("POST", "/admin/v1/revoke", { name: args.NODE }, object({}));
    io.err(`every certificate of ${args.NODE} issued until now is refused`);
  },
});

export const reloadCommand = command({
  name: "reload",
  about: "Makes the server read its configuration and catalog again",
  examples: ["llmgw ctl reload"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: [],
  run: async ({ flags, io }) => {
    const client = await reach(flags, io);
    if (flags["dry-run"]) {
      await client.get("/admin/v1/nodes", NodeList);
      return io.err("would make the server read its files again; llmgw config check FILE says beforehand whether they are valid");
    }
    const { changed } = await client.send("POST", "/admin/v1/reload", {}, ReloadAnswer);
    io.err(changed.length === 0 ? "nothing changed" : `changed: ${changed.join(", ")}`);
  },
});
