// The compiled binary makes machines on a stand-in for Proxmox that is as strict as the real one.
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "bun:test";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import ssh2 from "ssh2";
import { binary } from "../../release/fresh.ts";
import { HttpsTransport } from "../../src/provision/https-transport.ts";
import { until } from "../fixtures/machines.ts";
import { PASSWORD, Proxmox, TOKEN, type Trouble } from "../fixtures/proxmox.ts";

const TEST_MS = 60_000;
const KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpdeEdBjlVOp2ViFmKa/j2WaGGMGlVlsjJmqw9BWHkT ops@laptop";
let folder = "";
let pve: Proxmox;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-pv-"));
  await mkdir(join(folder, ".ssh"));
  await writeFile(join(folder, ".ssh", "authorized_keys"), `# me\n${KEY}\ncommand="x" ${KEY}\n`);
  await writeFile(join(folder, "token"), `${TOKEN}\n`, { mode: 0o600 });
  await writeFile(join(folder, "password"), `${PASSWORD}\n`, { mode: 0o600 });
});
afterAll(() => rm(folder, { recursive: true, force: true }));
beforeEach(async () => {
  pve = await Proxmox.open();
});
afterEach(() => pve.close());

interface Ran {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

async function run(words: readonly string[], env: Record<string, string> = {}): Promise<Ran> {
  const child = Bun.spawn([binary, ...words], {
    cwd: folder,
    env: { PATH: process.env["PATH"] ?? "", HOME: folder, ...env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { code, out, err };
}

// No machine can have a group address, so none answers at it.
const WHO = ["--name", "llmgw-node05", "--ip", "239.77.0.145/24"];
const way = () => ["--pve-host", pve.url, "--pve-token-file", "token", "--pve-ca", pve.ca_file];
const make = (...more: string[]) => run(["provision", ...WHO, ...way(), ...more]);

test(
  "a machine is made in one call, resized and started; the image is fetched once",
  async () => {
    const first = await make();
    expect(first.err).toContain("llmgw-node05 is made and starts, after");
    expect(first).toMatchObject({ code: 0, out: "llmgw-node05 145 pve1\n" });
    expect(first.err).toContain("1 key may log in as root:");
    expect(first.err).toMatch(/SHA256:[A-Za-z0-9+/]{43} ops@laptop/);
    const machine = pve.machines.get(145) ?? {};
    expect(machine).toMatchObject({ cpu: "host", cores: "8", memory: "32768", ipconfig0: "ip=239.77.0.145/24,gw=239.77.0.254" });
    expect(decodeURIComponent(machine["sshkeys"] ?? "")).toBe(KEY);
    expect(pve.calls.filter((call) => !call.startsWith("GET"))).toEqual([
      "POST /nodes/pve1/storage/local/download-url",
      "POST /nodes/pve1/qemu",
      "PUT /nodes/pve1/qemu/145/resize",
      "POST /nodes/pve1/qemu/145/status/start",
    ]);
    const second = await run(["provision", "--name", "llmgw-node06", "--ip", "239.77.0.146/24", ...way()]);
    expect(second.code).toBe(0);
    expect(pve.calls.filter((call) => call.endsWith("download-url"))).toHaveLength(1);
    for (const { out, err } of [first, second]) expect(out + err).not.toContain(TOKEN.split("=")[1] as string);
  },
  TEST_MS,
);

test(
  "a dry run prints the calls and makes none of them",
  async () => {
    const { code, out, err } = await make("--dry-run", "--cpu", "kvm64");
    expect(code).toBe(0);
    expect(out).toContain("POST /nodes/pve1/qemu\n");
    expect(out).toContain("  scsi0=local-lvm:0,import-from=local:import/debian-13-genericcloud-amd64-20260914-2601.qcow2");
    expect(err).toContain("1.5B 5.80 instead of 39.09");
    expect(pve.calls.every((call) => call.startsWith("GET"))).toBe(true);
    expect(pve.machines.size).toBe(0);
  },
  TEST_MS,
);

test(
  "by password, by fingerprint, and all of it from the environment",
  async () => {
    const pinned = ["--pve-host", pve.url, "--pve-fingerprint", pve.fingerprint];
    const password = await run(["provision", ...WHO, ...pinned, "--pve-user", "root@pam", "--pve-password-file", "password"]);
    expect(password.code).toBe(0);
    const env = { LLMGW_PVE_HOST: pve.url, LLMGW_PVE_TOKEN_FILE: "token", LLMGW_PVE_CA: pve.ca_file, LLMGW_CORES: "2" };
    const words = ["provision", "--name", "two", "--ip", "239.77.0.147/24"];
    expect((await run(words, env)).code).toBe(0);
    expect(pve.machines.get(147)?.["cores"]).toBe("2");
  },
  TEST_MS,
);

test(
  "who Proxmox is and who we are is proved before a word is said",
  async () => {
    const stranger = "AA:".repeat(31) + "AA";
    const wrong = await run(["provision", ...WHO, "--pve-host", pve.url, "--pve-token-file", "token", "--pve-fingerprint", stranger]);
    expect(wrong.err).toContain("this is not the Proxmox that was pinned");
    expect(wrong.code).toBe(3);
    const untrusted = await run(["provision", ...WHO, "--pve-host", pve.url, "--pve-token-file", "token"]);
    expect(untrusted.err).toContain("name its authority with --pve-ca");
    expect(untrusted.code).toBe(3);
    expect(pve.calls).toEqual([]);
    await writeFile(join(folder, "other"), TOKEN.replace("0123", "9999"));
    const denied = await run(["provision", ...WHO, "--pve-host", pve.url, "--pve-token-file", "other", "--pve-ca", pve.ca_file]);
    expect(denied.err).toContain("invalid PVE ticket");
    expect(denied.code).toBe(3);
    const nowhere = await run(["provision", ...WHO], { PATH: "/nonexistent" });
    expect(nowhere.err).toMatch(/--pve-host, LLMGW_PVE_HOST and pve_host in .*pvesh/);
    expect(nowhere.code).toBe(2);
  },
  TEST_MS,
);

test(
  "what is taken is refused before anything is made",
  async () => {
    pve.machines.set(145, { name: "other", ipconfig0: "ip=239.77.0.9/24" });
    expect((await make()).err).toContain("VMID 145 is taken");
    pve.machines.set(999, { name: "llmgw-node05", ipconfig0: "ip=239.77.0.8/24" });
    expect((await make("--vmid", "200")).err).toContain("there is a machine called llmgw-node05");
    pve.machines.set(999, { name: "sleeping", ipconfig0: "ip=239.77.0.145/24,gw=239.77.0.254" });
    expect((await make("--vmid", "200")).err).toContain("VM 999 (sleeping) has it");
    pve.machines.clear();
    // Only root may listen where ssh does.
    const busy = createServer().listen(22, "127.77.0.145");
    const isUp = await new Promise<boolean>((resolve) => busy.once("listening", () => resolve(true)).once("error", () => resolve(false)));
    const there = await run(["provision", "--name", "x", "--ip", "127.77.0.145/24", "--gateway", "127.77.0.1", "--dry-run", ...way()]);
    if (isUp) expect(there.err).toMatch(/127\.77\.0\.145 is taken[\s\S]*something is there: its ssh port is open/);
    busy.close();
    expect(pve.calls.every((call) => call.startsWith("GET"))).toBe(true);
  },
  TEST_MS,
);

test.each<[Trouble, number, RegExp]>([
  ["create fails", 1, /does not exist.*lvcreate: out of space/],
  ["start fails", 1, /could not set up guest memory.*VM 145 was made by this run[\s\S]*qm destroy 145 --purge on pve1/],
  ["no privilege", 3, /Permission check failed \(\/vms\/145, VM.Allocate\)/],
  ["wrong digest", 1, /checksum mismatch/],
])(
  "%s: it is said, with what to do, and nothing else is touched",
  async (trouble, code, words) => {
    pve.machines.set(300, { name: "somebody-else" });
    pve.trouble = trouble;
    const ran = await make();
    expect(ran.err).toMatch(words);
    expect(ran.code).toBe(code);
    expect(pve.machines.get(300)).toEqual({ name: "somebody-else" });
    expect(pve.calls.some((call) => call.startsWith("DELETE") || call.includes("/300/status"))).toBe(false);
  },
  TEST_MS,
);

test.each<[Trouble, RegExp]>([
  ["reset in create", /is made and starts/],
  ["no answer to create", /is made and starts/],
  ["start warns", /WARNINGS: 1: WARN: no efidisk/],
  ["resize is locked once", /is made and starts/],
  ["596 once", /is made and starts/],
])(
  "%s is got over, and the machine is made once",
  async (trouble, words) => {
    pve.trouble = trouble;
    const ran = await make();
    expect(ran.err).toMatch(words);
    expect(ran.code).toBe(0);
    expect(pve.calls.filter((call) => call === "POST /nodes/pve1/qemu")).toHaveLength(1);
  },
  TEST_MS,
);

test(
  "two that want one VMID: exactly one has it, and the other made nothing",
  async () => {
    pve.images.push("local:import/debian-13-genericcloud-amd64-20260914-2601.qcow2");
    const racers = await Promise.all(
      ["one", "two", "three"].map((name, index) =>
        run(["provision", "--name", name, "--ip", `239.77.0.${150 + index}/24`, "--vmid", "150", ...way()]),
      ),
    );
    expect(racers.filter(({ code }) => code === 0)).toHaveLength(1);
    for (const { code, err } of racers) if (code !== 0) expect(err).toContain("VMID 150 is taken");
    expect([...pve.machines.keys()]).toEqual([150]);
    const winner = racers.findIndex(({ code }) => code === 0);
    expect(pve.machines.get(150)?.["name"]).toBe(["one", "two", "three"][winner]);
  },
  TEST_MS,
);

test.each(["SIGINT", "SIGTERM"] as const)(
  "%s while the machine is made is answered with what was left",
  async (signal) => {
    pve.trouble = "create goes on";
    const child = Bun.spawn([binary, "provision", ...WHO, ...way()], {
      cwd: folder,
      env: { PATH: process.env["PATH"] ?? "", HOME: folder },
      stdin: "ignore",
      stdout: "ignore",
      stderr: "pipe",
    });
    await until("the VMID is claimed", () => pve.machines.has(145), TEST_MS);
    child.kill(signal);
    const [code, err] = await Promise.all([child.exited, child.stderr.text()]);
    expect(err).toContain("interrupted (E_INTERRUPTED)");
    expect(err).toContain("VM 145 was made by this run and is left as it is");
    expect(err).toContain("qm destroy 145 --purge on pve1 removes it");
    expect(code).toBe(130);
  },
  TEST_MS,
);

test(
  "once the machine is made, a signal ends add-node at once",
  async () => {
    await using silent = createServer((socket) => socket.on("error", () => {}).resume());
    await new Promise<void>((resolve) => silent.listen(0, "127.0.0.1", resolve));
    const bound = silent.address();
    const server = `https://127.0.0.1:${typeof bound === "object" && bound ? bound.port : 0}`;
    await run(["ca", "init", "--dir", "ca"]);
    await writeFile(join(folder, "key"), ssh2.utils.generateKeyPairSync("ed25519").private, { mode: 0o600 });
    const child = Bun.spawn([binary, "add-node", ...WHO, ...way(), "--server", server, "--ca", "ca", "--ssh-key", "key"], {
      cwd: folder,
      env: { PATH: process.env["PATH"] ?? "", HOME: folder },
      stdin: "ignore",
      stdout: "ignore",
      stderr: Bun.file(join(folder, "words")),
    });
    const made = async () => (await readFile(join(folder, "words"), "utf8")).includes("is made and starts");
    await until("the machine is made", made, TEST_MS);
    child.kill("SIGINT");
    expect(await child.exited).toBe(130);
  },
  TEST_MS,
);

test(
  "no secret is in an argument list while it runs",
  async () => {
    const seen: string[] = [];
    const running = make();
    let over = false;
    void running.finally(() => (over = true));
    while (!over) {
      for (const pid of new Bun.Glob("*").scanSync({ cwd: "/proc", onlyFiles: false })) {
        if (!/^\d+$/.test(pid)) continue;
        const line = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
        if (line.includes("01234567-89ab") || line.includes(PASSWORD)) seen.push(line);
      }
      await Bun.sleep(10);
    }
    expect((await running).code).toBe(0);
    expect(seen).toEqual([]);
  },
  TEST_MS,
);

test("a word is said only over the connection that was proved", async () => {
  const login = { kind: "token", token: TOKEN } as const;
  const transport = new HttpsTransport(pve.url, { ca: null, fingerprint: pve.fingerprint }, login);
  // Were the socket passed over, the call would go to port 80 of this machine, in clear.
  const asked: string[] = [];
  const stranger = createServer((socket) => socket.on("data", (data) => asked.push(data.toString())));
  await new Promise<void>((resolve) =>
    stranger
      .once("listening", resolve)
      .once("error", () => resolve())
      .listen(80, "127.0.0.1"),
  );
  expect(await transport.request("GET", "/nodes", {})).toEqual([{ node: "pve1", status: "online" }]);
  stranger.close();
  expect(asked).toEqual([]);
});
