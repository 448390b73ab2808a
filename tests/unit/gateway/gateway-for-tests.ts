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

/** @param more keys of server.yaml's `gateway`; its certificate for users is gateway-tls.crt and .key */
export async function startGateway(more: Record<string, unknown> = {}, host = "127.0.0.1"): Promise<TestGateway> {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-gateway-"));
  const authority = await testAuthority();
  const identity = await authority.identity("gateway", "gateway");
  const shown = await authority.identity("server", "localhost");
  await Promise.all([
    writeFile(join(folder, "ca.crt"), identity.ca),
    writeFile(join(folder, "gateway-tls.crt"), shown.cert),
    writeFile(join(folder, "gateway-tls.key"), shown.key, { mode: 0o600 }),
    writeFile(join(folder, "gateway.crt"), identity.cert),
    writeFile(join(folder, "gateway.key"), identity.key, { mode: 0o600 }),
  ]);
  const port = freePort();
  const config = {
    listen: { control: "127.0.0.1:1", gateway: `${host}:${port}` },
    tls: { ca: "ca.crt", cert: "server.crt", key: "server.key" },
    state: "state",
    run: "run",
    gateway: { identity: { cert: "gateway.crt", key: "gateway.key" }, ...more },
  };
  await writeFile(join(folder, "server.yaml"), JSON.stringify(config));
  const place = { folder, url: `${"tls" in more ? "https" : "http"}://127.0.0.1:${port}`, authority };
  return launch(place).catch(async (error: unknown) => {
    await rm(folder, { recursive: true, force: true });
    throw error;
  });
}

interface Place {
  readonly folder: string;
  readonly url: string;
  readonly authority: TestAuthority;
}

async function launch(place: Place): Promise<TestGateway> {
  const { folder, url, authority } = place;
  const [program, ...rest] = ownProgram();
  const child = spawn(program, [...rest, "gateway", "--config", join(folder, "server.yaml"), "--owner-pid", String(process.pid)], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  let said = "";
  child.stderr.on("data", (data: Buffer) => (said += data.toString()));
  const socket = join(folder, "run", "gateway.sock");
  const up = () => fetch(`${url}/livez`, { tls: { rejectUnauthorized: false } }).catch(() => null);
  const over = () => (child.exitCode === null ? null : Promise.reject(new Error(`it ended with ${child.exitCode}`)));
  await until("the gateway", () => over() ?? up()).catch((error: unknown) => {
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
    again: () => launch(place),
    end,
    cleanUp: async () => {
      await end();
      await rm(folder, { recursive: true, force: true });
    },
  };
}
