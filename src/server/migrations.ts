/**
 * The store's form, step by step. A step is never changed once released; a new one only adds, so that the version before
 * can still read what this one writes. SQL that SQLite and PostgreSQL both take.
 */
export const MIGRATIONS: readonly string[] = [
  `
  CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
  CREATE TABLE replicas (id TEXT PRIMARY KEY, document TEXT NOT NULL);
  CREATE TABLE nodes (id TEXT PRIMARY KEY, document TEXT NOT NULL);
  CREATE TABLE api_keys (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE, created_ms BIGINT NOT NULL, revoked_ms BIGINT
  );
  CREATE TABLE events (
    id BIGINT PRIMARY KEY, at_ms BIGINT NOT NULL, level TEXT NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, text TEXT NOT NULL
  );
  CREATE TABLE revocations (name TEXT PRIMARY KEY, until_ms BIGINT NOT NULL);
  CREATE TABLE newest_serials (holder TEXT PRIMARY KEY, serial TEXT NOT NULL);
  `,
  `
  CREATE TABLE node_intents (node TEXT PRIMARY KEY, document TEXT NOT NULL);
  `,
  `
  CREATE TABLE model_scales (model TEXT PRIMARY KEY, document TEXT NOT NULL);
  `,
];

/** The form this version writes. */
export const SCHEMA = MIGRATIONS.length;
/** The oldest version's form that can still work with what this one writes; raised only when a step takes something away. */
export const SCHEMA_READABLE_FROM = 1;
