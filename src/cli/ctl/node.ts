import { setTimeout as sleep } from "node:timers/promises";
import { object } from "valibot";
import { NodeList, type NodeView } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import type { FabricPort } from "../../protocol/inventory.ts";
import { REMOVE_STOP_MS, WAIT_POLL_MS } from "../../protocol/limits.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { command, group } from "../frame.ts";
import type { Io } from "../spec.ts";
import { age, outputFlag, printOne, size } from "../output.ts";
import { gpus } from "./nodes.ts";
import { dryRunFlag, reach, reachFlags } from "./reach.ts";

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

/** @throws OperatorError E_NOT_FOUND with the nearest name */
async function nodeOf(client: AdminClient, id: string): Promise<NodeView> {
  const { items } = await client.get("/admin/v1/nodes", NodeList);
  const node = items.find((each) => each.id === id);
  if (node) return node;
  const ids = items.map((each) => each.id);
  const remedy = nearest(id, ids) ?? "llmgw ctl nodes";
  throw new OperatorError("E_NOT_FOUND", `there is no node ${id}`, "no node of that name has joined", remedy);
}

const show = command({
  name: "show",
  about: "Shows what a node has, and what doctor found there last",
  examples: ["llmgw ctl node show node-1", "llmgw ctl node show node-1 -o json"],
  flags: { ...reachFlags, output: outputFlag },
  args: [{ name: "NODE", about: "its id" }],
  run: async ({ flags, args, io }) => {
    const node = await nodeOf(await reach(flags, io), args.NODE);
    printOne(io, flags.output, { rows: rows(node, Date.now()), name: node.id, document: node });
  },
});

/** Ends what runs on a node, as far as its agent can be reached. */
async function stopThere(client: AdminClient, node: NodeView, io: Io): Promise<void> {
  const stopAll = "llmgw agent stop-all --config /etc/llmgw/agent.yaml";
  if (node.state !== "ready") return io.err(`its agent does not answer; when the machine still runs, on it: ${stopAll}`);
  const wish = { wish: "drain", stop_first: true, within_ms: 1 } as const;
  await client.send("POST", `/admin/v1/nodes/${encodeURIComponent(node.id)}/intent`, wish, object({}));
  const end_ms = performance.now() + REMOVE_STOP_MS;
  for (let left = node.replicas; left.length > 0; await sleep(WAIT_POLL_MS)) {
    const now = (await client.get("/admin/v1/nodes", NodeList)).items.find(({ id }) => id === node.id);
    left = now?.replicas ?? [];
    if (left.length > 0 && (performance.now() > end_ms || now?.state !== "ready"))
      return io.err(`${left.join(", ")} would not end; on the node: ${stopAll}`);
  }
}

const remove = command({
  name: "remove",
  about: "Takes a node out of the fleet: nothing runs there, its certificate is refused, it is forgotten",
  examples: ["llmgw ctl drain node-1 && llmgw ctl node remove node-1", "llmgw ctl node remove node-1 --force"],
  flags: {
    ...reachFlags,
    force: { type: "boolean", about: "also while something runs there: it is stopped first, and started elsewhere" },
    "dry-run": dryRunFlag,
  },
  args: [{ name: "NODE", about: "its id" }],
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const node = await nodeOf(client, args.NODE);
    const there = node.replicas.length === 0 ? "nothing runs there" : `${node.replicas.join(", ")} run there`;
    if (node.replicas.length > 0 && !flags.force)
      throw new OperatorError("E_BAD_REQUEST", `node ${node.id} is in use`, there, `llmgw ctl drain ${node.id}, or --force`);
    if (flags["dry-run"]) return io.err(`would stop what runs there (${there}), refuse its certificates, and forget ${node.id}`);
    if (node.replicas.length > 0) await stopThere(client, node, io);
    await client.send("DELETE", `/admin/v1/nodes/${encodeURIComponent(node.id)}?force=${flags.force ? 1 : 0}`, undefined, object({}));
    io.err(`${node.id} is out of the fleet; its certificate is refused, and llmgw onboard --renew would bring it back`);
  },
});

export const nodeCommands = group({ name: "node", about: "Shows or removes one node", commands: () => [show, remove] });
