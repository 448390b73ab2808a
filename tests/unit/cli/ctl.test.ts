// llmgw ctl against a stand-in for the server that speaks the real mutual TLS: what it sends, prints and ends with.
import { afterAll, beforeAll, beforeEach, expect, test } from "bun:test";
import { chmod, mkdtemp, rm, writeFile } from "node:fs/promises";
import type { IncomingMessage, ServerResponse } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { writeContexts, type Context } from "../../../src/cli/context.ts";
import { dispatch, errorLines } from "../../../src/cli/frame.ts";
import { root } from "../../../src/cli/root.ts";
import type { Io } from "../../../src/cli/spec.ts";
import { makeLog } from "../../../src/os/log.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { listenMutualTls, type PeerListener } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import type { EventView, KeyView, ModelView, NodeView, ReplicaView } from "../../../src/protocol/admin-api.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import { testAuthority, type TestAuthority } from "../pki/authority-for-tests.ts";

const NOW_MS = Date.now();
const node: NodeView = {
  id: "gpu-01",
  state: "ready",
  state_reason: "",
  address: "10.0.0.11",
  agent_version: "0.1.0",
  last_seen_ms: NOW_MS - 3_500,
  joined_ms: NOW_MS - 60_000,
  clock_offset_ms: 4,
  certificate_expires_ms: Date.UTC(2027, 5, 1),
  fabrics: ["ib-a"],
  island: "ib-a",
  cordon: "",
  drain: null,
  replicas: ["m-abcde"],
  inventory: {
    host: { hostname: "gpu-01", arch: "x64", os: "Debian 13", kernel: "6.12", cpu_model: "EPYC", cpu_features: ["avx2"], cores: 64 },
    memory: { total: 2 ** 40, available: 2 ** 39 },
    disk: { path: "/var/lib/llmgw", total: 2 ** 42, free: 2 ** 41 },
    gpus: [0, 1].map((index) => ({
      index,
      uuid: `GPU-${index}`,
      name: "NVIDIA H200",
      memory_total: { value: 2 ** 37 },
      memory_used: { absent: "not told" },
      driver: { value: "580.1" },
      compute_capability: { value: "9.0" },
      pci_bus_id: { value: `0000:0${index}:00.0` },
    })),
    engines: [
      { kind: "llamacpp", version: "b7001", path: "/usr/bin/llama-server", origin: "path", offered: true, reason: "" },
      { kind: "vllm", version: "", path: "/opt/vllm", origin: "installed", offered: false, reason: "no Python" },
    ],
    warnings: [{ code: "gpu-in-use", text: "another program uses GPU 1" }],
  },
};
const numbers = { wanted: 2, catalog_replicas: 1, scaled_by: "alice", ready: 1, nodes: 1, gpus: 0 };
const model: ModelView = { name: "m", engine: "llamacpp", source: "/m.gguf", ...numbers, reason: "no room" };
const replica: ReplicaView = {
  id: "m-abcde",
  model: "m",
  engine: "llamacpp",
  state: "failed",
  since_ms: NOW_MS - 5_000,
  reason: "the engine ended",
  failures: 2,
  next_try_ms: NOW_MS + 100_000,
  deadline_ms: null,
  ranks: [
    {
      rank: 0,
      node: "gpu-01",
      attempt: "0123456789abcdef",
      address: "10.0.0.11:20000",
      engine_pid: 77,
      memory_used: 2 ** 30,
      gpu_memory_used: null,
    },
  ],
  memory: { system: 1.5 * 2 ** 30, per_gpu: 0, basis: "the catalog" },
  refusals: [{ node: "gpu-02", filter: "memory", needed: "8 GiB", available: "1 GiB" }],
  in_flight: 3,
  last_lines: ["oops"],
};
const event: EventView = {
  id: 7,
  at_ms: Date.UTC(2026, 0, 2),
  level: "warn",
  kind: "engine-died",
  subject: "replica/m-abcde",
  text: "SIG\u001b[31mKILL",
};
const keys: KeyView[] = [
  { id: "k1", name: "alice", created_ms: NOW_MS - 9_000, revoked_ms: null },
  { id: "k2", name: "bob", created_ms: NOW_MS - 9_000, revoked_ms: NOW_MS },
];
const status = {
  server_version: "0.1.0",
  protocol: 1,
  started_ms: NOW_MS - 7_300_000,
  now_ms: NOW_MS,
  plan: { epoch: 1, generation: 9 },
  nodes: { ready: 1, suspect: 0, lost: 2 },
  replicas: { wanted: 2, ready: 1, failed: 1, pending: 0 },
  gateway: { state: "serving", detail: "", address: "127.0.0.1:8080", in_flight: 3 },
  warnings: [{ code: "no-room", subject: "model/m", text: "1 of 2 replicas", remedy: "llmgw ctl replicas -o wide" }],
};

