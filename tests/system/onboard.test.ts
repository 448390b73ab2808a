// The compiled binary makes nodes of machines with real systemd and sshd.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readFile, rm, stat, symlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { NodeList } from "../../src/protocol/admin-api.ts";
import { parseAs } from "../../src/protocol/errors.ts";
import { binary } from "../../release/fresh.ts";
import { LabServer } from "../fixtures/lab-server.ts";
import { MachineLab, prepareMachines, succeed, until, type Machine } from "../fixtures/machines.ts";

const LONG_MS = 120_000;
const missing = await prepareMachines();
if (missing !== null) console.log(`skipping machines: they need systemd-nspawn, mmdebstrap and root: ${missing}`);
const machineTest = (name: string, run: () => Promise<void>) =>
  test.skipIf(missing !== null)(`${name} (needs systemd-nspawn)`, run, LONG_MS);

let lab: MachineLab;
let server: LabServer;
let node: Machine;
const releases: string[] = [];
const at = (...path: string[]) => join(lab.folder, ...path);

beforeAll(async () => {
  if (missing !== null) return;
  lab = await MachineLab.open();
  server = await LabServer.open(lab, "{ name: m, engine: sim, replicas: 1 }");
  node = await lab.start("lab-node1");
}, LONG_MS);

afterAll(async () => {
  if (missing !== null) return;
  await server.close();
  await lab.close();
  for (const release of releases) await rm(release, { recursive: true, force: true });
}, 60_000);

