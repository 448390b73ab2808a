import { existsSync } from "node:fs";
import { open, statfs } from "node:fs/promises";
import { dirname } from "node:path";
import { SQL } from "bun";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { SCHEMA } from "./migrations.ts";

/** A tagged template that runs one statement: values become parameters. */
export type Run = (strings: TemplateStringsArray, ...values: unknown[]) => Promise<Record<string, unknown>[]>;

/**
 * One database, one statement at a time. Bun's SQLite is a single connection: a statement issued while somebody else's
 * transaction is open would join it and be rolled back with it. So all statements pass one queue, and a transaction
 * holds it from begin to end.
 */
export class Database {
  readonly #sql: SQL;
  #tail: Promise<unknown> = Promise.resolve();

  private constructor(sql: SQL) {
    this.#sql = sql;
  }

  /**
   * Opens (or makes) a database file for this process alone.
   * @throws OperatorError E_EXISTS when another server has it open; E_FILE when it cannot be used: the file stays as it is
   */
  static async open(path: string): Promise<Database> {
    if (existsSync(path)) await inspect(path);
    try {
      // SQLite gives its log the mode of its file, and makes a file of its own readable by all.
      await (await open(path, "a", 0o600)).close();
      const sql = new SQL({ adapter: "sqlite", filename: path, create: true, readwrite: true });
      for (const pragma of ["locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"]) await sql.unsafe(`PRAGMA ${pragma}`);
      // The lock is taken by the first write.
      await sql.unsafe("BEGIN IMMEDIATE");
      await sql.unsafe("COMMIT");
      return new Database(sql);
    } catch (error) {
      throw await unusable(path, error);
    }
  }

  /** Runs one statement in its turn. */
  run: Run = (strings, ...values) => this.#inTurn(() => this.#direct(strings, ...values));

  readonly #direct: Run = async (strings, ...values) => [...((await this.#sql(strings, ...values)) as Iterable<Record<string, unknown>>)];

  /** Runs statements that count together or not at all; only `run` as given may be used inside. */
  transaction<T>(work: (run: Run) => Promise<T>): Promise<T> {
    return this.#inTurn(async () => {
      await this.#sql.unsafe("BEGIN IMMEDIATE");
      try {
        const result = await work(this.#direct);
        await this.#sql.unsafe("COMMIT");
        return result;
      } catch (error) {
        // SQLite rolls back by itself when the disk is full; the first error is the one that tells.
        await this.#sql.unsafe("ROLLBACK").catch(() => {});
        throw error;
      }
    });
  }

  /** Runs a fixed text of several statements as one, for migrations. */
  script(text: string): Promise<void> {
    const statements = text.split(";").map((part) => part.trim());
    return this.transaction(async () => {
      for (const statement of statements) if (statement !== "") await this.#sql.unsafe(statement);
    });
  }

  #inTurn<T>(work: () => Promise<T>): Promise<T> {
    const turn = this.#tail.then(work).catch((error: unknown) => {
      throw /disk is full|disk I\/O|readonly/i.test(messageOf(error)) ? unwritable(error) : error;
    });
    this.#tail = turn.catch(() => {});
    return turn;
  }

  async close(): Promise<void> {
    await this.#tail;
    await this.#sql.close();
  }
}

function unwritable(cause: unknown): OperatorError {
  const remedy = "free some space on the file system of the `state` folder; the server goes on by itself then";
  return new OperatorError("E_FILE", "the store cannot be written", messageOf(cause), remedy, { cause });
}

/** What SQLite needs beside a database to open it (its `-shm` has at least 32 KiB), in bytes. */
const ROOM_TO_OPEN_BYTES = 64 * 1024;

/** Why a database cannot be opened. */
async function unusable(path: string, error: unknown): Promise<OperatorError> {
  if (error instanceof OperatorError) return error;
  const why = messageOf(error);
  if (/locked|busy/i.test(why)) {
    const remedy = "stop that server, or set another `state` folder";
    return new OperatorError("E_EXISTS", `cannot open ${path}`, "another server uses it", remedy, { cause: error });
  }
  const disk = await statfs(dirname(path)).catch(() => null);
  if (disk !== null && disk.bavail * disk.bsize < ROOM_TO_OPEN_BYTES) {
    const room = "free some space there, and start the server again: the store is as it was";
    return new OperatorError("E_FILE", `cannot open ${path}`, `the disk is full (${why})`, room, { cause: error });
  }
  const remedy = "put a copy in its place while the server is stopped, or move it away: a new store takes over what runs";
  return new OperatorError("E_FILE", `cannot open ${path}`, why, remedy, { cause: error });
}

/** Looks without writing whether a file is whole, ours and readable by this version. */
async function inspect(path: string): Promise<void> {
  const sql = new SQL({ adapter: "sqlite", filename: path, readonly: true });
  try {
    const [check] = (await sql.unsafe("PRAGMA quick_check(1)")) as Record<string, unknown>[];
    if (check?.["quick_check"] !== "ok") throw new Error(`it is damaged: ${String(check?.["quick_check"])}`);
    const tables = (await sql.unsafe("SELECT name FROM sqlite_master WHERE type = 'table'")) as { name: string }[];
    if (tables.length === 0) return;
    if (!tables.some(({ name }) => name === "schema_version")) throw new Error("it is a database of something else");
    const rows = (await sql.unsafe("SELECT version, readable_from FROM schema_version")) as Record<string, unknown>[];
    const needs = Math.max(0, ...rows.map((row) => Number(row["readable_from"])));
    if (needs > SCHEMA) throw new Error(`it is of a newer llmgw: its form needs number ${needs}, this one knows ${SCHEMA}`);
  } catch (error) {
    throw await unusable(path, error);
  } finally {
    await sql.close();
  }
}