let folder = "";
let authority: TestAuthority;
let listener: PeerListener;
let asked: string[] = [];
let answers: Record<string, unknown> = {};
beforeEach(() => {
  asked = [];
  answers = {
    "GET /admin/v1/nodes": { items: [node] },
    "GET /admin/v1/models": { items: [model] },
    "GET /admin/v1/replicas": { items: [replica] },
    "GET /admin/v1/events": { items: [event] },
    "GET /admin/v1/keys": { items: keys },
    "GET /admin/v1/status": status,
    "POST /admin/v1/keys": { ...keys[0], key: "llmgw_secret" },
    "DELETE /admin/v1/keys/k1": {},
    "POST /admin/v1/revoke": {},
    "POST /admin/v1/reload": { changed: ["model m"] },
    "GET /admin/v1/replicas/m-abcde/log": "one\ntwo",
  };
});

async function handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
  let body = "";
  for await (const chunk of request) body += String(chunk);
  asked.push(`${request.method} ${request.url}${body ? ` ${body}` : ""}`);
  const answer = answers[`${request.method} ${(request.url ?? "").split("?")[0]}`];
  if (answer instanceof OperatorError) response.writeHead(answer.status).end(JSON.stringify(answer.toWire()));
  else if (answer === undefined) response.writeHead(404).end("<html>not here</html>");
  else response.end(typeof answer === "string" ? answer : JSON.stringify(answer));
}

async function contextFor(identity: Identity, name: string, server: string): Promise<{ file: string; context: Context }> {
  const paths = { ca: join(folder, `${name}.ca`), cert: join(folder, `${name}.crt`), key: join(folder, `${name}.key`) };
  await Promise.all([
    writeFile(paths.ca, identity.ca),
    writeFile(paths.cert, identity.cert),
    writeFile(paths.key, identity.key, { mode: 0o600 }),
  ]);
  const file = join(folder, `${name}.yaml`);
  const context = { servers: [server], ...paths };
  await writeContexts(file, { contexts: { [name]: context } });
  return { file, context };
}

const url = () => `https://127.0.0.1:${listener.port}`;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-ctl-"));
  authority = await testAuthority();
  const identity = await authority.identity("server", "server");
  listener = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity,
    trust: new Trust(identity.ca),
    roles: ["admin", "viewer"],
    log: makeLog({ level: "error", format: "text", write: () => {} }),
    now: Date.now,
    handle,
  });
  await contextFor(await authority.identity("admin", "tester"), "good", url());
});
afterAll(async () => {
  await listener.close();
  await rm(folder, { recursive: true, force: true });
});