interface Ended {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

function begin(machine: Machine, ...more: string[]): { child: Bun.Subprocess; ended: Promise<Ended> } {
  const named = more.includes("--node") ? [] : ["--node", machine.name];
  const key = more.includes("--ssh-key") ? [] : ["--ssh-key", lab.key];
  const words = [
    "onboard",
    ...named,
    ...key,
    "--addr",
    machine.address,
    "--server",
    server.url,
    "--known-hosts",
    at("known"),
    "--ca",
    at("ca"),
  ];
  const child = Bun.spawn([binary, ...words, ...more], {
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    env: { PATH: process.env["PATH"] ?? "", HOME: lab.folder },
  });
  const ended = Promise.all([child.exited, child.stdout.text(), child.stderr.text()]).then(([code, out, err]) => ({ code, out, err }));
  return { child, ended };
}
const onboard = (machine: Machine, ...more: string[]) => begin(machine, ...more).ended;
/** Names of the steps that were done, with their seconds. */
const done = (err: string) => [...err.matchAll(/^ *[\d.]+ s {2}(\S+)/gm)].map(([, name]) => name);

/** Everything that looks like a key in any argument list, on both machines: they share one /proc as it is seen from here. */
async function watchArguments(over: Promise<unknown>): Promise<string[]> {
  const found: string[] = [];
  let running = true;
  void over.finally(() => (running = false));
  const caKey = (await readFile(at("ca/ca.key"), "utf8")).split("\n")[1] as string;
  while (running) {
    for (const pid of new Bun.Glob("*").scanSync({ cwd: "/proc", onlyFiles: false })) {
      if (!/^\d+$/.test(pid)) continue;
      const line = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (line.includes("PRIVATE KEY") || line.includes(caKey)) found.push(line.replaceAll("\0", " "));
    }
    await Bun.sleep(20);
  }
  return found;
}

machineTest("a machine that is still booting becomes a node, and no secret is in any argument list or word", async () => {
  const began_ms = performance.now();
  const running = onboard(node);
  const seen = await watchArguments(running);
  const { code, out, err } = await running;
  console.log(err);
  expect(err).toContain("is a node, after");
  expect(code).toBe(0);
  expect(out).toMatch(/lab-node1\s+ready/);
  expect(performance.now() - began_ms).toBeLessThan(60_000);
  expect(seen).toEqual([]);
  const key = await readFile(join(node.root, "etc/llmgw/tls/node.key"), "utf8");
  for (const line of key.split("\n").filter((line) => line.length > 30 && !line.startsWith("---"))) {
    expect(err).not.toContain(line);
    expect(await succeed("grep", "-rlF", line, at("ca")).catch(() => "")).toBe("");
  }
  expect((await stat(join(node.root, "etc/llmgw/tls/node.key"))).mode & 0o777).toBe(0o600);
  expect(await node.run("systemctl", "is-enabled", "llmgw-agent")).toBe("enabled\n");
  const authority = (await readFile(at("ca/ca.crt"), "utf8")).split("\n")[1] as string;
  expect(await readFile(join(node.root, "etc/ssl/certs/ca-certificates.crt"), "utf8")).toContain(authority);
});

machineTest("the same again changes nothing", async () => {
  const pid = await node.run("systemctl", "show", "-p", "MainPID", "--value", "llmgw-agent");
  const listed = () => node.run("find", "/etc", "/usr/local", "-newermt", "2020-01-01", "-printf", "%p %T@ %s\n");
  const before = await listed();
  const { code, err } = await onboard(node);
  expect(code).toBe(0);
  expect(done(err)).toEqual(["server", "ssh", "facts", "joined"]);
  expect(await node.run("systemctl", "show", "-p", "MainPID", "--value", "llmgw-agent")).toBe(pid);
  expect(await listed()).toBe(before);
});

machineTest("a renewed certificate restarts the agent and leaves its engine alone", async () => {
  const engine = async () => {
    const text = await server.ctl("replicas", "-o", "json");
    return (JSON.parse(text) as { items: { state: string; ranks: { engine_pid: number | null }[] }[] }).items[0];
  };
  await until("the replica is ready", async () => (await engine())?.state === "ready", 30_000);
  const pid = (await engine())?.ranks[0]?.engine_pid;
  const serial = () => node.run("sha256sum", "/etc/llmgw/tls/node.crt");
  const before = await serial();
  const { code, err } = await onboard(node, "--renew");
  expect(code).toBe(0);
  expect(done(err)).toEqual(["server", "ssh", "facts", "certificate", "agent", "joined"]);
  expect(await serial()).not.toBe(before);
  await until("the engine is reported again", async () => (await engine())?.ranks[0]?.engine_pid === pid, 20_000);
  const [listed] = parseAs(NodeList, JSON.parse(await server.ctl("nodes", "-o", "json")), "the nodes").items;
  expect(listed?.state).toBe("ready");
});

interface Listed {
  readonly state: string;
  readonly failures: number;
  readonly ranks: readonly { readonly attempt: string; readonly engine_pid: number | null }[];
}
const listed = async () => (JSON.parse(await server.ctl("replicas", "-o", "json")) as { items: Listed[] }).items[0];

machineTest("an older agent that serves is replaced, and its engine serves on", async () => {
  const [commit = ""] = /(?<=commit )[0-9a-f]{12}/.exec(await succeed(binary, "version")) ?? [];
  const text = (await readFile(binary)).toString("latin1").replaceAll(commit, "0".repeat(12));
  await writeFile(at("older"), Buffer.from(text, "latin1"), { mode: 0o755 });
  const onboarded = async (...more: string[]) => {
    const { code, err } = await onboard(node, ...more);
    expect({ code, done: done(err) }).toEqual({ code: 0, done: ["server", "ssh", "facts", "binary", "agent", "joined"] });
  };
  await onboarded("--binary", at("older"));
  expect(await node.run("/usr/local/bin/llmgw", "version")).toContain("commit 000000000000");
  await until("the replica is ready", async () => (await listed())?.state === "ready", 30_000);
  const pid = (await listed())?.ranks[0]?.engine_pid;
  expect(pid).toBeNumber();
  await onboarded();
  expect(await node.run("/usr/local/bin/llmgw", "version")).toContain(`commit ${commit}`);
  await until("the engine is reported again", async () => (await listed())?.ranks[0]?.engine_pid === pid, 20_000);
  expect((await listed())?.failures).toBe(0);
});

machineTest("a rank is a service of its own, which outlives every end of the agent", async () => {
  await until("the replica is ready", async () => (await listed())?.state === "ready", 30_000);
  const [rank] = (await listed())?.ranks ?? [];
  const unit = `llmgw-rank-${rank?.attempt}.service`;
  expect(await node.run("cat", `/proc/${rank?.engine_pid}/cgroup`)).toContain(`/llmgw.slice/${unit}`);
  expect(await node.run("systemctl", "show", "--property=Slice", "--value", unit)).toBe("llmgw.slice\n");
  expect(await node.run("systemctl", "show", "--property=OOMPolicy", "--value", unit)).toBe("continue\n");
  expect(await node.run("stat", "-c", "%a", `/var/lib/llmgw/ranks/${rank?.attempt}/environment`)).toBe("600\n");
  for (const end of [["kill", "--signal=SIGKILL", "--kill-who=main"], ["stop"], ["restart"]]) {
    await node.run("systemctl", ...end, "llmgw-agent");
    await node.run("systemctl", "start", "llmgw-agent");
    await until("the engine is reported again", async () => (await listed())?.ranks[0]?.engine_pid === rank?.engine_pid, 30_000);
  }
  expect((await listed())?.failures).toBe(0);
});

machineTest("what a killed shim leaves is ended with its service, and the rank is started again", async () => {
  const attempt = (await listed())?.ranks[0]?.attempt;
  const unit = `llmgw-rank-${attempt}.service`;
  await node.run("systemctl", "kill", "--signal=SIGKILL", "--kill-who=main", unit);
  const again = async () => {
    const seen = await listed();
    return seen?.state === "ready" && seen.ranks[0]?.attempt !== attempt && seen.ranks[0]?.engine_pid !== null;
  };
  await until("the replica is ready again", again, 60_000);
  await until(
    "the service is gone",
    async () => !(await node.run("systemctl", "list-units", "--all", "--plain", "llmgw-rank-*")).includes(unit),
    20_000,
  );
});

machineTest("a dry run of a fresh machine says what it would do and leaves it as it is", async () => {
  const fresh = await lab.start("lab-node2");
  const { code, err, out } = await onboard(fresh, "--dry-run");
  expect(code).toBe(0);
  expect(out).toBe("");
  expect(err).toContain("would be done: there is no /etc/llmgw/agent.yaml");
  expect(await fresh.run("sh", "-c", "ls -d /etc/llmgw /usr/local/bin/llmgw 2>/dev/null; true")).toBe("");
});

machineTest("a login that is cut in the middle of the upload is begun again and ends well", async () => {
  const fresh = await lab.start("lab-node3");
  await fresh.up();
  const { ended } = begin(fresh);
  let cut = false;
  const uploading = async () => {
    for (const pid of await fresh.processes()) {
      const line = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (!line.startsWith("cat\0")) continue;
      for (const other of await fresh.processes()) {
        const name = await readFile(`/proc/${other}/cmdline`, "utf8").catch(() => "");
        if (name.startsWith("sshd: root")) process.kill(other, "SIGKILL");
      }
      cut = true;
    }
    return cut;
  };
  await until("the upload has begun", uploading, 30_000);
  const { code, err } = await ended;
  expect(err).toContain("beginning again");
  expect(code).toBe(0);
  expect(await fresh.run("sh", "-c", "ls -A /usr/local/bin")).toBe("llmgw\n");
});

machineTest("what cannot be a node is refused, with the reason, before anything is changed", async () => {
  const fresh = await lab.start("lab-node4");
  await fresh.up();
  const refused = async (exit: number, word: string, ...more: string[]) => {
    const { code, err } = await onboard(fresh, ...more);
    expect(err).toContain(word);
    expect(code).toBe(exit);
  };
  await refused(1, "is called lab-node4, not other", "--node", "other");
  const arm = at("llmgw-linux-arm64");
  const head = Buffer.alloc(64);
  head.write("\x7fELF", "latin1");
  head.set([2, 1, 1], 4);
  head.writeUInt16LE(183, 18);
  await writeFile(arm, head);
  await refused(2, "is for arm64", "--binary", arm);
  head.writeUInt16LE(62, 18);
  await writeFile(arm, head);
  await refused(1, "is no program of its kind", "--binary", arm);
  await refused(1, "/opt/none/llama-server", "--llamacpp-bin", "/opt/none/llama-server");
  await succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", at("stranger"));
  await refused(3, "stranger (SHA256:", "--ssh-key", at("stranger"));
  await fresh.run("mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", "/usr/local/bin");
  await refused(1, "there is no room in /usr/local/bin");
  await fresh.run("mount", "-o", "remount,ro", "/usr/local/bin");
  await refused(1, "/usr/local/bin cannot be written");
  await fresh.run("umount", "/usr/local/bin");
});

machineTest("another user needs sudo without a password, and is then as good as root", async () => {
  const fresh = await lab.start("lab-node5");
  await fresh.up();
  await fresh.run("useradd", "-m", "-s", "/bin/bash", "ops");
  await fresh.run("install", "-d", "-o", "ops", "-m", "700", "/home/ops/.ssh");
  await fresh.run("install", "-o", "ops", "-m", "600", "/root/.ssh/authorized_keys", "/home/ops/.ssh/authorized_keys");
  const first = await onboard(fresh, "--ssh-user", "ops");
  expect(first.err).toContain("ops ALL=(ALL) NOPASSWD: ALL");
  expect(first.code).toBe(3);
  await fresh.run("sh", "-c", "echo 'ops ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/llmgw");
  const { code, out } = await onboard(fresh, "--ssh-user", "ops");
  expect(code).toBe(0);
  expect(out).toMatch(/lab-node5\s+ready/);
});

machineTest("a machine with another host key is refused until its old one is cleared", async () => {
  await node.run("sh", "-c", "rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh");
  const { code, err } = await onboard(node);
  expect(code).toBe(3);
  expect(err).toContain(`${at("known")}:1`);
  const [, command = ""] = /try: .*(ssh-keygen -R .*)$/m.exec(err) ?? [];
  await succeed("sh", "-c", command);
  await rm(at("known.old"), { force: true });
  expect((await onboard(node)).code).toBe(0);
});

machineTest("a revoked node comes back only when it is asked for", async () => {
  await server.ctl("revoke", node.name);
  const { code, err } = await onboard(node);
  expect(err).toContain("was revoked");
  expect(code).toBe(3);
  expect((await onboard(node, "--renew")).code).toBe(0);
});

machineTest("an agent that cannot start is explained in its own words", async () => {
  await node.run("mkdir", "-p", "/etc/systemd/system/llmgw-agent.service.d");
  const lines = "[Service]\nInaccessiblePaths=/etc/llmgw/tls\n";
  await writeFile(join(node.root, "etc/systemd/system/llmgw-agent.service.d/broken.conf"), lines);
  const { code, err } = await onboard(node, "--renew");
  await rm(join(node.root, "etc/systemd/system/llmgw-agent.service.d/broken.conf"));
  expect(err).toMatch(/the agent says: .*\/etc\/llmgw\/tls/);
  expect(code).toBe(4);
  const again = await onboard(node);
  expect(again.err).toContain("is a node, after");
  expect(again.code).toBe(0);
});

machineTest(
  "called by its runbook name it copies a folder of llama.cpp, and tells when the node does not offer what is in it",
  async () => {
    const link = at("llmgw-add-node");
    await symlink(binary, link);
    // Not below /tmp, for the node gets it at the same path; and nobody else may look into it here.
    const release = await mkdtemp("/opt/llmgw-release-");
    releases.push(release);
    await writeFile(join(release, "llama-server"), '#!/bin/sh\necho "version: 1 (test)"\n', { mode: 0o700 });
    await writeFile(join(release, "libggml.so"), "library");
    const who = ["--name", node.name, "--ip", `${node.address}/24`, "--server", server.url, "--ssh-key", lab.key];
    const rest = ["--known-hosts", at("known"), "--ca", at("ca"), "--onboard-only"];
    const add = (path: string) => succeed(link, ...who, ...rest, "--llamacpp-bin", path).catch(String);
    expect(await add(release)).toMatch(/lab-node1\s+ready .* llamacpp 1/);
    expect(await node.run("cat", `${release}/libggml.so`)).toBe("library");
    expect(await node.run("cat", "/etc/llmgw/agent.yaml")).toContain(`llamacpp_bin: ${release}/llama-server`);
    await node.run("sh", "-c", "printf '#!/bin/sh\\necho hello' > /opt/talker; chmod 755 /opt/talker");
    expect(await add("/opt/talker")).toContain("lab-node1 has joined, and does not offer llamacpp (E_ENGINE)");
    await node.run("rm", `${release}/.llmgw-copy`);
    expect(await add(release)).toContain("does not replace it");
    await node.run("install", "-D", "-m", "755", `${release}/llama-server`, "/root/engine/llama-server");
    expect(await add("/root/engine/llama-server")).toMatch(/\/root\/engine\/llama-server --version: .*ermission denied/);
    expect(await add("/tmp/llama-server")).toContain("the agent has a /tmp of its own");
  },
);
