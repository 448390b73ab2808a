import { afterEach, beforeEach, expect, test } from "bun:test";
import { mkdtemp, readdir, rm, stat } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EXIT_LOG_BYTES, EXIT_LOG_LINES_COUNT, LOG_LINE_BYTES } from "../../../src/protocol/limits.ts";
import { lastLinesOf, lineSplitter, RankLog, tailOf } from "../../../src/shim/rank-log.ts";

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-log-"));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

async function sizeOf(): Promise<number> {
  const sizes = (await readdir(folder)).map(async (name) => (await stat(join(folder, name))).size);
  return (await Promise.all(sizes)).reduce((sum, size) => sum + size, 0);
}

test("a log never grows past its bound, and keeps the newest lines in order", async () => {
  const bound = 20_000;
  const log = new RankLog(folder, bound);
  for (let n = 0; n < 10_000; n += 1) {
    log.add(`line ${n}`);
    if (n % 100 === 0) expect(await sizeOf()).toBeLessThanOrEqual(bound);
  }
  const tail = log.tail(500);
  expect(tail).toEqual(Array.from({ length: 500 }, (_, index) => `line ${9_500 + index}`));
  expect(await readdir(folder)).toHaveLength(2);
});

test("a log that is opened again goes on where it was, also when it has ended", () => {
  new RankLog(folder, 10_000).add("before");
  new RankLog(folder, 10_000).add("after");
  expect(tailOf(folder, 10)).toEqual(["before", "after"]);
  expect(tailOf(folder, 1)).toEqual(["after"]);
  for (const none of [0, -1, Number.NaN]) expect(tailOf(folder, none)).toEqual([]);
});

test("a second log of the folder has files of its own", () => {
  new RankLog(folder, 10_000, "shim.log").add("of the shim");
  expect(tailOf(folder, 10)).toEqual([]);
});

test("a folder that is gone loses lines, and nothing else", async () => {
  const log = new RankLog(folder, 100);
  await rm(folder, { recursive: true });
  const heard: string[] = [];
  const stop = log.follow((line) => heard.push(line));
  for (let n = 0; n < 20; n += 1) log.add(`line ${n}`);
  stop();
  log.add("too late");
  expect(heard).toHaveLength(20);
});

test("a line over its bound is cut", () => {
  const log = new RankLog(folder);
  log.add("x".repeat(LOG_LINE_BYTES * 3));
  expect(log.tail(1)[0]).toBe(`${"x".repeat(LOG_LINE_BYTES)}…`);
});

test.each<[string, readonly string[], readonly string[]]>([
  ["lines in pieces", ["a", "b\nc", "\n"], ["ab", "c"]],
  ["a last line without its end", ["a\nb"], ["a", "b"]],
  ["lines of Windows", ["a\r\nb\r\n"], ["a", "b"]],
  ["an empty line", ["a\n\nb\n"], ["a", "", "b"]],
  ["nothing", [], []],
])("%s", (_what, chunks, lines) => {
  const seen: string[] = [];
  const take = lineSplitter((line) => seen.push(line));
  for (const chunk of chunks) take(Buffer.from(chunk));
  take(null);
  expect(seen).toEqual([...lines]);
});

test("a letter of several bytes may come in pieces; a line without end comes in pieces of bounded length", () => {
  const seen: string[] = [];
  const take = lineSplitter((line) => seen.push(line));
  const bytes = Buffer.from("größe\n");
  for (const byte of bytes) take(Uint8Array.of(byte));
  expect(seen).toEqual(["größe"]);
  for (let n = 0; n < 100; n += 1) take(Buffer.alloc(1_000, "y"));
  expect(seen.length).toBeGreaterThan(10);
  expect(Math.max(...seen.map((line) => line.length))).toBeLessThan(LOG_LINE_BYTES + 1_001);
});

test("a secret is in no piece, wherever a stream is cut", () => {
  const key = "0123456789abcdef".repeat(4);
  const secret = { hide: (text: string) => text.replaceAll(key, "(key)"), held_chars: key.length - 1 };
  const text = `${"x".repeat(LOG_LINE_BYTES - 40)}api_key='${key}'${"y".repeat(2 * LOG_LINE_BYTES)}${key}\n${key}\nend`;
  for (let size = 1; size < 6_000; size = Math.ceil(size * 1.3)) {
    const seen: string[] = [];
    const take = lineSplitter((line) => seen.push(line), secret);
    for (let at = 0; at < text.length; at += size) take(Buffer.from(text.slice(at, at + size)));
    take(null);
    expect(seen.join("").split("(key)")).toHaveLength(4);
    // No part of it that would tell the rest.
    expect(seen.filter((line) => line.includes(key.slice(0, 20)))).toEqual([]);
    expect(seen.at(-1)).toBe("end");
  }
});

test("the last lines that travel with an exit are the newest, and as many as fit however they are written", () => {
  const log = new RankLog(folder);
  for (let n = 0; n < 100; n += 1) log.add(`line ${n}`);
  expect(lastLinesOf(folder)).toEqual(Array.from({ length: EXIT_LOG_LINES_COUNT }, (_, index) => `line ${80 + index}`));
  for (let n = 0; n < 100; n += 1) log.add(`${n} ${"\u001b".repeat(500)}`);
  const lines = lastLinesOf(folder);
  expect(lines.at(-1)).toStartWith("99 ");
  expect(Buffer.byteLength(JSON.stringify(lines))).toBeLessThanOrEqual(EXIT_LOG_BYTES * 1.1);
  log.add("\u001b".repeat(LOG_LINE_BYTES));
  expect(lastLinesOf(folder)).toEqual([]);
});