interface Run {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

async function ctl(words: readonly string[], env: Record<string, string> = { LLMGW_CONFIG: join(folder, "good.yaml") }): Promise<Run> {
  let out = "";
  let err = "";
  const io: Io = {
    out: (text) => void (out += text.endsWith("\n") ? text : `${text}\n`),
    err: (text) => void (err += text.endsWith("\n") ? text : `${text}\n`),
    isTerminal: false,
    isErrTerminal: false,
    color: false,
    env,
    cwd: folder,
  };
  try {
    return { code: await dispatch(root, ["ctl", ...words], io), out, err };
  } catch (error) {
    if (!(error instanceof OperatorError)) throw error;
    return { code: error.exit, out, err: `${err}${errorLines(error, false)}\n` };
  }
}

const failed = ({ code, err }: Run) => `${code} ${err.trimEnd()}`;

test("nodes are a table of what an operator asks first", async () => {
  expect((await ctl(["nodes"])).out.split("\n").map((line) => line.split(/ {2,}/))).toEqual([
    ["NODE", "STATE", "ADDRESS", "ENGINES", "GPUS", "FABRIC", "ISLAND", "REPLICAS", "VERSION", "SEEN"],
    [
      "gpu-01",
      "ready",
      "10.0.0.11",
      "llamacpp b7001, !vllm",
      "2x NVIDIA H200",
      "ib-a",
      "ib-a",
      "1",
      "0.1.0",
      expect.stringMatching(/^\d+s$/),
    ],
    [""],
  ] as string[][]);
  expect((await ctl(["nodes", "-o", "wide"])).out).toContain("512 GiB of 1.00 TiB");
});

test.each([
  ["nodes", "gpu-01"],
  ["models", "m"],
  ["replicas", "m-abcde"],
  ["events", "7"],
  ["keys", "k1\nk2"],
])("%s: json is the server's document, name the names alone", async (list, names) => {
  expect(JSON.parse((await ctl([list, "-o", "json"])).out)).toEqual(answers[`GET /admin/v1/${list}`]);
  expect((await ctl([list, "-o", "name"])).out).toBe(`${names}\n`);
});

test("replicas say why, when next, and where there is no room", async () => {
  const { out } = await ctl(["replicas", "-o", "wide"]);
  expect(out).toMatch(/the engine ended \(next try in 9\ds\)/);
  expect(out).toContain("gpu-02: memory, needs 8 GiB, has 1 GiB");
});

test("control characters of others do not reach the terminal", async () => {
  expect((await ctl(["events"])).out).not.toContain("\u001b");
});

test("status names what to look at, with a way out", async () => {
  const { out } = await ctl(["status"]);
  expect(out).toContain("nodes     1 ready, 2 lost\n");
  expect(out).toContain("  model/m: 1 of 2 replicas (try: llmgw ctl replicas -o wide)\n");
});

test("a key is alone on stdout", async () => {
  const { out, err } = await ctl(["key", "create", "alice"]);
  expect(out).toBe("llmgw_secret\n");
  expect(err).toContain("shown this once");
  expect(asked).toEqual(['POST /admin/v1/keys {"name":"alice"}']);
});

test.each([
  [["key", "revoke", "k1"], "DELETE /admin/v1/keys/k1"],
  [["revoke", "gpu-01"], 'POST /admin/v1/revoke {"name":"gpu-01"}'],
  [["revoke", "never-seen", "--force"], 'POST /admin/v1/revoke {"name":"never-seen"}'],
  [["reload"], "POST /admin/v1/reload {}"],
])("%p changes something, and not in a dry run", async (words, change) => {
  expect((await ctl([...words, "--dry-run"])).code).toBe(0);
  expect(asked.filter((line) => !line.startsWith("GET "))).toEqual([]);
  expect((await ctl(words)).code).toBe(0);
  expect(asked.filter((line) => !line.startsWith("GET "))).toEqual([change]);
});

test.each([
  [["m"], /^m: 1 of 2 replicas are ready.*\n\nm-abcde is failed/],
  [["model/m"], /^m: 1 of 2 replicas are ready/],
  [["node", "gpu-01"], /^gpu-01 is ready/],
  [["m-abcde"], /^m-abcde is failed for .* on gpu-01\n {2}the engine ended\n/],
  [["replica/m-abcde"], /^m-abcde is failed/],
])("why takes a name, a kind and a name, or both in one word: %p", async (words, told) => {
  expect((await ctl(["why", ...words])).out).toMatch(told);
});

test.each([
  [["m-abcdf"], "E_NOT_FOUND", "llmgw ctl why m-abcde"],
  [["zzzzzzzz"], "E_NOT_FOUND", "llmgw ctl status"],
  [["key/k1"], "E_USAGE", "llmgw ctl why k1"],
])("why of %p is an error that says what to ask", async (words, code, remedy) => {
  const { err } = await ctl(["why", ...words]);
  expect(err).toContain(code);
  expect(err).toContain(`try: ${remedy}`);
});

test("logs are printed as they come", async () => {
  expect((await ctl(["logs", "m-abcde", "--lines", "2", "--rank", "1", "--follow"])).out).toBe("one\ntwo\n");
  expect(asked).toEqual(["GET /admin/v1/replicas/m-abcde/log?lines=2&rank=1&follow=1"]);
});

test("a wait ends when it is so, and with 4 when its time is over", async () => {
  expect((await ctl(["wait", "node/gpu-01"])).code).toBe(0);
  const late = await ctl(["wait", "model/m", "--timeout", "50ms"]);
  expect(late.code).toBe(4);
  expect(late.err).toContain("model/m: 1 of 2 replicas ready: no room\n");
  setTimeout(() => (answers["GET /admin/v1/models"] = { items: [{ ...model, ready: 2, reason: "" }] }), 20);
  expect((await ctl(["wait", "model/m", "--timeout", "20s"])).code).toBe(0);
});

test.each([
  [["key", "revoke", "k2"], "1 llmgw: key k2 cannot be revoked (E_NOT_FOUND)\n  it was revoked before\n  try: llmgw ctl keys"],
  [["key", "revoke", "alice"], "1 llmgw: key alice cannot be revoked (E_NOT_FOUND)\n  no key has that id\n  try: llmgw ctl key revoke k1"],
  [
    ["revoke", "gpu-1"],
    '1 llmgw: there is no node "gpu-1" (E_NOT_FOUND)\n  no node of that name has joined\n  try: llmgw ctl revoke gpu-01',
  ],
  [["wait", "model/mm"], '1 llmgw: there is no model "mm" (E_NOT_FOUND)\n  the catalog does not name it\n  try: llmgw ctl wait model/m'],
  [
    ["wait", "gpu-01"],
    '2 llmgw: cannot wait for "gpu-01" (E_USAGE)\n  it is model/NAME or node/NAME\n  try: llmgw ctl wait model/NAME --for ready',
  ],
  [["nodes", "--context", "god"], expect.stringContaining("try: --context good")],
])("%p is refused", async (words, text) => {
  expect(failed(await ctl(words))).toEqual(text);
});

test("the server's own error is printed as it is", async () => {
  answers["GET /admin/v1/nodes"] = new OperatorError("E_NOT_ALLOWED", "no", "role viewer only reads", "ask an admin");
  expect(failed(await ctl(["nodes"]))).toBe("3 llmgw: no (E_NOT_ALLOWED)\n  role viewer only reads\n  try: ask an admin");
});

test.each([
  ["another program's answer", undefined, "answered 404 in another form"],
  ["half a document", { items: [{ id: "a" }] }, "items.0.state"],
  ["no JSON", "hello", "cannot be read"],
])("%s is an error, not a table", async (_name, answer, text) => {
  answers["GET /admin/v1/nodes"] = answer;
  const run = await ctl(["nodes"]);
  expect({ code: run.code, out: run.out }).toEqual({ code: 1, out: "" });
  expect(run.err).toContain(text);
});

test("no server, another authority, a wrong role, an open key: 3", async () => {
  const admin = await authority.identity("admin", "tester");
  const stranger = await (await testAuthority("another")).identity("admin", "tester");
  const worker = await authority.identity("node", "gpu-01");
  const gone = await contextFor(admin, "gone", "https://127.0.0.1:1");
  const other = await contextFor(stranger, "other", url());
  const role = await contextFor(worker, "role", url());
  const open = await contextFor(admin, "open", url());
  await chmod(open.context.key, 0o644);
  for (const [file, code] of [
    [gone.file, "E_UNREACHABLE"],
    [other.file, "E_TLS"],
    [role.file, "E_(UNREACHABLE|TLS)"],
    [open.file, "E_NOT_ALLOWED"],
  ] as const) {
    const run = await ctl(["nodes"], { LLMGW_CONFIG: file });
    expect(failed(run)).toMatch(new RegExp(`^3 llmgw: .*\\(${code}\\)\\n {2}.*\\n {2}try: .*$`));
  }
});

test("the next server is asked when the first does not answer, unless something is to change", async () => {
  const { context } = await contextFor(await authority.identity("admin", "tester"), "two", url());
  const file = join(folder, "two.yaml");
  await writeContexts(file, { contexts: { two: { ...context, servers: ["https://127.0.0.1:1", url()] } } });
  expect((await ctl(["nodes", "-o", "name"], { LLMGW_CONFIG: file })).out).toBe("gpu-01\n");
  expect((await ctl(["key", "create", "x"], { LLMGW_CONFIG: file })).code).toBe(3);
});

test("contexts are added, chosen, shown without their key, and removed", async () => {
  const { context } = await contextFor(await authority.identity("admin", "tester"), "files", url());
  const env = { XDG_CONFIG_HOME: join(folder, "xdg") };
  const add = (name: string, ...more: string[]) =>
    ctl(["context", "add", name, "--server", url(), "--ca", context.ca, "--cert", context.cert, "--key", context.key, ...more], env);
  expect((await add("one", "--dry-run")).code).toBe(0);
  expect((await ctl(["context", "ls", "-o", "name"], env)).out).toBe("");
  expect((await add("one")).err).toBe("added one, and using it\n");
  expect((await add("two", "--inline")).code).toBe(0);
  expect(failed(await add("two"))).toStartWith('1 llmgw: there is a context "two" already (E_EXISTS)');
  expect(failed(await add("a/b"))).toStartWith("2 llmgw: ");
  expect((await ctl(["context", "use", "two"], env)).code).toBe(0);
  expect((await ctl(["context", "ls"], env)).out).toMatch(/^\s+NAME.*\n\s+one .*\n\*\s+two .*\n$/);
  await rm(context.key);
  expect((await ctl(["nodes", "-o", "name"], env)).out).toBe("gpu-01\n");
  for (const form of ["table", "json", "yaml"]) {
    expect((await ctl(["context", "show", "-o", form], env)).out).toContain("not shown");
    expect((await ctl(["context", "show", "-o", form], env)).out).not.toContain("PRIVATE KEY");
  }
  expect((await ctl(["context", "rm", "two"], env)).code).toBe(0);
  expect((await ctl(["context", "show", "-o", "name"], env)).out).toBe("one\n");
});
