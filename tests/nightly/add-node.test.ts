// Both halves of add-node against a virtual machine: what the stand-in for Proxmox is asked to create boots in QEMU with cloud-init,
// becomes a node, and a real llama-server there answers through the gateway. Minutes where there is no KVM.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { LabServer } from "../fixtures/lab-server.ts";
import { llamaServer } from "../fixtures/llama-server.ts";
import { MachineLab, succeed } from "../fixtures/machines.ts";
import { Proxmox, TOKEN } from "../fixtures/proxmox.ts";
import { writeRelease } from "../fixtures/release-site.ts";
import { writeTinyGguf } from "../fixtures/tiny-gguf.ts";
import { hasKvm, prepareVirtualMachines, VirtualMachine } from "../fixtures/virtual-machine.ts";

const LONG_MS = 900_000;
const IMAGE = "local:import/debian.qcow2";
const llama = await llamaServer();
const missing = (await prepareVirtualMachines()) ?? (llama === null ? "no llama-server from Debian's archive" : null);
if (missing !== null) console.log(`cannot run: ${missing}`);

let lab: MachineLab;
let pve: Proxmox;
let server: LabServer;
let release = "";
let machine: Promise<VirtualMachine> | null = null;
const at = (...path: string[]) => join(lab.folder, ...path);

beforeAll(async () => {
  if (missing !== null) return;
  lab = await MachineLab.open();
  pve = await Proxmox.open();
  server = await LabServer.open(lab, "{ name: m, engine: llamacpp, source: /opt/m.gguf, context: 512 }");
  await mkdir(at(".ssh"));
  await succeed("cp", `${lab.key}.pub`, at(".ssh/id_ed25519.pub"));
  await succeed("cp", lab.key, at(".ssh/id_ed25519"));
  await writeFile(at("token"), `${TOKEN}\n`, { mode: 0o600 });
  // Not below /tmp, for the node gets it at the same path.
  release = await mkdtemp("/opt/llmgw-nightly-");
  await writeRelease(dirname(llama ?? ""), release);
}, LONG_MS);

afterAll(async () => {
  if (missing !== null) return;
  await server.close();
  await (await machine)?.stop();
  await lab.close();
  await rm(release, { recursive: true, force: true });
  await pve.close();
}, 60_000);

test(
  "add-node makes a virtual machine and a node of it, and its model answers",
  async () => {
    expect(missing).toBeNull();
    const address = lab.here.replace(/\.1$/, ".145");
    pve.bridge = { cidr: `${lab.here}/24`, gateway: lab.here };
    pve.images.push(IMAGE);
    pve.started = (created) => {
      machine = VirtualMachine.start(created, at("machine"), lab.bridge, lab.here);
    };
    const way = ["--pve-host", pve.url, "--pve-token-file", at("token"), "--pve-ca", pve.ca_file, "--image", IMAGE];
    const size = ["--cores", "2", "--memory", "2048", "--disk", "8"];
    const words = ["--name", "llmgw-node05", "--ip", `${address}/24`, "--server", server.url, ...size, ...way];
    const child = Bun.spawn([binary, "add-node", ...words, "--llamacpp-bin", release, "--ca", at("ca")], {
      env: { PATH: process.env["PATH"] ?? "", HOME: lab.folder },
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    console.log(`${hasKvm() ? "with KVM" : "emulated, without KVM"}:\n${err}`);
    if (code !== 0) console.log(await (await machine)?.said());
    expect({ code, out }).toEqual({ code: 0, out: expect.stringMatching(/llmgw-node05\s+ready/) });

    const ssh = ["ssh", "-o", "BatchMode=yes", "-o", `UserKnownHostsFile=${at(".ssh/known_hosts")}`, "-i", lab.key, `root@${address}`];
    const there = (...argv: string[]) => succeed(...ssh, ...argv);
    // It is the machine that was ordered.
    expect((await there("hostname")).trim()).toBe("llmgw-node05");
    expect((await there("nproc")).trim()).toBe("2");
    expect(Number((await there("cat", "/sys/block/sda/size")).trim()) * 512).toBe(8 * 2 ** 30);
    expect(await there("cat", "/sys/block/sda/queue/rotational")).toBe("0\n");
    expect(Number(/MemTotal: *(\d+)/.exec(await there("cat", "/proc/meminfo"))?.[1])).toBeGreaterThan(1.8 * 2 ** 20);
    // 2 is a warning: what Proxmox writes uses a word that cloud-init calls deprecated.
    expect(await there("cloud-init status --wait || [ $? = 2 ]")).toContain("status: done");

    // A clock of its own, which can be wrong.
    await there("date", "--set=+2hours");
    const who = ["--node", "llmgw-node05", "--addr", address, "--server", server.url, "--ca", at("ca")];
    const late = await succeed(binary, "onboard", ...who, "--ssh-key", lab.key, "--known-hosts", at(".ssh/known_hosts")).catch(String);
    expect(late).toMatch(/clock.* 2 h ahead/s);
    await there("date", "--set=-2hours");

    await writeTinyGguf(at("m.gguf"));
    await succeed("scp", ...ssh.slice(1, -1), at("m.gguf"), `root@${address}:/opt/m.gguf`);
    expect(await server.chat("m", 180_000)).toMatchObject({ model: "m", usage: { completion_tokens: 5 } });
  },
  LONG_MS,
);
