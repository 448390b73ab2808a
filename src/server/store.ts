import { join } from "node:path";
import * as v from "valibot";
import type { Happening, Replica } from "../core/world.ts";
import { makeFolderOnce } from "../os/files.ts";
import { EventView, ReplicaState, type KeyView } from "../protocol/admin-api.ts";
import { ModelSpec, SizedModel } from "../protocol/catalog.ts";
import { OperatorError } from "../protocol/errors.ts";
import { ModelName, NodeId, ReplicaId } from "../protocol/ids.ts";
import { Inventory } from "../protocol/inventory.ts";
import { KEPT_EVENTS_COUNT } from "../protocol/limits.ts";
import type { Snapshot } from "../protocol/gateway-api.ts";
import { PlanVersion, RankLaunch, Revocation } from "../protocol/plan.ts";
import { Database, type Run } from "./database.ts";
import { MIGRATIONS, SCHEMA_READABLE_FROM } from "./migrations.ts";

/** The file in the state folder. */
const FILE = "llmgw.db";

const json = <S extends v.GenericSchema>(schema: S) => v.pipe(v.string(), v.parseJson(), schema);

/** What the store itself wrote, checked all the same: somebody may have edited it. @throws OperatorError E_FILE */
function read<S extends v.GenericSchema>(schema: S, value: unknown, subject: string): v.InferOutput<S> {
  const result = v.safeParse(schema, value);
  if (result.success) return result.output;
  const [issue] = result.issues;
  const why = `${subject} in it is not valid: ${v.getDotPath(issue) ?? "all of it"}: ${issue.message}`;
  throw new OperatorError(
    "E_FILE",
    `cannot read the store ${FILE}`,
    why,
    "put back a copy, or move it away: a new store takes over what runs",
  );
}

const StoredReplica = json(
  v.object({
    id: ReplicaId,
    model: ModelName,
    spec: SizedModel,
    created_ms: v.number(),
    state: ReplicaState,
    since_ms: v.number(),
    reason: v.string(),
    placements: v.array(v.object({ node: NodeId, launch: RankLaunch })),
    taken_up: v.boolean(),
    progress: v.nullable(v.object({ done: v.number(), at_ms: v.number() })),
    ready_since_ms: v.nullable(v.number()),
    failures: v.number(),
    next_try_ms: v.nullable(v.number()),
    avoid: v.nullable(NodeId),
    last_lines: v.array(v.string()),
    replace: v.optional(v.nullable(v.picklist(["restart", "move"])), null),
  }),
);

/** What an operator wants of a node; it outlives the server. */
const StoredIntent = json(
  v.object({
    cordon: v.boolean(),
    drain: v.nullable(v.object({ since_ms: v.number(), stop_first: v.boolean(), deadline_ms: v.nullable(v.number()) })),
    by: v.string(),
  }),
);
export type NodeIntent = v.InferOutput<typeof StoredIntent>;

/** How many replicas an operator wants of a model instead of the catalog's number. */
const StoredScale = json(v.object({ replicas: ModelSpec.entries.replicas, by: v.string() }));
export type ModelScale = v.InferOutput<typeof StoredScale>;

/** What is kept of a node while it is away. */
export const StoredNode = v.object({
  id: NodeId,
  address: v.string(),
  agent_version: v.string(),
  joined_ms: v.number(),
  last_seen_ms: v.number(),
  clock_offset_ms: v.number(),
  certificate_expires_ms: v.number(),
  /** Absent when a version of llmgw kept it that did not know this. */
  certificate_issued_ms: v.optional(v.number()),
  /** The machine it is, and the address its messages came from last. */
  machine_id: v.string(),
  peer_address: v.string(),
  inventory: Inventory,
});
export type StoredNode = v.InferOutput<typeof StoredNode>;

const KeyRow = v.object({
  id: v.string(),
  name: v.string(),
  sha256: v.string(),
  created_ms: v.number(),
  revoked_ms: v.nullable(v.number()),
});
export type KeyRow = v.InferOutput<typeof KeyRow>;

/** A decision that is to outlive the server. */
interface Commit {
  readonly version: PlanVersion;
  readonly changed: readonly Replica[];
  readonly gone: readonly ReplicaId[];
  readonly events: readonly Happening[];
}

/** What a new store has from one that is gone: who may ask, and who is refused. */
type Heritage = Pick<Snapshot, "keys" | "revocations">;

/** What the server remembers. Every method is one transaction or one statement. */
export class Store {
  readonly #database: Database;
  #last_event = 0;

  private constructor(database: Database) {
    this.#database = database;
  }

