import { setTimeout as sleep } from "node:timers/promises";
import { ModelList, NodeList } from "../../protocol/admin-api.ts";
import { OperatorError, explain } from "../../protocol/errors.ts";
import { WAIT_POLL_MS } from "../../protocol/limits.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { duration } from "../duration.ts";
import { command } from "../frame.ts";
import { printable } from "../output.ts";
import type { Io } from "../spec.ts";
import { reach, reachFlags } from "./reach.ts";

interface Seen {
  readonly ready: boolean;
  /** What it is doing instead, in words. */
  readonly text: string;
}

type Look = (client: AdminClient) => Promise<Seen>;

/** How to look at one thing: `model/NAME` or `node/NAME`. */
function lookAt(subject: string): Look {
  const [, kind, name] = /^(model|node)\/(.+)$/.exec(subject) ?? [];
  if (kind === undefined || name === undefined) {
    throw new OperatorError(
      "E_USAGE",
      `cannot wait for "${subject}"`,
      "it is model/NAME or node/NAME",
      "llmgw ctl wait model/NAME --for ready",
    );
  }
  return (client) => (kind === "model" ? lookAtModel(client, name) : lookAtNode(client, name));
}

async function lookAtModel(client: AdminClient, name: string): Promise<Seen> {
  const { items } = await client.get("/admin/v1/models", ModelList);
  const model = items.find((each) => each.name === name);
  if (!model) {
    const meant = nearest(
      name,
      items.map((each) => each.name),
    );
    throw new OperatorError(
      "E_NOT_FOUND",
      `there is no model "${name}"`,
      "the catalog does not name it",
      meant ? `llmgw ctl wait model/${meant}` : "llmgw ctl models",
    );
  }
  const { ready, wanted, reason } = model;
  return { ready: ready >= wanted, text: `${ready} of ${wanted} replicas ready${reason ? `: ${reason}` : ""}` };
}

async function lookAtNode(client: AdminClient, name: string): Promise<Seen> {
  const { items } = await client.get("/admin/v1/nodes", NodeList);
  const node = items.find(({ id }) => id === name);
  // A node may be waited for before it joins.
  if (!node) return { ready: false, text: "it has not joined" };
  return { ready: node.state === "ready", text: `${node.state}${node.state_reason ? `: ${node.state_reason}` : ""}` };
}

/** A server that restarts meanwhile is part of waiting. */
async function seenOrUnreachable(look: Look, client: AdminClient): Promise<Seen> {
  try {
    return await look(client);
  } catch (error) {
    if (error instanceof OperatorError && error.code === "E_UNREACHABLE") return { ready: false, text: explain(error) };
    throw error;
  }
}

async function waitFor(subject: string, look: Look, client: AdminClient, length_ms: number, io: Io): Promise<void> {
  const end_ms = performance.now() + length_ms;
  for (let last = ""; ;) {
    const { ready, text } = await seenOrUnreachable(look, client);
    if (ready) return;
    if (text !== last) io.err(printable(`${subject}: ${text}`));
    last = text;
    const left_ms = end_ms - performance.now();
    if (left_ms <= 0)
      throw new OperatorError("E_TIMEOUT", `${subject} is not ready`, text, `llmgw ctl why ${subject}, or wait longer with --timeout`);
    await sleep(Math.min(WAIT_POLL_MS, left_ms));
  }
}

export const waitCommand = command({
  name: "wait",
  about: "Waits until a model has all its replicas ready, or a node is",
  examples: ["llmgw ctl wait model/qwen2.5-coder-7b --for ready --timeout 10m", "llmgw ctl wait node/gpu-07"],
  flags: {
    ...reachFlags,
    for: { type: "string", value: "STATE", choices: ["ready"], default: "ready", about: "what to wait for" },
    timeout: { type: "string", value: "TIME", default: "5m", about: "how long at most: 90s, 10m" },
  },
  args: [{ name: "SUBJECT", about: "model/NAME or node/NAME" }],
  run: async ({ flags, args, io }) => {
    const look = lookAt(args.SUBJECT);
    const length_ms = duration("timeout", flags.timeout);
    await waitFor(args.SUBJECT, look, await reach(flags, io), length_ms, io);
    io.err(`${args.SUBJECT} is ready`);
  },
});
