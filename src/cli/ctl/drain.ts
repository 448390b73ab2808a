import { setTimeout as sleep } from "node:timers/promises";
import { object } from "valibot";
import { DrainSteps, NodeList, ReplicaList, type NodeView, type NodeWish, type ReplicaView } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import { SERVER_AWAY_MS, WAIT_POLL_MS } from "../../protocol/limits.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { duration } from "../duration.ts";
import { command } from "../frame.ts";
import { outputFlag, printList } from "../output.ts";
import type { Io } from "../spec.ts";
import { dryRunFlag, reach, reachFlags } from "./reach.ts";

const NODE = [{ name: "NODE", about: "the node" }] as const;

/** @throws OperatorError E_NOT_FOUND with the nearest name */
async function nodeOf(client: AdminClient, id: string): Promise<NodeView> {
  const { items } = await client.get("/admin/v1/nodes", NodeList);
  const found = items.find((node) => node.id === id);
  if (found) return found;
  const ids = items.map((node) => node.id);
  throw new OperatorError(
    "E_NOT_FOUND",
    `there is no node "${id}"`,
    "no node of that name has joined",
    nearest(id, ids) ?? "llmgw ctl nodes",
  );
}

const send = (client: AdminClient, node: string, wish: NodeWish) =>
  client.send("POST", `/admin/v1/nodes/${encodeURIComponent(node)}/intent`, wish, object({}));

export const cordonCommand = command({
  name: "cordon",
  about: "Places nothing new on a node; what runs there stays",
  examples: ["llmgw ctl cordon gpu-07"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: NODE,
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const node = await nodeOf(client, args.NODE);
    if (flags["dry-run"]) return io.err(`would place nothing new on ${node.id}; its ${node.replicas.length} replicas stay`);
    await send(client, node.id, { wish: "cordon" });
    io.err(`nothing new is placed on ${node.id}; llmgw ctl uncordon ${node.id} takes it back`);
  },
});

export const uncordonCommand = command({
  name: "uncordon",
  about: "Takes back a cordon or a drain",
  examples: ["llmgw ctl uncordon gpu-07"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: NODE,
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const node = await nodeOf(client, args.NODE);
    if (flags["dry-run"]) return io.err(`would let ${node.id} take replicas again${node.drain ? ", and end its drain" : ""}`);
    await send(client, node.id, { wish: "uncordon" });
    io.err(`${node.id} takes replicas again`);
  },
});

export const drainCommand = command({
  name: "drain",
  about: "Moves everything off a node, replacements first, and waits until it is empty",
  examples: [
    "llmgw ctl drain gpu-07 --plan",
    "llmgw ctl drain gpu-07",
    "llmgw ctl drain gpu-07 --deadline 1h",
    "llmgw ctl drain gpu-07 --stop-first",
  ],
  flags: {
    ...reachFlags,
    plan: { type: "boolean", about: "say what would become of each replica, and do nothing" },
    deadline: { type: "string", value: "TIME", about: "stop what is left after this long, replaced or not: 30m, 1h" },
    "stop-first": { type: "boolean", about: "stop replicas before their replacements are ready: where there is no room for both" },
    detach: { type: "boolean", about: "do not wait" },
    "dry-run": dryRunFlag,
    output: outputFlag,
  },
  args: NODE,
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const node = await nodeOf(client, args.NODE);
    if (flags.plan || flags["dry-run"]) return showPlan(client, node.id, flags.output, io);
    const within_ms = flags.deadline === undefined ? null : duration("deadline", flags.deadline);
    await send(client, node.id, { wish: "drain", stop_first: flags["stop-first"], within_ms });
    if (flags.detach) return io.err(`${node.id} is being drained; llmgw ctl node show ${node.id} says how far it is`);
    await waitEmpty(client, node.id, io);
    io.err(`${node.id} is empty; llmgw ctl uncordon ${node.id} lets it take replicas again`);
  },
});

async function showPlan(client: AdminClient, node: string, output: (typeof outputFlag)["choices"][number], io: Io): Promise<void> {
  const document = await client.get(`/admin/v1/nodes/${encodeURIComponent(node)}/drain`, DrainSteps);
  printList(io, output, document.items, {
    columns: [
      { title: "REPLICA", cell: (step) => step.replica },
      { title: "STATE", cell: (step) => step.state },
      { title: "WHAT HAPPENS", cell: (step) => step.text },
    ],
    name: (step) => step.replica,
    document,
    empty: `nothing runs on ${node}`,
  });
}

type Seen = readonly [NodeView, readonly ReplicaView[]];

/** What is left on a node, or why the server does not say: one that restarts meanwhile goes on with the drain. */
async function seenOrAway(client: AdminClient, id: string): Promise<Seen | OperatorError> {
  try {
    const [node, { items }] = await Promise.all([nodeOf(client, id), client.get("/admin/v1/replicas", ReplicaList)]);
    return [node, items];
  } catch (error) {
    if (error instanceof OperatorError && (error.code === "E_UNREACHABLE" || error.code === "E_TIMEOUT")) return error;
    throw error;
  }
}

/** Says what is left whenever that changes; the drain itself goes on without anybody watching. */
async function waitEmpty(client: AdminClient, id: string, io: Io): Promise<void> {
  let heard_ms = performance.now();
  for (let last = ""; ; await sleep(WAIT_POLL_MS)) {
    const seen = await seenOrAway(client, id);
    if (seen instanceof OperatorError) {
      if (performance.now() - heard_ms > SERVER_AWAY_MS) throw seen;
      const away = `${seen.message}: ${seen.why}; the drain is kept, and goes on with the server`;
      if (away !== last) io.err(away);
      last = away;
      continue;
    }
    heard_ms = performance.now();
    const [node, items] = seen;
    const here = items.filter((replica) => node.replicas.includes(replica.id));
    if (here.length === 0) return;
    if (!node.drain) {
      const why = `${here.length} replicas were still there`;
      throw new OperatorError("E_BAD_REQUEST", `the drain of ${id} was taken back`, why, `llmgw ctl drain ${id}`);
    }
    const text = here.map((replica) => describe(id, replica, items)).join("\n");
    if (text !== last) io.err(text);
    last = text;
  }
}

function describe(node: string, replica: ReplicaView, all: readonly ReplicaView[]): string {
  const next = all.find((each) => each.model === replica.model && ["pending", "failed", "fetching", "starting"].includes(each.state));
  const waits = replica.state === "ready" && next ? `; ${next.id}, which is to take its place, is ${next.state}: ${next.reason}` : "";
  const way = waits !== "" && next?.state === "pending" ? `; without it: llmgw ctl drain ${node} --stop-first` : "";
  return `${replica.id} is ${replica.state}, ${replica.in_flight} requests in flight${waits}${way}`;
}

export const thawCommand = command({
  name: "thaw",
  about: "Says that nodes which vanished together are really gone: what they ran is replaced",
  examples: ["llmgw ctl thaw"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: [],
  run: async ({ flags, io }) => {
    const client = await reach(flags, io);
    const { items } = await client.get("/admin/v1/nodes", NodeList);
    const gone = items.filter(({ state }) => state !== "ready").map(({ id }) => id);
    if (flags["dry-run"]) return io.err(`would have the replicas of ${gone.join(", ") || "no node"} replaced`);
    await client.send("POST", "/admin/v1/thaw", {}, object({}));
    io.err(`what ran on ${gone.join(", ") || "no node"} is replaced where its doors do not answer either`);
  },
});
