import { NodeList, type NodeView } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import type { FabricPort } from "../../protocol/inventory.ts";
import { command, group } from "../frame.ts";
import { age, outputFlag, printOne, size } from "../output.ts";
import { gpus } from "./nodes.ts";
import { reach, reachFlags } from "./reach.ts";

type Row = readonly [string, string];

function portRow(port: FabricPort, now_ms: number): Row {
  if (port.excluded !== "") return [`port ${port.device}:${port.port}`, `left out: ${port.excluded}`];
  const rate = port.rate_gbps === null ? "" : `, ${port.rate_gbps} Gb/s`;
  const answered = port.answered_ms === null ? "no subnet manager yet" : `subnet managers ${port.managers.join(", ")}`;
  const silent = !port.answering && port.answered_ms !== null ? ` (silent for ${age(port.answered_ms, now_ms)})` : "";
  return [`port ${port.device}:${port.port}`, `${port.fabric || "no fabric"}, ${port.state ?? "unknown"}${rate}, ${answered}${silent}`];
}

function rows(node: NodeView, now_ms: number): Row[] {
  const { host, memory, disk, doctor, warnings, ports = [] } = node.inventory;
  const checks = doctor?.checks ?? [];
  const ill = checks.filter(({ verdict }) => verdict === "fail" || verdict === "warn" || verdict === "unknown");
  return [
    ["state", `${node.state}${node.state_reason ? `: ${node.state_reason}` : ""}`],
    ["address", node.address],
    ["agent", `${node.agent_version}, seen ${age(node.last_seen_ms, now_ms)} ago`],
    ["system", `${host.os}, Linux ${host.kernel}, ${host.arch}`],
    ["cpu", `${host.cores}x ${host.cpu_model}: ${host.cpu_features.join(" ")}`],
    ["memory", `${size(memory.available)} of ${size(memory.total)} free`],
    ["disk", `${size(disk.free)} of ${size(disk.total)} free under ${disk.path}`],
    ["gpus", gpus(node.inventory.gpus)],
    ["island", node.island],
    ...(node.cordon === "" ? [] : [["cordon", node.cordon] as [string, string]]),
    ...ports.map((port) => portRow(port, now_ms)),
    ["replicas", node.replicas.join(", ")],
    ...warnings.map(({ code, text }): Row => [`warning ${code}`, text]),
    [
      "doctor",
      doctor ? `${checks.length - ill.length} passed, ${ill.length} to look at, ${age(doctor.at_ms, now_ms)} ago` : "has not run yet",
    ],
    ...ill.map(({ id, verdict, found, remedy }): Row => [`  ${verdict} ${id}`, `${found}${remedy ? ` (try: ${remedy})` : ""}`]),
  ];
}

const show = command({
  name: "show",
  about: "Shows what a node has, and what doctor found there last",
  examples: ["llmgw ctl node show node-1", "llmgw ctl node show node-1 -o json"],
  flags: { ...reachFlags, output: outputFlag },
  args: [{ name: "NODE", about: "its id" }],
  run: async ({ flags, args, io }) => {
    const { items } = await (await reach(flags, io)).get("/admin/v1/nodes", NodeList);
    const node = items.find(({ id }) => id === args.NODE);
    if (!node)
      throw new OperatorError("E_NOT_FOUND", `there is no node ${args.NODE}`, "no node of that name has joined", "llmgw ctl nodes");
    printOne(io, flags.output, { rows: rows(node, Date.now()), name: node.id, document: node });
  },
});

export const nodeCommands = group({ name: "node", about: "Shows one node", commands: () => [show] });
