// What is typed wrong is told by its name, before anything is made: never as a fault of llmgw's own.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmod, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { PASSWORD, Proxmox, TOKEN } from "../fixtures/proxmox.ts";

const TEST_MS = 60_000;
const KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpdeEdBjlVOp2ViFmKa/j2WaGGMGlVlsjJmqw9BWHkT ops@laptop";
let folder = "";
let pve: Proxmox;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-words-"));
  await mkdir(join(folder, ".ssh"));
  const files = {
    ".ssh/authorized_keys": `${KEY}\n`,
    token: `${TOKEN}\n`,
    password: `${PASSWORD}\n`,
    "no-token": "root@pam!x=abc\n",
    "strange-token": TOKEN.replace("llmgw", "l\u00e4mgw"),
    "two-tokens": `${TOKEN}\n${TOKEN}\n`,
    empty: "\n",
    "no-pem": "hello\n",
    "bad-pem": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    "no-keys": `command="x" ${KEY}\n`,
    "user.yaml": "user: debian\n",
  };
  for (const [name, text] of Object.entries(files)) await writeFile(join(folder, name), text, { mode: 0o600 });
  pve = await Proxmox.open();
});
afterAll(async () => {
  await pve.close();
  await rm(folder, { recursive: true, force: true });
});

async function run(words: readonly string[], env: Record<string, string> = {}) {
  const child = Bun.spawn([binary, ...words], {
    cwd: folder,
    env: { PATH: process.env["PATH"] ?? "", HOME: folder, ...env },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  return { out, err, code };
}

const WHO = { name: "llmgw-node05", ip: "239.77.0.145/24" };
/** A whole command line, in which single flags are others or absent (null). */
function words(changed: Readonly<Record<string, string | null>>): string[] {
  const usual = { ...WHO, "pve-host": pve.url, "pve-token-file": "token", "pve-ca": pve.ca_file, ...changed };
  return ["provision", "--dry-run", ...Object.entries(usual).flatMap(([name, value]) => (value === null ? [] : [`--${name}=${value}`]))];
}

test.each<[Record<string, string | null>, number, string]>([
  [{ ip: "239.77.0.255/24" }, 2, "--ip cannot be"],
  [{ gateway: "10.0.0.1" }, 2, "--gateway cannot be 10.0.0.1"],
  [{ image: "https://" }, 2, "--image is not usable"],
  [{ image: "https://ops:hunter2@host/x.qcow2" }, 2, "--image is not usable"],
  [{ "pve-host": "https://" }, 2, 'Proxmox cannot be at "https://"'],
  [{ "pve-host": "http://pve1:8006" }, 2, "Proxmox cannot be at"],
  [{ "pve-host": "https://ops:hunter2@pve1" }, 2, "Proxmox cannot be at"],
  [{ "pve-host": "https://pve1/api2" }, 2, "Proxmox cannot be at"],
  [{ "pve-host": "pve1:99999" }, 2, "Proxmox cannot be at"],
  [{ "pve-host": "https://[::1" }, 2, "Proxmox cannot be at"],
  [{ "pve-host": "127.0.0.1:1" }, 3, "cannot reach Proxmox at https://127.0.0.1:1"],
  [{ "pve-host": "[::1]:1" }, 3, "cannot reach Proxmox at https://[::1]:1"],
  [
    { "pve-host": "127.0.0.1:1", "pve-token-file": null, "pve-user": "root@pam", "pve-password-file": "password" },
    3,
    "cannot reach Proxmox",
  ],
  [{ "pve-token-file": "nothing" }, 1, "cannot read"],
  [{ "pve-token-file": ".ssh" }, 1, "cannot read"],
  [{ "pve-token-file": "/dev/zero" }, 1, "cannot read /dev/zero"],
  [{ "pve-token-file": "empty" }, 1, "empty is empty"],
  [{ "pve-token-file": "no-token" }, 2, "no-token holds no API token"],
  [{ "pve-token-file": "strange-token" }, 2, "strange-token holds no API token"],
  [{ "pve-token-file": "two-tokens" }, 2, "two-tokens holds no API token"],
  [{ "pve-token-file": null }, 2, "there is nothing to log in to Proxmox with"],
  [{ "pve-ca": "no-pem" }, 2, "no-pem cannot be Proxmox's authority"],
  [{ "pve-ca": "bad-pem" }, 2, "bad-pem cannot be Proxmox's authority"],
  [{ "pve-ca": "/dev/null" }, 2, "/dev/null cannot be Proxmox's authority"],
  [{ "pve-ca": "/dev/zero" }, 1, "cannot read /dev/zero"],
  [{ "ssh-keys": "no-keys" }, 2, "there is no public key in no-keys"],
  [{ "ssh-keys": "/dev/zero" }, 1, "cannot read /dev/zero"],
])(
  "%j is refused with %i",
  async (changed, code, said) => {
    pve.calls.length = 0;
    const ran = await run(words(changed));
    expect(ran.err).toContain(said);
    expect(ran.err).toMatch(/\n {2}\S.*\n {2}try: \S.*\n$/);
    expect(ran.err).not.toMatch(/E_INTERNAL|hunter2|\n\s+at /);
    expect(ran.err).not.toContain(TOKEN.split("=")[1] as string);
    expect(ran.code).toBe(code);
    expect(pve.calls.filter((call) => !call.startsWith("GET"))).toEqual([]);
  },
  TEST_MS,
);

test(
  "a secret that others may read is told of, and one from a pipe is taken",
  async () => {
    await chmod(join(folder, "token"), 0o644);
    expect((await run(words({}))).err).toContain("warning: others than you may read token; chmod 600 token");
    await chmod(join(folder, "token"), 0o600);
    expect((await run(words({}))).err).not.toContain("warning");
    const child = Bun.spawn(
      ["bash", "-c", 'exec "$@" --pve-token-file <(cat token)', "bash", binary, ...words({ "pve-token-file": null })],
      {
        cwd: folder,
        env: { PATH: process.env["PATH"] ?? "", HOME: folder },
        stdout: "ignore",
        stderr: "pipe",
      },
    );
    expect(await child.stderr.text()).not.toContain("warning");
    expect(await child.exited).toBe(0);
  },
  TEST_MS,
);

test(
  "what is in ~/.ssh and is no file keeps nobody waiting",
  async () => {
    const pipe = join(folder, ".ssh", "pipe.pub");
    expect(Bun.spawnSync(["mkfifo", pipe]).exitCode).toBe(0);
    await mkdir(join(folder, ".ssh", "folder.pub"));
    const ran = await run(words({}));
    expect(ran.err).toContain("1 key may log in as root:");
    expect(ran.code).toBe(0);
  },
  TEST_MS,
);
