// What onboarding decides, as tables: what a machine is, whether it can be a node, what it lacks, when to try ssh again.
import { describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { agentConfigOf } from "../../../src/onboard/agent-config.ts";
import { architectureOfProgram, binariesOf, chooseBinary } from "../../../src/onboard/binary.ts";
import { FACTS_SCRIPT, parseFacts, type NodeFacts } from "../../../src/onboard/facts.ts";
import { nextTry, troubleOf } from "../../../src/onboard/patience.ts";
import { refusalOf } from "../../../src/onboard/refusal.ts";
import { planSteps, type Job } from "../../../src/onboard/step.ts";
import { STEPS } from "../../../src/onboard/steps.ts";
import { quote } from "../../../src/onboard/ssh.ts";

const GIB = 1024 * 1024 * 1024;
const NOW_MS = 1_800_000_000_000;
const room = { free_bytes: 20 * GIB, readonly: null };
const NODE: NodeFacts = {
  clock_s: NOW_MS / 1_000,
  hostname: "node-5.lan",
  arch: "x86_64",
  cpu_flags: ["sse2", "sse4_2", "avx2"],
  cpu_model: "AMD EPYC",
  glibc: "2.36",
  os: "Debian GNU/Linux 12",
  systemd: true,
  room: { bin: room, etc: room, state: room },
  trust: { tool: "update-ca-certificates", file: "/usr/local/share/ca-certificates/llmgw-ca.crt", digest: null },
  engine_user: false,
  binary: null,
  unit: null,
  ca: null,
  cert: null,
  config: null,
  key: false,
  csr: null,
  active: "inactive",
  enabled: "",
  unread: false,
  restless: false,
};

async function here(script: string, ...args: string[]): Promise<string> {
  const child = Bun.spawn(["sh", "-s", "--", ...args], { stdin: new Blob([script]), stdout: "pipe", stderr: "ignore" });
  return child.stdout.text();
}

describe("facts", () => {
  test("are read from this very machine", async () => {
    const facts = parseFacts(await here(FACTS_SCRIPT, "node-5"));
    expect(Math.abs(facts.clock_s * 1_000 - Date.now())).toBeLessThan(60_000);
    expect(facts.arch).toBe(process.arch === "arm64" ? "aarch64" : "x86_64");
    expect(facts.glibc).toMatch(/^2\.\d+$/);
    expect(facts.room.bin.free_bytes).toBeGreaterThan(0);
    expect(facts.cpu_flags.length).toBeGreaterThan(5);
  });
  test("a login that only prints a notice is told as one", () => {
    expect(() => parseFacts('Please login as the user "debian" rather than the user "root".\n')).toThrow("runs no commands");
  });
  test("a notice before and after is no fact", () => {
    const text =
      "hostname motd\nllmgw-facts-begin\nclock 5\nhostname n\narch x86_64\nbin_free 1\netc_free 1\nstate_free 1\nllmgw-facts-end\nbye\n";
    const facts = parseFacts(text);
    expect([facts.hostname, facts.clock_s, facts.glibc, facts.trust, facts.key]).toEqual(["n", 5, null, null, false]);
  });
  test.each([
    ["update-ca-certificates", "/usr/local/share/ca-certificates"],
    ["update-ca-trust", "/etc/pki/ca-trust/source/anchors"],
    ["update-ca-certificates", "/etc/pki/trust/anchors"],
    ["update-ca-trust", "/etc/ca-certificates/trust-source/anchors"],
  ])("%s goes with %s", (tool, folder) => {
    const facts = `clock 5\nhostname n\narch x86_64\nbin_free 1\netc_free 1\nstate_free 1\ntrust_tool ${tool}\ntrust_folder ${folder}`;
    const { trust } = parseFacts(`llmgw-facts-begin\n${facts}\ntrusted:${folder} abc\nllmgw-facts-end\n`);
    expect(trust).toEqual({ tool, file: `${folder}/llmgw-ca.crt`, digest: "abc" });
  });
});

const REFUSED: readonly [string, Partial<NodeFacts>, string, string][] = [
  ["another host name", { hostname: "node-6" }, "E_NODE", "called node-6, not node-5"],
  ["kvm64", { cpu_flags: ["sse2"], cpu_model: "Common KVM processor" }, "E_NODE", "CPU type to host"],
  ["another architecture", { arch: "riscv64" }, "E_NODE", "no llmgw for riscv64"],
  ["an old glibc", { glibc: "2.12" }, "E_NODE", "2.17"],
  ["no glibc", { glibc: null }, "E_NODE", "no glibc"],
  ["no systemd", { systemd: false }, "E_NODE", "systemd"],
  ["a clock two hours behind", { clock_s: NOW_MS / 1_000 - 7_200 }, "E_NODE", "2 h behind"],
  ["a clock ten minutes ahead", { clock_s: NOW_MS / 1_000 + 600 }, "E_NODE", "10 min ahead"],
  [
    "a full disk",
    { room: { bin: { free_bytes: 90 * 1024 * 1024, readonly: null }, etc: room, state: room } },
    "E_NO_ROOM",
    "90 MiB are free",
  ],
  ["a read-only disk", { room: { bin: room, etc: { free_bytes: GIB, readonly: "/etc" }, state: room } }, "E_NODE", "cannot be written"],
];

describe("a machine is refused for", () => {
  test.each(REFUSED)("%s", (_name, change, code, word) => {
    const refusal = refusalOf({ ...NODE, ...change }, { node: "node-5", binary_bytes: 110 * 1024 * 1024, now_ms: NOW_MS });
    expect(refusal?.code).toBe(code as "E_NODE");
    expect(`${refusal?.message} ${refusal?.why} ${refusal?.remedy}`).toContain(word);
  });
  test("nothing when it is as it should be", () => {
    expect(refusalOf(NODE, { node: "node-5", binary_bytes: 110 * 1024 * 1024, now_ms: NOW_MS })).toBeNull();
    const arm = { ...NODE, arch: "aarch64", cpu_flags: ["asimd"] };
    expect(refusalOf(arm, { node: "node-5", binary_bytes: 0, now_ms: NOW_MS + 60_000 })).toBeNull();
  });
});

describe("agent.yaml", () => {
  const wanted = { node: "a", servers: ["https://10.0.0.1:7443"], address: "10.0.0.5", llamacpp_bin: undefined };
  test("is written when there is none, and is then enough", () => {
    const text = agentConfigOf(null, wanted) ?? "";
    expect(text).toContain("address: 10.0.0.5");
    expect(text).not.toContain("llamacpp_bin");
    expect(agentConfigOf(text, wanted)).toBeNull();
  });
  test("keeps what an operator changed", () => {
    const mine = "# mine\nnode: a\nservers: [https://10.0.0.9:7443] # old\naddress: 10.0.0.5\nlog: { level: debug }\n";
    const text = agentConfigOf(mine, { ...wanted, llamacpp_bin: "/opt/llama-server" }) ?? "";
    for (const kept of ["# mine", "level: debug", "https://10.0.0.1:7443", "llamacpp_bin: /opt/llama-server"]) expect(text).toContain(kept);
    expect(text).not.toContain("10.0.0.9");
  });
  test.each(["[1, 2]", "a: [", "node: a\nservrs: []\n"])("that is none is refused: %s", (text) => {
    expect(() => agentConfigOf(text, wanted)).toThrow("cannot be read");
  });
});

describe("ssh trouble", () => {
  test.each([
    [{ level: "client-socket", code: "ECONNREFUSED", message: "connect ECONNREFUSED" }, "booting"],
    [{ level: "client-socket", code: "EHOSTUNREACH", message: "" }, "booting"],
    [{ level: "client-socket", code: "ECONNRESET", message: "" }, "booting"],
    [{ level: "client-timeout", message: "Timed out while waiting for handshake" }, "booting"],
    [{ level: "protocol", message: "Connection lost before handshake" }, "booting"],
    [{ message: "it hung up" }, "booting"],
    [{ level: "client-authentication", message: "All configured authentication methods failed" }, "login"],
    [{ level: "handshake", message: "Handshake failed: no matching key exchange algorithm" }, "final"],
    [{ level: "client-socket", code: "EACCES", message: "not permitted" }, "final"],
  ])("%j", (fault, kind) => expect(troubleOf(fault).kind).toBe(kind as "final"));

  const waiting = { started_ms: 0, now_ms: 10_000, wait_ms: 300_000, seen_booting: false, refused_ms: null };
  test.each([
    ["a booting machine is tried again", "booting", waiting, 1_500],
    ["until its time is over", "booting", { ...waiting, now_ms: 299_000 }, null],
    ["a refusal is tried again, slowly", "login", { ...waiting, refused_ms: 10_000 }, 5_000],
    ["and is final soon", "login", { ...waiting, now_ms: 15_000, refused_ms: 10_000 }, null],
    ["but later while a machine boots", "login", { ...waiting, now_ms: 15_000, refused_ms: 10_000, seen_booting: true }, 5_000],
    ["and final then too", "login", { ...waiting, now_ms: 70_000, refused_ms: 10_000, seen_booting: true }, null],
    ["what waiting does not mend is not waited for", "final", waiting, null],
  ] as const)("%s", (_name, kind, state, pause) => expect(nextTry({ kind, why: "" }, state)).toBe(pause));
});

describe("binaries", () => {
  const elf = (machine: number) => {
    const head = Buffer.alloc(64);
    head.write("\x7fELF", "latin1");
    head.set([2, 1, 1], 4);
    head.writeUInt16LE(machine, 18);
    return head;
  };
  test.each([
    [elf(62), "amd64"],
    [elf(183), "arm64"],
    [elf(243), null],
    [Buffer.from("#!/bin/sh\nexit 0 # long enough"), null],
    [Buffer.alloc(0), null],
  ] as const)("are known by their first bytes", (head, arch) => expect(architectureOfProgram(head)).toBe(arch));

  test("one for the node's architecture is chosen, or said to be missing", async () => {
    const folder = await mkdtemp(join(tmpdir(), "llmgw-binary-"));
    try {
      const [own, beside] = [join(folder, "llmgw"), join(folder, "llmgw-linux-arm64")];
      await writeFile(own, elf(62));
      const alone = await binariesOf({ given: [], own });
      expect(chooseBinary(alone, "amd64", false)).toMatchObject({ path: own, digest: createHash("sha256").update(elf(62)).digest("hex") });
      expect(() => chooseBinary(alone, "arm64", false)).toThrow("no llmgw binary for the node's architecture, arm64");
      await writeFile(beside, elf(183));
      expect(chooseBinary(await binariesOf({ given: [], own }), "arm64", false).path).toBe(beside);
      await writeFile(join(folder, "script"), "#!/bin/sh\n");
      const refused = await binariesOf({ given: [join(folder, "script")], own }).then(() => "", String);
      expect(refused).toContain("is not an llmgw binary");
      expect(await binariesOf({ given: [], own: null })).toEqual([]);
    } finally {
      await rm(folder, { recursive: true });
    }
  });
});

describe("steps", () => {
  const digest = (text: string) => createHash("sha256").update(text).digest("hex");
  const job: Job = {
    node: "node-5",
    address: "10.0.0.5",
    servers: ["https://10.0.0.1:7443"],
    binary: { path: "/dist/llmgw", arch: "amd64", digest: "d".repeat(64), size: 1 },
    config: { node: "node-5", servers: ["https://10.0.0.1:7443"], address: "10.0.0.5" },
    engines: [],
    copies: [],
    ca_folder: "/ca",
    ca: "CA",
    unit: "UNIT",
    renew: false,
  };
  const due = async (facts: NodeFacts, wanted = job) =>
    (await planSteps(STEPS, wanted, facts)).flat().flatMap(({ step, why }) => (why === null ? [] : [step.name]));
  test("a fresh machine needs them all", async () => {
    expect(await due(NODE)).toEqual(["binary", "trust", "user", "certificate", "config", "unit", "agent", "joined"]);
  });
  test("named engines are asked, others are not spoken of", async () => {
    expect(await due(NODE, { ...job, engines: [{ kind: "llamacpp", argv: ["/x", "--version"] }] })).toContain("engines");
  });
  test("another unit alone restarts the agent and nothing else", async () => {
    const facts = { ...NODE, active: "active", enabled: "enabled", unit: digest("old"), config: agentConfigOf(null, job.config) };
    const some = (await due({ ...facts, binary: job.binary.digest, engine_user: true, trust: null })).filter(
      (name) => name !== "certificate",
    );
    expect(some).toEqual(["unit", "agent", "joined"]);
  });
  test.each([
    [{}, null],
    [{ active: "failed" }, "does not run"],
    [{ enabled: "disabled" }, "at boot"],
    [{ unread: true }, "has not read it"],
    [{ restless: true }, "again and again"],
  ])("an agent that is %p is started when that is needed", async (state, why) => {
    const agent = STEPS.flat().find(({ name }) => name === "agent");
    const said = await agent?.need(job, { ...NODE, active: "active", enabled: "enabled", ...state }, new Set());
    if (why === null) expect(said).toBeNull();
    else expect(said).toContain(why);
  });
});

test.each([
  ["", false],
  ["restarts 30\nactive_since_us 999000000\nuptime_s 1000", true],
  ["restarts 1\nactive_since_us 900000000\nuptime_s 1000", false],
  ["restarts 0\nactive_since_us 999000000\nuptime_s 1000", false],
])("an agent of which systemd says %p", (lines, restless) => {
  const facts = ["clock 1", "hostname n", "arch x86_64", "bin_free 1", "etc_free 1", "state_free 1", lines].join("\n");
  expect(parseFacts(`llmgw-facts-begin\n${facts}\nllmgw-facts-end\n`).restless).toBe(restless);
});

test("a word of a remote command line means itself", async () => {
  const words = ["plain", "", "a b", "it's", '$HOME `id` \\ "q"', "new\nline", "-x", "*"];
  const child = Bun.spawn(["sh", "-c", `printf '%s\\0' ${words.map(quote).join(" ")}`], { stdout: "pipe" });
  expect((await child.stdout.text()).split("\0").slice(0, -1)).toEqual(words);
});