  /**
   * Opens the store of a state folder and brings it to this version's form.
   * @param new_epoch for a store that is new
   * @param heritage asked for a store that is new
   * @throws OperatorError E_FILE (damaged, or of a newer llmgw), E_EXISTS (in use)
   */
  static async open(state: string, new_epoch: number, heritage: () => Promise<Heritage | null> = async () => null): Promise<Store> {
    await makeFolderOnce(state, 0o700);
    const path = join(state, FILE);
    const database = await Database.open(path);
    const store = new Store(database);
    try {
      await store.#migrate();
      const [last] = await database.run`SELECT MAX(id) AS id FROM events`;
      store.#last_event = Number(last?.["id"] ?? 0);
      const [version] = await database.run`SELECT value FROM meta WHERE name = ${"version"}`;
      if (!version) await store.#begin(new_epoch, await heritage());
      return store;
    } catch (error) {
      await database.close();
      throw error;
    }
  }

  async #migrate(): Promise<void> {
    await this.#database.run`CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL, readable_from BIGINT NOT NULL)`;
    const [row] = await this.#database.run`SELECT MAX(version) AS version FROM schema_version`;
    const has = Number(row?.["version"] ?? 0);
    // A newer form that this version can read stays as it is.
    for (const [index, step] of MIGRATIONS.entries()) {
      const mark = `INSERT INTO schema_version (version, readable_from) VALUES (${index + 1}, ${SCHEMA_READABLE_FROM})`;
      if (index >= has) await this.#database.script(`${step}; ${mark}`);
    }
  }

  /** Makes a new store one that has begun, whole or not at all. */
  #begin(epoch: number, heritage: Heritage | null): Promise<void> {
    return this.#database.transaction(async (run) => {
      const { keys, revocations } = heritage ?? { keys: [], revocations: [] };
      for (const { id, name, sha256 } of keys)
        await run`INSERT INTO api_keys (id, name, sha256, created_ms) VALUES (${id}, ${name}, ${sha256}, ${epoch * 1_000})`;
      for (const { name, until_ms } of revocations) await run`INSERT INTO revocations (name, until_ms) VALUES (${name}, ${until_ms})`;
      await this.#setVersion(run, { epoch, generation: 0 });
      if (keys.length + revocations.length === 0) return;
      const text = `it is new; ${keys.length} keys and ${revocations.length} revocations are from the gateway's last snapshot`;
      await this.#addEvents(run, [{ level: "warn", kind: "store-new", subject: "server", text }], epoch * 1_000);
    });
  }

  async #setVersion(run: Run, version: PlanVersion): Promise<void> {
    const value = JSON.stringify(version);
    await run`INSERT INTO meta (name, value) VALUES (${"version"}, ${value}) ON CONFLICT (name) DO UPDATE SET value = excluded.value`;
  }

  /** The newest plan version given out. */
  async version(): Promise<PlanVersion> {
    const [row] = await this.#database.run`SELECT value FROM meta WHERE name = ${"version"}`;
    return read(json(PlanVersion), row?.["value"], "the plan's version");
  }

  async replicas(): Promise<Replica[]> {
    const rows = await this.#database.run`SELECT document FROM replicas ORDER BY id`;
    return rows.map((row) => read(StoredReplica, row["document"], "a replica"));
  }

  /** Keeps a decision, whole. */
  commit({ version, changed, gone, events }: Commit, now_ms: number): Promise<void> {
    return this.#database.transaction(async (run) => {
      await this.#setVersion(run, version);
      for (const replica of changed) {
        const document = JSON.stringify(replica);
        await run`INSERT INTO replicas (id, document) VALUES (${replica.id}, ${document})
          ON CONFLICT (id) DO UPDATE SET document = excluded.document`;
      }
      for (const id of gone) await run`DELETE FROM replicas WHERE id = ${id}`;
      await this.#addEvents(run, events, now_ms);
    });
  }

  async #addEvents(run: Run, events: readonly Happening[], now_ms: number): Promise<void> {
    for (const { level, kind, subject, text } of events) {
      this.#last_event += 1;
      await run`INSERT INTO events (id, at_ms, level, kind, subject, text)
        VALUES (${this.#last_event}, ${now_ms}, ${level}, ${kind}, ${subject}, ${text})`;
    }
    if (events.length > 0) await run`DELETE FROM events WHERE id <= ${this.#last_event - KEPT_EVENTS_COUNT}`;
  }

  addEvent(event: Happening, now_ms: number): Promise<void> {
    return this.#database.transaction((run) => this.#addEvents(run, [event], now_ms));
  }

  /** The newest events after one, oldest first. */
  async events(after: number, limit: number): Promise<EventView[]> {
    const rows = await this.#database.run`SELECT * FROM events WHERE id > ${after} ORDER BY id DESC LIMIT ${limit}`;
    return rows.map((row) => read(EventView, row, "an event")).reverse();
  }

  async nodes(): Promise<StoredNode[]> {
    const rows = await this.#database.run`SELECT document FROM nodes ORDER BY id`;
    return rows.map((row) => read(json(StoredNode), row["document"], "a node"));
  }

  async saveNode(node: StoredNode): Promise<void> {
    const document = JSON.stringify(node);
    await this.#database.run`INSERT INTO nodes (id, document) VALUES (${node.id}, ${document})
        ON CONFLICT (id) DO UPDATE SET document = excluded.document`;
  }

  /** What operators want of nodes, by node. */
  async intents(): Promise<Map<NodeId, NodeIntent>> {
    const rows = await this.#database.run`SELECT node, document FROM node_intents ORDER BY node`;
    return new Map(rows.map((row) => [String(row["node"]), read(StoredIntent, row["document"], "a node's intent")]));
  }

  /** @param intent null = nothing special any more */
  async saveIntent(node: NodeId, intent: NodeIntent | null): Promise<void> {
    if (intent === null) {
      await this.#database.run`DELETE FROM node_intents WHERE node = ${node}`;
      return;
    }
    const document = JSON.stringify(intent);
    await this.#database.run`INSERT INTO node_intents (node, document) VALUES (${node}, ${document})
      ON CONFLICT (node) DO UPDATE SET document = excluded.document`;
  }

  /** Numbers of replicas that count instead of the catalog's, by model. */
  async scales(): Promise<Map<ModelName, ModelScale>> {
    const rows = await this.#database.run`SELECT model, document FROM model_scales ORDER BY model`;
    return new Map(rows.map((row) => [String(row["model"]), read(StoredScale, row["document"], "a model's scale")]));
  }

  /** @param scale null = the catalog's number counts again */
  async saveScale(model: ModelName, scale: ModelScale | null): Promise<void> {
    if (scale === null) {
      await this.#database.run`DELETE FROM model_scales WHERE model = ${model}`;
      return;
    }
    const document = JSON.stringify(scale);
    await this.#database.run`INSERT INTO model_scales (model, document) VALUES (${model}, ${document})
      ON CONFLICT (model) DO UPDATE SET document = excluded.document`;
  }

  /** Forgets a node, and what was wanted of it. */
  removeNode(node: NodeId): Promise<void> {
    return this.#database.transaction(async (run) => {
      await run`DELETE FROM nodes WHERE id = ${node}`;
      await run`DELETE FROM node_intents WHERE node = ${node}`;
    });
  }

  async keys(): Promise<KeyRow[]> {
    const rows = await this.#database.run`SELECT id, name, sha256, created_ms, revoked_ms FROM api_keys ORDER BY created_ms, id`;
    return rows.map((row) => read(KeyRow, row, "a key"));
  }

  async addKey({ id, name, created_ms }: KeyView, sha256: string): Promise<void> {
    await this.#database.run`INSERT INTO api_keys (id, name, sha256, created_ms) VALUES (${id}, ${name}, ${sha256}, ${created_ms})`;
  }

  async revokeKey(id: string, now_ms: number): Promise<void> {
    await this.#database.run`UPDATE api_keys SET revoked_ms = ${now_ms} WHERE id = ${id} AND revoked_ms IS NULL`;
  }

  async revocations(): Promise<Revocation[]> {
    const rows = await this.#database.run`SELECT name, until_ms FROM revocations ORDER BY name`;
    return rows.map((row) => read(Revocation, row, "a revocation"));
  }

  async revoke({ name, until_ms }: Revocation): Promise<void> {
    await this.#database.run`INSERT INTO revocations (name, until_ms) VALUES (${name}, ${until_ms})
        ON CONFLICT (name) DO UPDATE SET until_ms = excluded.until_ms`;
  }

  /** The newest serial seen of each `role/name`. */
  async newestSerials(): Promise<Map<string, string>> {
    const rows = await this.#database.run`SELECT holder, serial FROM newest_serials`;
    return new Map(rows.map((row) => [String(row["holder"]), String(row["serial"])]));
  }

  async saveNewestSerial(holder: string, serial: string): Promise<void> {
    await this.#database.run`INSERT INTO newest_serials (holder, serial) VALUES (${holder}, ${serial})
        ON CONFLICT (holder) DO UPDATE SET serial = excluded.serial`;
  }

  close(): Promise<void> {
    return this.#database.close();
  }
}
