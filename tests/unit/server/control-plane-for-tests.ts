import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { stringify } from "yaml";
import { loadServerConfig } from "../../../src/os/config-file.ts";
import { makeLog } from "../../../src/os/log.ts";
import { serveUnix, type UnixServer } from "../../../src/os/unix-http.ts";
import { makeDialer, type Dialer } from "../../../src/pki/dial.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { CLAIMED_NODE_HEADER } from "../../../src/protocol/agent-api.ts";
import type { JoinAnswer, JoinRequest, PollAnswer, RankStatus } from "../../../src/protocol/agent-api.ts";
import type { Snapshot } from "../../../src/protocol/gateway-api.ts";
import type { PlanVersion, RankLaunch } from "../../../src/protocol/plan.ts";
import { runServer } from "../../../src/server/server.ts";
import { inventoryOf } from "../core/fleet-for-tests.ts";
import { testAuthority, type TestAuthority } from "../pki/authority-for-tests.ts";

/** What an API answered. */
export interface Answer {
  readonly status: number;
  // oxlint-disable-next-line typescript/no-explicit-any -- tests look into documents of many forms
  readonly body: any;
}

/** What a promise was refused with. */
export async function refusal(promise: Promise<unknown>): Promise<{ code: string; message: string; why: string }> {
  return promise.then(
    () => {
      throw new Error("it was not refused");
    },
    (error: { code: string; message: string; why: string }) => error,
  );
}

/** Looks until it sees something, at most 10 s. */
export async function until<T>(what: string, look: () => T | null | undefined | false | Promise<T | null | undefined | false>): Promise<T> {
  const end_ms = performance.now() + 10_000;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (performance.now() > end_ms) throw new Error(`never seen: ${what}`);
    await Bun.sleep(20);
  }
}

function freePort(): number {
  const listener = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  const { port } = listener;
  listener.stop(true);
  return port;
}

/** A control plane in this process, with a stand-in for the gateway, and whatever identities a test needs. */
export class ControlPlane {
  readonly folder: string;
  readonly authority: TestAuthority;
  readonly port: number;
  readonly log: string[] = [];
  /** What the gateway was sent last. */
  snapshot: Snapshot | null = null;
  #gateway: UnixServer | null = null;
  #running: { readonly over: AbortController; readonly ended: Promise<void> } | null = null;
  readonly #dialers = new Map<string, Dialer>();

  private constructor(folder: string, authority: TestAuthority) {
    this.folder = folder;
    this.authority = authority;
    this.port = freePort();
  }

  /** @param gateway `child`: the server starts a real one, which the test has to end */
  static async make(models: readonly object[], gateway: "stand-in" | "child" = "stand-in"): Promise<ControlPlane> {
    const folder = await mkdtemp(join(tmpdir(), "llmgw-cp-"));
    const plane = new ControlPlane(folder, await testAuthority());
    await mkdir(join(folder, "tls"));
    const server = await plane.authority.identity("server", "cp");
    await writeFile(join(folder, "tls", "ca.crt"), server.ca);
    await writeFile(join(folder, "tls", "server.crt"), server.cert);
    await writeFile(join(folder, "tls", "server.key"), server.key, { mode: 0o600 });
    const its = await plane.authority.identity("gateway", "gw");
    await writeFile(join(folder, "tls", "gateway.crt"), its.cert);
    await writeFile(join(folder, "tls", "gateway.key"), its.key, { mode: 0o600 });
    const config = {
      listen: { control: `127.0.0.1:${plane.port}`, gateway: `127.0.0.1:${freePort()}` },
      state: "state",
      run: "run",
      engines: { llamacpp: "", vllm: "" },
      gateway: { process: gateway === "child" ? "child" : "unit" },
    };
    await writeFile(join(folder, "server.yaml"), stringify(config));
    await plane.setCatalog(models);
    await mkdir(join(folder, "run"), { mode: 0o700 });
    if (gateway === "stand-in")
      plane.#gateway = await serveUnix(join(folder, "run", "gateway.sock"), (request) => plane.#answerAsGateway(request));
    return plane;
  }

