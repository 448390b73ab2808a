import { StatusView } from "../../protocol/admin-api.ts";
import { command } from "../frame.ts";
import { outputFlag, printable, printOne, span } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

/** `3 ready, 1 lost`: counts that are not zero; the first always. */
function counted(counts: Readonly<Record<string, number>>): string {
  return Object.entries(counts)
    .filter(([, count], index) => index === 0 || count > 0)
    .map(([name, count]) => `${count} ${name}`)
    .join(", ");
}

export const statusCommand = command({
  name: "status",
  about: "Says how the fleet is, and what to look at",
  examples: ["llmgw ctl status", "llmgw ctl status -o json"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const status = await (await reach(flags, io)).get("/admin/v1/status", StatusView);
    const { nodes, replicas, gateway, plan } = status;
    printOne(io, flags.output, {
      rows: [
        ["server", `${status.server_version}, up ${span(status.now_ms - status.started_ms)}`],
        ["gateway", `${gateway.state}${gateway.detail ? `: ${gateway.detail}` : ""}, ${gateway.address}, ${gateway.in_flight} in flight`],
        ["nodes", counted({ ready: nodes.ready, suspect: nodes.suspect, lost: nodes.lost })],
        ["replicas", `${replicas.ready} of ${replicas.wanted} ready, ${counted({ failed: replicas.failed, pending: replicas.pending })}`],
        ["plan", `${plan.epoch}.${plan.generation}`],
        ["warnings", status.warnings.length === 0 ? "none" : String(status.warnings.length)],
      ],
      name: gateway.state,
      document: status,
    });
    if (flags.output !== "table" && flags.output !== "wide") return;
    for (const { subject, text, remedy } of status.warnings) io.out(printable(`  ${subject}: ${text}${remedy ? ` (try: ${remedy})` : ""}`));
  },
});
