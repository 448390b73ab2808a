import { EventList, ModelList, NodeList, ReplicaList, type EventView, type ReplicaView } from "../../protocol/admin-api.ts";
import { OperatorError } from "../../protocol/errors.ts";
import { LISTED_EVENTS_COUNT } from "../../protocol/limits.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { command } from "../frame.ts";
import { age, size, span, table } from "../output.ts";
import { replicaOf } from "./replica.ts";
import { reach, reachFlags } from "./reach.ts";

/** Last happenings shown of one thing. */
const SHOWN = 8;

async function happenings(client: AdminClient, subject: string, now_ms: number): Promise<string[]> {
  const { items } = await client.get(`/admin/v1/events?limit=${LISTED_EVENTS_COUNT}`, EventList);
  const own = items.filter((event) => event.subject === subject).slice(-SHOWN);
  const line = ({ at_ms, kind, text }: EventView) => `  ${age(at_ms, now_ms)} ago  ${kind}: ${text}`;
  return own.length === 0 ? [] : ["", "lately", ...own.map(line)];
}

/** What it was counted to need beside what it really holds. */
function memoryLines({ memory, ranks }: ReplicaView): string[] {
  const held = (bytes: number | null) => (bytes === null ? "not measured yet" : `${size(bytes)} in use`);
  const lines = ranks.flatMap(({ node, memory_used, gpu_memory_used }) => {
    const gpu = memory.per_gpu === 0 && gpu_memory_used === null ? [] : [`GPUs of ${node}: ${held(gpu_memory_used)}`];
    return memory.system === 0 && memory_used === null ? gpu : [`memory of ${node}: ${held(memory_used)}`, ...gpu];
  });
  const needs = [
    ...(memory.system > 0 ? [`${size(memory.system)} of memory`] : []),
    ...(memory.per_gpu > 0 ? [`${size(memory.per_gpu)} on each GPU`] : []),
  ];
  if (needs.length > 0) lines.unshift(`counted for each rank: ${needs.join(" and ")}, by ${memory.basis}`);
  return lines.map((line) => `  ${line}`);
}

function replicaLines(replica: ReplicaView, now_ms: number): string[] {
  const where = replica.ranks.map(({ node }) => node).join(", ");
  const lines = [`${replica.id} is ${replica.state} for ${span(now_ms - replica.since_ms)}${where === "" ? "" : ` on ${where}`}`];
  if (replica.reason !== "") lines.push(`  ${replica.reason}`);
  if (replica.failures > 0) lines.push(`  it failed ${replica.failures} times in a row`);
  if (replica.next_try_ms !== null && replica.next_try_ms > now_ms) lines.push(`  next try in ${span(replica.next_try_ms - now_ms)}`);
  const ends = replica.state === "draining" ? "its requests are cut off" : "given up, unless it gets on,";
  if (replica.deadline_ms !== null && replica.deadline_ms > now_ms) lines.push(`  ${ends} in ${span(replica.deadline_ms - now_ms)}`);
  lines.push(...memoryLines(replica));
  if (replica.refusals.length > 0) {
    const rows = table(
      [
        { title: "NODE", cell: (each) => each.node },
        { title: "FILTER", cell: (each) => each.filter },
        { title: "NEEDED", cell: (each) => each.needed },
        { title: "AVAILABLE", cell: (each) => each.available },
      ],
      replica.refusals,
    );
    lines.push(...rows.map((row) => `  ${row}`));
  }
  if (replica.last_lines.length > 0)
    lines.push("  its engine's last lines when it failed first", ...replica.last_lines.map((line) => `    ${line}`));
  return lines;
}

async function explainModel(client: AdminClient, name: string, now_ms: number): Promise<string[]> {
  const [{ items: models }, { items }] = await Promise.all([
    client.get("/admin/v1/models", ModelList),
    client.get("/admin/v1/replicas", ReplicaList),
  ]);
  const model = models.find((each) => each.name === name);
  if (!model) throw new OperatorError("E_NOT_FOUND", `there is no model "${name}"`, "the catalog does not name it", "llmgw ctl models");
  const head = `${model.name}: ${model.ready} of ${model.wanted} replicas are ready${model.reason === "" ? "" : `: ${model.reason}`}`;
  const replicas = items.filter((replica) => replica.model === name).flatMap((replica) => ["", ...replicaLines(replica, now_ms)]);
  return [head, ...replicas, ...(await happenings(client, `model/${name}`, now_ms))];
}

