import { object } from "valibot";
import { CreatedKey, CreateKey, KeyList, type KeyView } from "../../protocol/admin-api.ts";
import { OperatorError, parseAs } from "../../protocol/errors.ts";
import { nearest } from "../../protocol/nearest.ts";
import type { AdminClient } from "../admin-client.ts";
import { command, group } from "../frame.ts";
import { age, documentText, outputFlag, printList } from "../output.ts";
import { dryRunFlag, reach, reachFlags } from "./reach.ts";

const KEYS = "/admin/v1/keys";

export const keysCommand = command({
  name: "keys",
  about: "Lists the keys to the gateway, never their secrets",
  examples: ["llmgw ctl keys"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get(KEYS, KeyList);
    const now_ms = Date.now();
    printList(io, flags.output, document.items, {
      columns: [
        { title: "ID", cell: (key) => key.id },
        { title: "NAME", cell: (key) => key.name },
        { title: "CREATED", cell: (key) => `${age(key.created_ms, now_ms)} ago` },
        { title: "REVOKED", cell: (key) => (key.revoked_ms === null ? "" : `${age(key.revoked_ms, now_ms)} ago`) },
      ],
      name: (key) => key.id,
      document,
      empty: "no key yet; llmgw ctl key create NAME",
    });
  },
});

function checkName(name: string): { name: string } {
  try {
    return parseAs(CreateKey, { name }, "this name");
  } catch (error) {
    if (!(error instanceof OperatorError)) throw error;
    throw new OperatorError("E_USAGE", `a key cannot be named "${name}"`, error.why.replace(/^name: /, ""), "llmgw ctl key create alice");
  }
}

const create = command({
  name: "create",
  about: "Makes a key to the gateway; it is shown this once, alone on stdout",
  examples: ["llmgw ctl key create alice", "llmgw ctl key create ci > ci.key"],
  flags: {
    ...reachFlags,
    output: { ...outputFlag, choices: ["key", "json", "yaml"], default: "key" },
    "dry-run": dryRunFlag,
  },
  args: [{ name: "NAME", about: "whose it is" }],
  run: async ({ flags, args, io }) => {
    const wanted = checkName(args.NAME);
    const client = await reach(flags, io);
    if (flags["dry-run"]) {
      await client.get(KEYS, KeyList);
      return io.err(`would make a key named ${wanted.name}`);
    }
    const made = await client.send("POST", KEYS, wanted, CreatedKey);
    io.out(flags.output === "key" ? made.key : documentText(flags.output, made));
    io.err(`key ${made.id} (${made.name}): it is shown this once and not kept; store it now`);
  },
});

/** The key of an id. @throws OperatorError E_NOT_FOUND, also when it is revoked already */
async function livingKey(client: AdminClient, id: string): Promise<KeyView> {
  const { items } = await client.get(KEYS, KeyList);
  const found = items.find((key) => key.id === id);
  if (found && found.revoked_ms === null) return found;
  const living = items.filter((key) => key.revoked_ms === null);
  const meant =
    living.find((key) => key.name === id)?.id ??
    nearest(
      id,
      living.map((key) => key.id),
    );
  const why = found ? "it was revoked before" : "no key has that id";
  throw new OperatorError(
    "E_NOT_FOUND",
    `key ${id} cannot be revoked`,
    why,
    meant && !found ? `llmgw ctl key revoke ${meant}` : "llmgw ctl keys",
  );
}

const revoke = command({
  name: "revoke",
  about: "Ends a key; requests with it are refused at once",
  examples: ["llmgw ctl key revoke k_1f2e3d4c"],
  flags: { ...reachFlags, "dry-run": dryRunFlag },
  args: [{ name: "ID", about: "the key's id, from llmgw ctl keys" }],
  run: async ({ flags, args, io }) => {
    const client = await reach(flags, io);
    const key = await livingKey(client, args.ID);
    if (flags["dry-run"]) return io.err(`would revoke ${key.id} (${key.name})`);
    await client.send("DELETE", `${KEYS}/${encodeURIComponent(key.id)}`, undefined, object({}));
    io.err(`revoked ${key.id} (${key.name})`);
  },
});

export const keyCommands = group({ name: "key", about: "Makes and ends keys to the gateway", commands: () => [create, revoke] });
