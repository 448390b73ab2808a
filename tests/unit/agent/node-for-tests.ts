import { mkdtemp, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runAgent } from "../../../src/agent/agent.ts";
import type { AgentOptions } from "../../../src/agent/agent.ts";
import { makeLog } from "../../../src/os/log.ts";
import { isAlive, signalProcess, sweepAttempt } from "../../../src/os/process.ts";
import { ownProgram } from "../../../src/os/program.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { AgentConfig } from "../../../src/protocol/config.ts";
import { parseAs } from "../../../src/protocol/errors.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { rankLaunch } from "../../fixtures/launch.ts";
import { freePort, until } from "../shim/rank-for-tests.ts";

/** A node's folders; agents come and go in it. */
export interface TestNode {
  readonly folder: string;
  readonly lines: string[];
  readonly config: AgentConfig;
  readonly options: AgentOptions;
  /** An agent in this process. It is ended like one that is killed: at once, leaving all as it is. */
  start(more?: Partial<AgentOptions>): { readonly over: Promise<void>; end(): Promise<void> };
  /** An agent in a process of its own. */
  spawn(...more: string[]): Bun.Subprocess<"ignore", "pipe", "pipe">;
  writeIdentity(identity: Identity): Promise<void>;
  launch(more?: Partial<RankLaunch>): RankLaunch;
  /** Ends all that was started, and removes the folder. */
  cleanUp(): Promise<void>;
}

let last = 0;
/** An attempt no other test has: sweeps look through the whole machine. */
function newAttempt(): string {
  last += 1;
  return `${process.pid.toString(16).padStart(6, "0").slice(-6)}${(Date.now() * 64 + last).toString(16).padStart(10, "0").slice(-10)}`;
}

export async function testNode(identity: Identity, servers: string[], more: Partial<AgentConfig> = {}): Promise<TestNode> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-node-"));
  const tls = { ca: join(folder, "ca.crt"), cert: join(folder, "node.crt"), key: join(folder, "node.key") };
  const given = {
    node: "a",
    servers,
    address: "127.0.0.1",
    tls,
    state: join(folder, "state"),
    run: join(folder, "run"),
    engine_user: "llmgw-none",
    ...more,
  };
  const config = parseAs(AgentConfig, given, "the test's configuration");
  const lines: string[] = [];
  const log = makeLog({ level: "debug", format: "text", write: (line) => lines.push(line) });
  const ends: (() => unknown)[] = [];
  const writeIdentity = async ({ ca, cert, key }: Identity) => {
    await Promise.all([writeFile(tls.ca, ca), writeFile(tls.cert, cert), writeFile(tls.key, key, { mode: 0o600 })]);
  };
  await writeIdentity(identity);
  await writeFile(join(folder, "agent.yaml"), JSON.stringify(config));
  const options: AgentOptions = { config, log, signal: new AbortController().signal, owner_pid: process.pid };
  return {
    folder,
    lines,
    config,
    options,
    writeIdentity,
    start: (rest = {}) => {
      const over = new AbortController();
      const done = runAgent({ ...options, ...rest, signal: over.signal });
      const end = async () => {
        over.abort();
        await done;
      };
      ends.push(() => end().catch(() => {}));
      return { over: done, end };
    },
    spawn: (...words) => {
      const argv = [...ownProgram(), "agent", ...words, "--config", join(folder, "agent.yaml"), "--owner-pid", String(process.pid)];
      const child = Bun.spawn(argv, { stdin: "ignore", stdout: "pipe", stderr: "pipe", cwd: "/" });
      ends.push(() => child.kill("SIGKILL"));
      return child;
    },
    launch: (rest = {}) => rankLaunch({ attempt: newAttempt(), door: { address: "127.0.0.1", port: freePort() }, ...rest }),
    cleanUp: async () => {
      for (const end of ends) await end();
      const attempts = await readdir(join(config.state, "ranks")).catch(() => []);
      for (const attempt of attempts) {
        const spec = join(config.state, "ranks", attempt, "spec.json");
        for (const pid of await shimsOf(spec)) signalProcess(pid, "SIGKILL", "leader");
        await sweepAttempt(attempt, null, 5_000);
      }
      await rm(folder, { recursive: true, force: true });
    },
  };
}

/** Processes that were started with this file in their command line. */
export async function shimsOf(file: string): Promise<number[]> {
  const found: number[] = [];
  for (const entry of await readdir("/proc")) {
    if (!/^\d+$/.test(entry) || Number(entry) === process.pid) continue;
    const line = await Bun.file(`/proc/${entry}/cmdline`)
      .text()
      .catch(() => "");
    if (line.split("\0").includes(file)) found.push(Number(entry));
  }
  return found;
}

/** Waits until a process is gone. */
export const isGone = (pid: number): Promise<true> => until(`process ${pid} to end`, () => (isAlive(pid) ? null : true));