async function explainNode(client: AdminClient, id: string, now_ms: number): Promise<string[]> {
  const { items } = await client.get("/admin/v1/nodes", NodeList);
  const node = items.find((each) => each.id === id);
  if (!node) throw new OperatorError("E_NOT_FOUND", `there is no node "${id}"`, "no node of that name has joined", "llmgw ctl nodes");
  const reason = node.state_reason === "" ? "" : `: ${node.state_reason}`;
  const lines = [`${node.id} is ${node.state}${reason}, last heard ${age(node.last_seen_ms, now_ms)} ago`];
  if (node.cordon !== "") lines.push(`  nothing new is placed here: ${node.cordon}`);
  for (const engine of node.inventory.engines) if (!engine.offered) lines.push(`  it does not offer ${engine.kind}: ${engine.reason}`);
  lines.push(`  replicas: ${node.replicas.join(", ") || "none"}`);
  return [...lines, ...(await happenings(client, `node/${id}`, now_ms))];
}

async function explainReplica(client: AdminClient, id: string, now_ms: number): Promise<string[]> {
  return [...replicaLines(await replicaOf(client, id), now_ms), ...(await happenings(client, `replica/${id}`, now_ms))];
}

const EXPLAIN = { replica: explainReplica, node: explainNode, model: explainModel } as const;
type Kind = keyof typeof EXPLAIN;
const isKind = (word: string | undefined): word is Kind => word !== undefined && Object.hasOwn(EXPLAIN, word);

/** What a name without its kind is. @throws OperatorError E_NOT_FOUND */
async function kindOf(client: AdminClient, name: string): Promise<Kind> {
  const [models, nodes, replicas] = await Promise.all([
    client.get("/admin/v1/models", ModelList),
    client.get("/admin/v1/nodes", NodeList),
    client.get("/admin/v1/replicas", ReplicaList),
  ]);
  if (models.items.some((model) => model.name === name)) return "model";
  if (nodes.items.some((node) => node.id === name)) return "node";
  if (replicas.items.some((replica) => replica.id === name)) return "replica";
  const names = [...models.items.map((model) => model.name), ...nodes.items.map(({ id }) => id), ...replicas.items.map(({ id }) => id)];
  const meant = nearest(name, names);
  const remedy = meant ? `llmgw ctl why ${meant}` : "llmgw ctl status";
  throw new OperatorError("E_NOT_FOUND", `nothing is called "${name}"`, "no model, node or replica has that name", remedy);
}

export const whyCommand = command({
  name: "why",
  about: "Says why a replica, node or model is as it is",
  examples: ["llmgw ctl why model/coder", "llmgw ctl why replica coder-a1b2c", "llmgw ctl why gpu-07"],
  flags: reachFlags,
  args: [
    { name: "SUBJECT", about: "a name, KIND/NAME, or KIND and NAME; a kind is replica, node or model" },
    { name: "NAME", about: "the name, when SUBJECT is a kind alone", optional: true },
  ],
  run: async ({ flags, args, io }) => {
    const whole = args.NAME === undefined ? args.SUBJECT : `${args.SUBJECT}/${args.NAME}`;
    const slash = whole.indexOf("/");
    const [kind, name] = slash === -1 ? [undefined, whole] : [whole.slice(0, slash), whole.slice(slash + 1)];
    if (kind !== undefined && !isKind(kind))
      throw new OperatorError("E_USAGE", `cannot explain a "${kind}"`, "it is replica, node or model", `llmgw ctl why ${name}`);
    const client = await reach(flags, io);
    const explain = EXPLAIN[kind ?? (await kindOf(client, name))];
    io.out((await explain(client, name, Date.now())).join("\n"));
  },
});

export const planCommand = command({
  name: "plan",
  about: "Says what reading the catalog again would change, and why",
  examples: ["llmgw ctl plan"],
  flags: reachFlags,
  args: [],
  run: async ({ flags, io }) => {
    const { items } = await (await reach(flags, io)).get("/admin/v1/plan", EventList);
    if (items.length === 0) return io.err("nothing would change at once");
    io.out(items.map(({ subject, kind, text }) => `${subject}  ${kind}: ${text}`).join("\n"));
  },
});
