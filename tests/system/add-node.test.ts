// Both halves in one command: a machine is made by pvesh, boots with real systemd and sshd, becomes a node, and a real
// llama-server there answers through the gateway.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdir, symlink, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { LabServer } from "../fixtures/lab-server.ts";
import { llamaServer } from "../fixtures/llama-server.ts";
import { MachineLab, prepareMachines, succeed, type Machine } from "../fixtures/machines.ts";
import { Proxmox, TOKEN } from "../fixtures/proxmox.ts";
import { writeRelease } from "../fixtures/release-site.ts";
import { writeTinyGguf } from "../fixtures/tiny-gguf.ts";

const LONG_MS = 180_000;
const llama = await llamaServer();
const missing = (await prepareMachines()) ?? (llama === null ? "no llama-server from Debian's archive" : null);
if (missing !== null) console.log(`skipping: it needs systemd-nspawn, mmdebstrap, root and a llama-server: ${missing}`);

let lab: MachineLab;
let pve: Proxmox;
let server: LabServer;
let booted: Promise<Machine> | null = null;
const at = (...path: string[]) => join(lab.folder, ...path);

beforeAll(async () => {
  if (missing !== null) return;
  lab = await MachineLab.open();
  pve = await Proxmox.open();
  server = await LabServer.open(lab, "{ name: m, engine: llamacpp, source: /opt/m.gguf, context: 512 }");
  for (const folder of [".ssh", "bin"]) await mkdir(at(folder));
  await succeed("cp", `${lab.key}.pub`, at(".ssh/id_ed25519.pub"));
  await succeed("cp", lab.key, at(".ssh/id_ed25519"));
  await writeFile(
    at("bin/pvesh"),
    `#!/bin/sh\nexec '${process.execPath}' '${join(import.meta.dir, "../fixtures/pvesh-stand-in.ts")}' "$@"\n`,
  );
  await chmod(at("bin/pvesh"), 0o755);
  await symlink(binary, at("bin/llmgw-add-node"));
}, LONG_MS);

afterAll(async () => {
  if (missing !== null) return;
  await server.close();
  await booted;
  await lab.close();
  await pve.close();
}, 60_000);

test.skipIf(missing !== null)(
  "the runbook's command makes the machine and the node, by its name, with no token (needs systemd-nspawn)",
  async () => {
    const address = lab.here.replace(/\.1$/, ".145");
    // Somebody else had the address before.
    const old = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpdeEdBjlVOp2ViFmKa/j2WaGGMGlVlsjJmqw9BWHkT";
    await writeFile(at(".ssh/known_hosts"), `${address} ${old}\nother.example ${old}\n`, { mode: 0o600 });
    pve.bridge = { cidr: `${lab.here}/24`, gateway: lab.here };
    // The machine boots as it was made: its name, its address, the keys it was given.
    pve.started = ({ name = "", ipconfig0 = "", sshkeys = "" }) => {
      const given = { address: /^ip=([\d.]+)\//.exec(ipconfig0)?.[1] ?? "", keys: decodeURIComponent(sshkeys) };
      booted = lab.start(name, given).then(async (machine) => {
        await writeTinyGguf(join(machine.root, "opt/m.gguf"));
        await writeRelease(dirname(llama ?? ""), join(machine.root, "opt/llama.cpp"));
        return machine;
      });
    };
    const words = [
      "--name",
      "llmgw-node05",
      "--ip",
      `${address}/24`,
      "--server",
      server.url,
      "--cores",
      "8",
      "--memory",
      "32768",
      "--disk",
      "60",
    ];
    const child = Bun.spawn([at("bin/llmgw-add-node"), ...words, "--llamacpp-bin", "/opt/llama.cpp/llama-server", "--ca", at("ca")], {
      env: {
        PATH: `${at("bin")}:${process.env["PATH"]}`,
        HOME: lab.folder,
        LLMGW_PVE_NODE: "pve1",
        STAND_IN_URL: pve.url,
        STAND_IN_CA: pve.ca_file,
        STAND_IN_TOKEN: TOKEN,
      },
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
    console.log(err);
    expect({ code, out }).toEqual({ code: 0, out: expect.stringMatching(/llmgw-node05\s+ready/) });
    for (const step of ["checks", "image", "create", "start", "ssh", "facts", "binary", "certificate", "joined"])
      expect(err).toMatch(new RegExp(` s {2}${step} `));
    expect(err).toContain(`took the old host key of ${address} out of`);
    expect(await Bun.file(at(".ssh/known_hosts")).text()).toContain("other.example");
    expect(err).toMatch(/llmgw-node05 is a node, after [\d.]+ s/);
    expect(pve.machines.get(145)).toMatchObject({ name: "llmgw-node05", cores: "8", memory: "32768", cpu: "host" });
    expect(await server.chat("m", 60_000)).toMatchObject({ model: "m", usage: { completion_tokens: 5 } });
  },
  LONG_MS,
);
