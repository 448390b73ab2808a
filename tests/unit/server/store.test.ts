import { afterEach, beforeEach, expect, test } from "bun:test";
import { mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { SQL } from "bun";
import { Database } from "../../../src/server/database.ts";
import { Store } from "../../../src/server/store.ts";
import { refusal } from "./control-plane-for-tests.ts";
import { modelOf, TestFleet } from "../core/fleet-for-tests.ts";

let folder = "";
let file = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-store-"));
  file = join(folder, "llmgw.db");
});
afterEach(() => rm(folder, { recursive: true, force: true }));

test("two interleaved callers, one rolling back, lose nothing of the other's", async () => {
  const database = await Database.open(file);
  await database.run`CREATE TABLE t (name TEXT PRIMARY KEY)`;
  const entered = Promise.withResolvers<void>();
  const go = Promise.withResolvers<void>();
  const failing = database.transaction(async (run) => {
    await run`INSERT INTO t (name) VALUES ('undone')`;
    entered.resolve();
    await go.promise;
    throw new Error("changed my mind");
  });
  await entered.promise;
  // Issued while the other's transaction is open.
  const single = database.run`INSERT INTO t (name) VALUES ('kept')`;
  const whole = database.transaction(async (run) => {
    await run`INSERT INTO t (name) VALUES ('kept too')`;
    await run`INSERT INTO t (name) VALUES ('and this')`;
  });
  go.resolve();
  expect((await refusal(failing)).message).toContain("changed my mind");
  await Promise.all([single, whole]);
  const rows = await database.run`SELECT name FROM t ORDER BY name`;
  expect(rows.map((row) => row["name"])).toEqual(["and this", "kept", "kept too"]);
  await database.close();
});

test("a full disk is told as such, also where SQLite has rolled back by itself, and what is freed is used again", async () => {
  const database = await Database.open(file);
  await database.run`CREATE TABLE t (text TEXT)`;
  await database.script("PRAGMA max_page_count = 8");
  const fill = () => database.transaction((run) => run`INSERT INTO t (text) VALUES (${"x".repeat(100_000)})`);
  const error = await refusal(fill());
  expect(error).toMatchObject({ code: "E_FILE", why: expect.stringContaining("full") });
  await database.script("PRAGMA max_page_count = 1000");
  await fill();
  expect(await database.run`SELECT COUNT(*) AS count FROM t`).toEqual([{ count: 1 }]);
  await database.close();
});

test("a statement that fails holds nobody up", async () => {
  const database = await Database.open(file);
  const wrong = refusal(database.run`SELECT * FROM absent`);
  const right = database.run`SELECT 1 AS one`;
  expect((await wrong).message).toContain("no such table");
  expect((await right)[0]?.["one"]).toBe(1);
  await database.close();
});

test("what is written is there after a restart, and the epoch is as before", async () => {
  const fleet = new TestFleet([{ id: "a" }], [modelOf("m", { args: { speed: 2, flag: true } })]);
  fleet.turns(3);
  const store = await Store.open(folder, 1_700_000_000);
  const version = { epoch: 1_700_000_000, generation: 7 };
  await store.commit({ version, changed: fleet.replicas, gone: [], events: fleet.events }, 5);
  await store.addKey({ id: "k1", name: "alice", created_ms: 1, revoked_ms: null }, "f".repeat(64));
  await store.revokeKey("k1", 9);
  await store.revoke({ name: "a", until_ms: 3 });
  await store.revoke({ name: "a", until_ms: 4 });
  await store.saveNewestSerial("node/a", "0018");
  await store.close();
  const again = await Store.open(folder, 1_800_000_000);
  expect(await again.version()).toEqual(version);
  expect(await again.replicas()).toEqual([...fleet.replicas] as never);
  expect(await again.keys()).toEqual([{ id: "k1", name: "alice", sha256: "f".repeat(64), created_ms: 1, revoked_ms: 9 }]);
  expect(await again.revocations()).toEqual([{ name: "a", until_ms: 4 }]);
  expect(await again.newestSerials()).toEqual(new Map([["node/a", "0018"]]));
  const events = await again.events(0, 100);
  expect(events.map(({ kind }) => kind)).toEqual(fleet.kinds());
  expect((await again.events(1, 1)).map(({ id }) => id)).toEqual([fleet.events.length]);
  await again.commit({ version, changed: [], gone: fleet.replicas.map(({ id }) => id), events: [] }, 6);
  expect(await again.replicas()).toEqual([]);
  await again.close();
});

