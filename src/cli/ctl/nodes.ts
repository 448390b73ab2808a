import { certificateReason } from "../../core/reasons.ts";
import { NodeList, type NodeView } from "../../protocol/admin-api.ts";
import type { Gpu } from "../../protocol/inventory.ts";
import { command } from "../frame.ts";
import { age, outputFlag, printList, size, type Column } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

/** Engines that can be used, with their versions; those that cannot are named with a `!`. */
function engines(node: NodeView): string {
  const shown = node.inventory.engines.map(({ kind, version, offered }) => `${offered ? "" : "!"}${kind}${version ? ` ${version}` : ""}`);
  return shown.join(", ");
}

/** `2x NVIDIA H200`: equal GPUs counted together. */
export function gpus(list: readonly Gpu[]): string {
  const counts = new Map<string, number>();
  for (const { name } of list) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, count]) => `${count}x ${name}`).join(", ");
}

/** The state, and whether anything new may come. */
function stateOf({ state, cordon, drain }: NodeView): string {
  if (drain) return `${state}, draining`;
  return cordon === "" ? state : `${state}, cordoned`;
}

/** The columns of a list of nodes. */
export function nodeColumns(now_ms: number): Column<NodeView>[] {
  return [
    { title: "NODE", cell: (node) => node.id },
    { title: "STATE", cell: stateOf },
    { title: "ADDRESS", cell: (node) => node.address },
    { title: "ENGINES", cell: engines },
    { title: "GPUS", cell: (node) => gpus(node.inventory.gpus) },
    { title: "FABRIC", cell: (node) => node.fabrics.join(", ") },
    { title: "ISLAND", cell: (node) => node.island },
    { title: "REPLICAS", cell: (node) => node.replicas.length, right: true },
    { title: "VERSION", cell: (node) => node.agent_version },
    { title: "SEEN", cell: (node) => age(node.last_seen_ms, now_ms), right: true },
    { title: "CPU", cell: (node) => `${node.inventory.host.cores}x ${node.inventory.host.cpu_model}`, wide: true },
    { title: "MEMORY FREE", cell: ({ inventory }) => `${size(inventory.memory.available)} of ${size(inventory.memory.total)}`, wide: true },
    { title: "DISK FREE", cell: ({ inventory }) => `${size(inventory.disk.free)} of ${size(inventory.disk.total)}`, wide: true },
    { title: "CLOCK", cell: (node) => `${node.clock_offset_ms} ms`, wide: true, right: true },
    { title: "CERTIFICATE UNTIL", cell: (node) => new Date(node.certificate_expires_ms).toISOString().slice(0, 10), wide: true },
    { title: "WARNINGS", cell: ({ inventory }) => inventory.warnings.map(({ code }) => code).join(", "), wide: true },
    { title: "REASON", cell: (node) => node.state_reason, wide: true },
  ];
}

export const nodesCommand = command({
  name: "nodes",
  about: "Lists the nodes",
  examples: ["llmgw ctl nodes", "llmgw ctl nodes -o wide"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get("/admin/v1/nodes", NodeList);
    printList(io, flags.output, document.items, {
      columns: nodeColumns(Date.now()),
      name: (node) => node.id,
      document,
      empty: "no node has joined yet",
    });
    if (flags.output !== "table" && flags.output !== "wide") return;
    for (const { id, address, certificate_expires_ms } of document.items) {
      const ending = certificateReason(certificate_expires_ms, Date.now());
      if (ending !== null) io.err(`${id}: ${ending}: llmgw onboard --node ${id} --addr ${address} --server URL --renew`);
    }
  },
});
