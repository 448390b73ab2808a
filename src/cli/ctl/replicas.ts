import { ReplicaList, type ReplicaView } from "../../protocol/admin-api.ts";
import { command } from "../frame.ts";
import { age, outputFlag, printList, span, type Column } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

/** The reason, and when the next try is where there is one to come. */
function reason(replica: ReplicaView, now_ms: number): string {
  if (replica.next_try_ms === null || replica.next_try_ms <= now_ms) return replica.reason;
  return `${replica.reason} (next try in ${span(replica.next_try_ms - now_ms)})`;
}

function columns(now_ms: number): Column<ReplicaView>[] {
  return [
    { title: "REPLICA", cell: (replica) => replica.id },
    { title: "MODEL", cell: (replica) => replica.model, wide: true },
    { title: "ENGINE", cell: (replica) => replica.engine, wide: true },
    { title: "STATE", cell: (replica) => replica.state },
    { title: "SINCE", cell: (replica) => age(replica.since_ms, now_ms), right: true },
    { title: "NODES", cell: (replica) => replica.ranks.map(({ node }) => node).join(" ") },
    { title: "IN FLIGHT", cell: (replica) => replica.in_flight, right: true },
    { title: "FAILURES", cell: (replica) => replica.failures, right: true },
    { title: "ADDRESS", cell: (replica) => replica.ranks[0]?.address, wide: true },
    { title: "ATTEMPT", cell: (replica) => replica.ranks[0]?.attempt, wide: true },
    { title: "PID", cell: (replica) => replica.ranks[0]?.engine_pid, wide: true, right: true },
    { title: "REASON", cell: (replica) => reason(replica, now_ms) },
    {
      title: "NO ROOM ON",
      cell: ({ refusals }) =>
        refusals.map((each) => `${each.node}: ${each.filter}, needs ${each.needed}, has ${each.available}`).join("; "),
      wide: true,
    },
  ];
}

export const replicasCommand = command({
  name: "replicas",
  about: "Lists the replicas and what each is doing",
  examples: ["llmgw ctl replicas", "llmgw ctl replicas -o wide"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get("/admin/v1/replicas", ReplicaList);
    printList(io, flags.output, document.items, {
      columns: columns(Date.now()),
      name: (replica) => replica.id,
      document,
      empty: "no replica is planned",
    });
  },
});