  async #answerAsGateway(request: Request): Promise<Response> {
    if (request.method === "PUT") {
      this.snapshot = (await request.json()) as Snapshot;
      return Response.json({ accepted: true });
    }
    const version = this.snapshot?.version ?? null;
    return Response.json({ protocol: 1, pid: 1, started_ms: 1, llmgw_version: "test", snapshot: version, in_flight: 0, loads: [] });
  }

  setCatalog(models: readonly object[]): Promise<void> {
    return writeFile(join(this.folder, "catalog.yaml"), stringify({ models }));
  }

  async start(): Promise<void> {
    const config_file = join(this.folder, "server.yaml");
    const over = new AbortController();
    const log = makeLog({ level: "debug", format: "text", write: (line) => void this.log.push(line) });
    const ended = runServer({ config_file, config: await loadServerConfig(config_file), log, signal: over.signal, owner_pid: null });
    this.#running = { over, ended };
    const admin = await this.admin();
    await Promise.race([
      ended,
      until("the server answers", () =>
        admin("GET", "status").then(
          ({ status }) => status === 200,
          () => false,
        ),
      ),
    ]);
  }

  async stop(): Promise<void> {
    this.#running?.over.abort();
    await this.#running?.ended;
    this.#running = null;
  }

  async end(): Promise<void> {
    await this.stop();
    await this.#gateway?.close();
    await rm(this.folder, { recursive: true, force: true });
  }

  loseStore(): Promise<void> {
    return rm(join(this.folder, "state"), { recursive: true, force: true });
  }

  /** Calls the admin API as an admin or viewer. */
  async admin(role: "admin" | "viewer" = "admin"): Promise<(method: string, path: string, body?: object) => Promise<Answer>> {
    let dialer = this.#dialers.get(role);
    if (!dialer) this.#dialers.set(role, (dialer = makeDialer(await this.authority.identity(role, `the-${role}`))));
    return (method, path, body) => call(dialer, `https://127.0.0.1:${this.port}/admin/v1/${path}`, method, body);
  }

  async items(path: string): Promise<Answer["body"][]> {
    const { body } = await (await this.admin())("GET", path);
    return body.items;
  }

  async agent(id: string, more: { identity?: Identity; machine?: string; address?: string } = {}): Promise<TestAgent> {
    const identity = more.identity ?? (await this.authority.identity("node", id));
    return new TestAgent(this.port, id, identity, more.machine ?? `machine of ${id}`, more.address ?? "127.0.0.2");
  }
}

async function call(
  dialer: Dialer,
  url: string,
  method: string,
  body?: object,
  headers: Record<string, string> = {},
  signal: AbortSignal = AbortSignal.timeout(40_000),
): Promise<Answer> {
  const text = body === undefined ? {} : { body: JSON.stringify(body) };
  const answer = await dialer.request(url, { method, headers, ...text, signal, expect: { role: "server", name: "cp" } });
  const document = await answer.text();
  const isJson = answer.headers.get("content-type")?.includes("json");
  return { status: answer.status, body: isJson ? JSON.parse(document) : document };
}

/** An agent that speaks the agent API by hand. */
export class TestAgent {
  readonly id: string;
  readonly ranks = new Map<string, RankStatus>();
  claims: string;
  session = "";
  seq = 0;
  have: PlanVersion = { epoch: 0, generation: 0 };
  seen: PlanVersion = { epoch: 0, generation: 0 };
  readonly #base: string;
  readonly #dialer: Dialer;
  readonly #machine: string;
  readonly #address: string;

  constructor(port: number, id: string, identity: Identity, machine: string, address: string) {
    this.#base = `https://127.0.0.1:${port}/agent/v1/`;
    this.id = id;
    this.claims = id;
    this.#dialer = makeDialer(identity);
    this.#machine = machine;
    this.#address = address;
  }

  post(path: string, body: object, signal?: AbortSignal): Promise<Answer> {
    return call(this.#dialer, this.#base + path, "POST", body, { [CLAIMED_NODE_HEADER]: this.claims }, signal);
  }

  async join(more: Partial<JoinRequest> = {}): Promise<Answer> {
    const answer = await this.post("join", {
      protocol: 1,
      node: this.id,
      version: "test",
      session_key: { machine_id: this.#machine, boot_id: "b", agent_start_id: crypto.randomUUID() },
      address: this.#address,
      clock_ms: Date.now(),
      inventory: inventoryOf({ id: this.id, gpus: 1 }),
      ranks: [...this.ranks.values()],
      seen: this.seen,
      ...more,
    });
    if (answer.status === 200) this.session = (answer.body as JoinAnswer).session;
    this.seq = 0;
    this.have = { epoch: 0, generation: 0 };
    return answer;
  }

  async poll(signal?: AbortSignal): Promise<PollAnswer> {
    const answer = await this.post("poll", { session: this.session, have: this.have }, signal);
    if (answer.status !== 200) throw new Error(`poll: ${answer.status} ${JSON.stringify(answer.body)}`);
    const { plan } = answer.body as PollAnswer;
    if (plan) this.have = this.seen = plan.version;
    return answer.body as PollAnswer;
  }

  /** Polls until a plan comes that fits. */
  async plan(fits: (ranks: readonly RankLaunch[]) => boolean = () => true): Promise<readonly RankLaunch[]> {
    for (let i = 0; i < 20; i++) {
      const { plan } = await this.poll();
      if (plan && fits(plan.ranks)) return plan.ranks;
    }
    throw new Error("no such plan came");
  }

  rank(launch: RankLaunch, phase: RankStatus["phase"], exit: RankStatus["exit"] = null): void {
    const { attempt, replica, rank } = launch;
    const more = { engine_pid: 42, progress: null, detail: "", since_ms: Date.now() };
    this.ranks.set(attempt, { attempt, replica, rank, phase, exit, launch, ...more });
  }

  report(more: object = {}): Promise<Answer> {
    this.seq += 1;
    const ranks = [...this.ranks.values()];
    const { session, seq, seen } = this;
    return this.post("report", { session, seq, clock_ms: Date.now(), seen, inventory: null, ranks, ...more });
  }
}
