import { createHash } from "node:crypto";
import { spawn, type ChildProcess } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ownProgram } from "../../../src/os/program.ts";
import { fetchUnix } from "../../../src/os/unix-http.ts";
import { parseAs } from "../../../src/protocol/errors.ts";
import { GatewayStatus, type ModelRoute, type Snapshot, type Target } from "../../../src/protocol/gateway-api.ts";
import { testAuthority, type TestAuthority } from "../pki/authority-for-tests.ts";
import { freePort, until, type TestRank } from "../shim/rank-for-tests.ts";

export const KEY = "llmgw_test_0123456789abcdefghijklmnop";
export const KEY_RECORD = { id: "test", name: "test", sha256: createHash("sha256").update(KEY).digest("hex") };

/** A real gateway process. */
export interface TestGateway {
  readonly url: string;
  readonly authority: TestAuthority;
  readonly child: ChildProcess;
  /** All it logged. */
  log(): string;
  status(): Promise<GatewayStatus>;
  put(generation: number, routes: readonly ModelRoute[], more?: Partial<Snapshot>): Promise<boolean>;
  post(path: string, body: unknown, init?: RequestInit): Promise<Response>;
  /** Another process with the same folders. */
  again(): Promise<TestGateway>;
  end(): Promise<void>;
  cleanUp(): Promise<void>;
}

export function targetOf(rank: TestRank, state: Target["state"] = "ready"): Target {
  const { replica, attempt, door } = rank.launch;
  return { replica, attempt, node: "a", address: door.address, port: door.port, state };
}

export const routeOf = (targets: readonly Target[], starting = false): ModelRoute => ({
  model: "demo",
  created_ms: 0,
  targets: [...targets],
  starting,
});

export async function startGateway(): Promise<TestGateway> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-gateway-"));
  const authority = await testAuthority();
  const identity = await authority.identity("gateway", "gateway");
  await Promise.all([
    writeFile(join(folder, "ca.crt"), identity.ca),
    writeFile(join(folder, "gateway.crt"), identity.cert),
    writeFile(join(folder, "gateway.key"), identity.key, { mode: 0o600 }),
  ]);
  const port = freePort();
  const config = {
    listen: { control: "127.0.0.1:1", gateway: `127.0.0.1:${port}` },
    tls: { ca: "ca.crt", cert: "server.crt", key: "server.key" },
    state: "state",
    run: "run",
    gateway: { identity: { cert: "gateway.crt", key: "gateway.key" } },
  };
  await writeFile(join(folder, "server.yaml"), JSON.stringify(config));
  return launch(folder, port, authority);
}

async function launch(folder: string, port: number, authority: TestAuthority): Promise<TestGateway> {
  const [program, ...rest] = ownProgram();
  const child = spawn(program, [...rest, "gateway", "--config", join(folder, "server.yaml"), "--owner-pid", String(process.pid)], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  let said = "";
  child.stderr.on("data", (data: Buffer) => (said += data.toString()));
  const url = `http://127.0.0.1:${port}`;
  const socket = join(folder, "run", "gateway.sock");
  await until("the gateway", () => fetch(`${url}/livez`).catch(() => null)).catch((error: unknown) => {
    throw new Error(`${String(error)}\n${said}`);
  });
  const end = async () => {
    const ended = new Promise((resolve) => child.once("exit", resolve));
    if (child.exitCode !== null || child.signalCode !== null) return;
    child.kill("SIGTERM");
    await ended;
  };
  return {
    url,
    authority,
    child,
    log: () => said,
    status: async () => parseAs(GatewayStatus, await (await fetchUnix(socket, "/status")).json(), "status"),
    put: async (generation, routes, more = {}) => {
      const snapshot: Snapshot = {
        version: { epoch: 1, generation },
        auth: "keys",
        routes: [...routes],
        keys: [KEY_RECORD],
        revocations: [],
        ...more,
      };
      const answer = await fetchUnix(socket, "/snapshot", { method: "PUT", body: JSON.stringify(snapshot) });
      return ((await answer.json()) as { accepted: boolean }).accepted;
    },
    post: (path, body, init = {}) =>
      fetch(url + path, {
        method: "POST",
        headers: { "content-type": "application/json", authorization: `Bearer ${KEY}` },
        body: typeof body === "string" ? body : JSON.stringify(body),
        ...init,
      }),
    again: () => launch(folder, port, authority),
    end,
    cleanUp: async () => {
      await end();
      await rm(folder, { recursive: true, force: true });
    },
  };
}
