import { closeSync, openSync } from "node:fs";
import { chmod, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { spawnDetached, sweepAttempt } from "../../../src/os/process.ts";
import { ownProgram } from "../../../src/os/program.ts";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import { makeDialer } from "../../../src/pki/dial.ts";
import type { Dialer } from "../../../src/pki/dial.ts";
import { RankExit } from "../../../src/protocol/agent-api.ts";
import { parseAs } from "../../../src/protocol/errors.ts";
import { FIRST_LEASED_PORT, LAST_LEASED_PORT } from "../../../src/protocol/ids.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { PROTOCOL } from "../../../src/protocol/protocol.ts";
import { ShimStatus } from "../../../src/protocol/shim-api.ts";
import type { WrittenShimSpec } from "../../../src/protocol/shim-api.ts";
import { rankLaunch } from "../../fixtures/launch.ts";
import { testAuthority, type TestAuthority } from "../pki/authority-for-tests.ts";

/** A real shim process with its engine, as an agent would start it. */
export interface TestRank {
  readonly folder: string;
  readonly pid: number;
  readonly launch: RankLaunch;
  readonly gateway: Dialer;
  readonly server: Dialer;
  readonly control_socket: string;
  readonly engine_socket: string;
  status(after?: number): Promise<ShimStatus>;
  /** Waits for a phase; the status then. */
  reach(phase: ShimStatus["phase"], deadline_ms?: number): Promise<ShimStatus>;
  stop(): Promise<void>;
  /** What it left in exit.json. */
  exit(): Promise<RankExit>;
  /** A request through the door. */
  ask(path: string, init?: { method?: string; body?: string; headers?: Record<string, string>; signal?: AbortSignal }): Promise<Response>;
  cleanUp(): Promise<void>;
}

let next = 0;

/** A port of the leased range that is free on loopback now. */
export function freePort(): number {
  for (;;) {
    const port = FIRST_LEASED_PORT + Math.floor(Math.random() * (LAST_LEASED_PORT - FIRST_LEASED_PORT));
    try {
      Bun.listen({ hostname: "127.0.0.1", port, socket: { data: () => {} } }).stop(true);
      return port;
    } catch {
      // Taken: try another.
    }
  }
}

/** Waits until a condition holds; fails with what it waited for. */
export async function until<T>(
  what: string,
  condition: () => Promise<T | null | false> | T | null | false,
  deadline_ms = 15_000,
): Promise<T> {
  const end = Date.now() + deadline_ms;
  for (;;) {
    const value = await condition();
    if (value !== null && value !== false) return value;
    if (Date.now() > end) throw new Error(`waited ${deadline_ms} ms for ${what}`);
    await Bun.sleep(20);
  }
}

export async function startRank(
  more: Partial<RankLaunch> = {},
  spec: Partial<WrittenShimSpec> = {},
  env: Record<string, string> = {},
  given?: TestAuthority,
): Promise<TestRank> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-rank-"));
  // An engine of another user has to pass through to its own places.
  await chmod(folder, 0o711);
  const authority = given ?? (await testAuthority());
  const node = await authority.identity("node", "a");
  await mkdir(join(folder, "rank"));
  const tls = { ca: join(folder, "ca.crt"), cert: join(folder, "node.crt"), key: join(folder, "node.key") };
  await Promise.all([writeFile(tls.ca, node.ca), writeFile(tls.cert, node.cert), writeFile(tls.key, node.key, { mode: 0o600 })]);
  next += 1;
  const attempt =
    (BigInt(Date.now()) * 4096n + BigInt(process.pid % 4096)).toString(16).padStart(14, "0").slice(-14) +
    next.toString(16).padStart(2, "0");
  const launch = rankLaunch({ attempt, door: { address: "127.0.0.1", port: freePort() }, ...more });
  const whole: WrittenShimSpec = {
    protocol: PROTOCOL,
    node: "a",
    launch,
    engine_path: "",
    weights_path: null,
    folder: join(folder, "rank"),
    control_socket: join(folder, "c"),
    engine_socket: join(folder, "engine", "e.sock"),
    tls,
    revocations: [],
    engine_user: null,
    owner_pid: process.pid,
    ...spec,
  };
  await writeFile(join(folder, "spec.json"), JSON.stringify(whole), { mode: 0o600 });
  const log = openSync(join(folder, "shim.log"), "a");
  const pid = await spawnDetached([...ownProgram(), "shim", "--spec", join(folder, "spec.json")], { ...process.env, ...env }, log);
  closeSync(log);
  const gateway = makeDialer(await authority.identity("gateway", `tester-${attempt}`));
  const server = makeDialer(await authority.identity("server", "control"));
  const status = async (after = 0) =>
    parseAs(ShimStatus, await (await fetchUnix(whole.control_socket, `/status?after=${after}`)).json(), "status");
  const exit = async () => parseAs(RankExit, await Bun.file(join(whole.folder, "exit.json")).json(), "exit.json");
  return {
    folder: whole.folder,
    control_socket: whole.control_socket,
    engine_socket: whole.engine_socket,
    pid,
    launch,
    gateway,
    server,
    status,
    exit,
    reach: (phase, deadline_ms) =>
      until(
        `phase ${phase}`,
        async () => {
          const now = await status().catch(() => null);
          return now?.phase === phase ? now : null;
        },
        deadline_ms,
      ),
    stop: async () => {
      await fetchUnix(whole.control_socket, "/stop", { method: "POST", body: JSON.stringify({ reason: "the test asks" }) });
    },
    ask: (path, init = {}) =>
      gateway.request(`https://127.0.0.1:${launch.door.port}${path}`, {
        ...init,
        headers: { "content-type": "application/json", "x-llmgw-attempt": attempt, ...init.headers },
        expect: { role: "node", name: "a" },
      }),
    cleanUp: async () => {
      try {
        process.kill(pid, "SIGKILL");
      } catch {
        // It has ended.
      }
      await sweepAttempt(attempt, null, 5_000);
      await rm(folder, { recursive: true, force: true });
    },
  };
}