test("a new store takes over who may ask and who is refused, once; one that is not new asks for nothing", async () => {
  const heritage = { keys: [{ id: "k1", name: "alice", sha256: "f".repeat(64) }], revocations: [{ name: "a", until_ms: 3 }] };
  const store = await Store.open(folder, 7, async () => heritage);
  expect(await store.keys()).toEqual([{ id: "k1", name: "alice", sha256: "f".repeat(64), created_ms: 7_000, revoked_ms: null }]);
  expect(await store.revocations()).toEqual(heritage.revocations);
  expect((await store.events(0, 10)).map(({ kind, text }) => `${kind}: ${text}`)).toEqual([
    "store-new: it is new; 1 keys and 1 revocations are from the gateway's last snapshot",
  ]);
  await store.revokeKey("k1", 8_000);
  await store.close();
  const again = await Store.open(folder, 9, () => Promise.reject(new Error("asked again")));
  expect((await again.keys()).map(({ revoked_ms }) => revoked_ms)).toEqual([8_000]);
  await again.close();
});

test("what is stored can be read by its owner alone, also what is not in the database yet", async () => {
  const database = await Database.open(file);
  await database.script("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1)");
  for (const name of await readdir(folder)) expect([name, (await stat(join(folder, name))).mode & 0o777]).toEqual([name, 0o600]);
  expect(await readdir(folder)).toContain("llmgw.db-wal");
  await database.close();
});

test("one server per state folder", async () => {
  const store = await Store.open(folder, 1);
  expect(await refusal(Store.open(folder, 2))).toMatchObject({ code: "E_EXISTS", why: "another server uses it" });
  await store.close();
  await (await Store.open(folder, 2)).close();
});

async function edit(statement: string): Promise<void> {
  const sql = new SQL({ adapter: "sqlite", filename: file });
  await sql.unsafe(statement);
  await sql.unsafe("PRAGMA wal_checkpoint(TRUNCATE)");
  await sql.unsafe("PRAGMA journal_mode = DELETE");
  await sql.close();
}

const UNUSABLE: [string, () => Promise<void>, string][] = [
  ["is damaged", () => writeFile(file, "this is no database ".repeat(500)), "file is not a database"],
  ["is of something else", () => edit("CREATE TABLE songs (name TEXT)"), "it is a database of something else"],
  [
    "needs a newer llmgw",
    async () => {
      await (await Store.open(folder, 1)).close();
      await edit("INSERT INTO schema_version (version, readable_from) VALUES (99, 98)");
    },
    "it is of a newer llmgw: its form needs number 98",
  ],
];

test.each(UNUSABLE)("a file that %s is refused and stays as it is", async (_name, make, why) => {
  await make();
  const before = await readFile(file);
  const error = await refusal(Store.open(folder, 1));
  expect(error.code).toBe("E_FILE");
  expect(error.why).toContain(why);
  expect((await readFile(file)).equals(before)).toBe(true);
});

test("a newer form that this version can read is used and left in that form", async () => {
  await (await Store.open(folder, 5)).close();
  await edit("INSERT INTO schema_version (version, readable_from) VALUES (99, 1)");
  await edit("ALTER TABLE api_keys ADD COLUMN colour TEXT");
  const store = await Store.open(folder, 6);
  expect(await store.version()).toEqual({ epoch: 5, generation: 0 });
  await store.addKey({ id: "k", name: "n", created_ms: 1, revoked_ms: null }, "0".repeat(64));
  expect(await store.keys()).toHaveLength(1);
  await store.close();
});

test.each<[string, string, (store: Store) => Promise<unknown>]>([
  ["a replica", "INSERT INTO replicas (id, document) VALUES ('m-00000', '{}')", (store) => store.replicas()],
  ["a revocation", "INSERT INTO revocations (name, until_ms) VALUES ('a', 'soon')", (store) => store.revocations()],
])("%s that somebody spoilt is named", async (what, statement, readBack) => {
  await (await Store.open(folder, 5)).close();
  await edit(statement);
  const store = await Store.open(folder, 6);
  const error = await refusal(readBack(store));
  expect(error).toMatchObject({ code: "E_FILE" });
  expect(error.why).toContain(`${what} in it is not valid`);
  await store.close();
});
