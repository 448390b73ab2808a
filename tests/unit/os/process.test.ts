import { afterEach, expect, test } from "bun:test";
import type { ChildProcess } from "node:child_process";
import { readFileSync } from "node:fs";
import {
  ATTEMPT_VARIABLE,
  bootId,
  intakeOf,
  isAlive,
  processesOf,
  signalProcess,
  spawnSession,
  startTimeOf,
  sweepAttempt,
  watchOwner,
} from "../../../src/os/process.ts";
import { waitGone } from "./process-for-tests.ts";
import { until } from "../shim/rank-for-tests.ts";

const started: ChildProcess[] = [];
afterEach(async () => {
  for (const child of started.splice(0)) if (child.pid !== undefined) signalProcess(child.pid, "SIGKILL", "group");
});

let next = 0;
const newAttempt = () => (BigInt(process.pid) * 1_000_000n + BigInt((next += 1))).toString(16).padStart(16, "a");

/** A shell script in its own session, which carries an attempt's tag. */
async function script(text: string, attempt = newAttempt()): Promise<{ pid: number; attempt: string; child: ChildProcess }> {
  const child = spawnSession(["sh", "-c", text], { ...process.env, [ATTEMPT_VARIABLE]: attempt }, "/");
  started.push(child);
  await new Promise((resolve) => child.once("spawn", resolve));
  return { pid: child.pid as number, attempt, child };
}

test("a child has a session of its own, so that signals for us do not reach it", async () => {
  const { pid } = await script("exec sleep 60");
  const [, session] = /\) . \d+ \d+ (\d+)/.exec(readFileSync(`/proc/${pid}/stat`, "utf8")) ?? [];
  expect(Number(session)).toBe(pid);
});

test("a signal reaches the leader alone, or all of its group", async () => {
  const { pid, attempt } = await script("sleep 60 & sleep 60 & wait");
  await until("its children", async () => (await processesOf(attempt, null)).length === 3);
  signalProcess(pid, "SIGKILL", "leader");
  expect(await waitGone(pid, 5_000)).toBe(true);
  expect(await processesOf(attempt, null)).toHaveLength(2);
  signalProcess(pid, "SIGKILL", "group");
  await until("all to be gone", async () => (await processesOf(attempt, null)).length === 0);
  expect(signalProcess(pid, "SIGTERM", "leader")).toBe(false);
});

test("an attempt's processes are found by tag in any session, and by session without a tag", async () => {
  const { pid, attempt } = await script(`setsid sleep 61 & env -u ${ATTEMPT_VARIABLE} sleep 62 & wait`);
  // One is still the shell's own copy, tag and all, until it has become the program without.
  const counts = async () => [(await processesOf(attempt, null)).length, (await processesOf(attempt, pid)).length];
  await until("two with the tag, three with the session", async () => Bun.deepEquals(await counts(), [2, 3]));
  expect(await processesOf(newAttempt(), null)).toEqual([]);
  expect(await sweepAttempt(attempt, pid, 5_000)).toEqual([]);
  expect(await processesOf(attempt, pid)).toEqual([]);
});

test("a sweep spares whom it is told to, and leaves others alone", async () => {
  const one = await script("exec sleep 60");
  const other = await script("exec sleep 60");
  expect(await sweepAttempt(one.attempt, null, 5_000, [one.pid])).toEqual([]);
  expect([isAlive(one.pid), isAlive(other.pid)]).toEqual([true, true]);
});

test("a zombie counts as gone", async () => {
  // Its parent is a shell that became a sleep and never asks for it.
  const { child } = await script("sh -c 'echo $$' & exec sleep 60");
  const pid = await new Promise<number>((resolve) => child.stdout?.once("data", (data: Buffer) => resolve(Number(data.toString()))));
  await until("it to be a zombie", () => readFileSync(`/proc/${pid}/stat`, "utf8").includes(") Z "));
  expect(isAlive(pid)).toBe(false);
});

test("boot id and start time name one process for ever", async () => {
  const { pid } = await script("exec sleep 60");
  const start = startTimeOf(pid);
  expect(start).toBeGreaterThan(0);
  expect(startTimeOf(pid)).toBe(start);
  expect(await bootId()).toMatch(/^[0-9a-f-]{36}$/);
  signalProcess(pid, "SIGKILL", "leader");
  await waitGone(pid, 5_000);
  await until("its end", () => startTimeOf(pid) === null);
});

test("waiting for one that stays ends at its deadline", async () => {
  const { pid } = await script("exec sleep 60");
  expect(await waitGone(pid, 100)).toBe(false);
});

test("an owner's end is told once", async () => {
  const { pid } = await script("exec sleep 60");
  let told = 0;
  const stop = watchOwner(pid, () => (told += 1));
  signalProcess(pid, "SIGKILL", "leader");
  await until("the word", () => told === 1, 5_000);
  stop();
});

test("what a session reads and holds shows as its intake", async () => {
  const { pid } = await script("exec dd if=/dev/zero bs=1M count=200 status=none | sleep 60");
  await until("the pipe to fill", async () => (await intakeOf(pid)) > 1_000_000);
  const { pid: idle } = await script("exec sleep 60");
  expect(await intakeOf(idle)).toBeGreaterThan(0);
  signalProcess(idle, "SIGKILL", "group");
  await until("nothing of one that is gone", async () => (await intakeOf(idle)) === 0);
});
