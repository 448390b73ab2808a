// ssh to a real sshd: Debian's, in a root and mount namespace of its own, on loopback.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { credentialsOf, type Credential } from "../../src/onboard/keys.ts";
import { nodeShell } from "../../src/onboard/node-shell.ts";
import { connect, type SshTarget } from "../../src/onboard/ssh.ts";
import { OperatorError } from "../../src/protocol/errors.ts";
import { freePortOf } from "../e2e/fleet.ts";
import { NODE_SYSTEM, prepareMachines, succeed } from "../fixtures/machines.ts";

const missing = await prepareMachines();
if (missing !== null) console.log(`skipping sshd: it needs mmdebstrap and root: ${missing}`);
const sshdTest = (name: string, run: () => Promise<void>) => test.skipIf(missing !== null)(`${name} (needs mmdebstrap)`, run, 30_000);

/** Nothing of it is seen outside: the mounts are its own. */
const SSHD = `
mount --bind "$2" "$1/mnt"
mount -t tmpfs tmpfs "$1/run"
mkdir "$1/run/sshd"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
exec chroot "$1" /usr/sbin/sshd -D -e -f /mnt/sshd_config -p "$3" -h "/mnt/$4"
`;

let folder: string;
let daemon: Bun.Subprocess | null = null;
let port = 0;

const keygen = (name: string, phrase = "") =>
  succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-C", "test", "-f", join(folder, name));

function startDaemon(host_key = "host"): void {
  daemon = Bun.spawn(["unshare", "--mount", "sh", "-euc", SSHD, "sh", NODE_SYSTEM, folder, String(port), host_key], {
    stdin: "ignore",
    stdout: "ignore",
    stderr: Bun.file(join(folder, "sshd.log")),
  });
}

async function stopDaemon(): Promise<void> {
  daemon?.kill();
  await daemon?.exited;
  daemon = null;
}

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-ssh-"));
  if (missing !== null) return;
  for (const name of ["host", "other-host", "id", "stranger"]) await keygen(name);
  await keygen("locked", "open sesame");
  const keys = ["id", "locked"].map((name) => readFile(join(folder, `${name}.pub`), "utf8"));
  await writeFile(join(folder, "authorized"), (await Promise.all(keys)).join(""));
  const lines = ["ListenAddress 127.0.0.1", "AuthorizedKeysFile /mnt/authorized", "StrictModes no", "UsePAM no", "PermitRootLogin yes"];
  await writeFile(join(folder, "sshd_config"), [...lines, "PasswordAuthentication no", "PidFile none", ""].join("\n"));
  port = await freePortOf("127.0.0.1");
  startDaemon();
});
afterAll(async () => {
  await stopDaemon();
  await rm(folder, { recursive: true });
});

const keyOf = async (name: string, phrase: string | null = null): Promise<Credential[]> => {
  const source = { key_file: join(folder, name), agent: null, home: folder, passphrase: async () => phrase };
  return (await credentialsOf(source)).credentials;
};
const target = async (known: string, key = "id", at = port): Promise<SshTarget> => ({
  host: "127.0.0.1",
  port: at,
  user: "root",
  credentials: await keyOf(key),
  known_hosts: [join(folder, known)],
});
const refused = async (to: SshTarget, wait_ms: number): Promise<OperatorError> => {
  const error = await connect(to, wait_ms, () => {}).then(
    () => null,
    (thrown: unknown) => thrown,
  );
  if (!(error instanceof OperatorError)) throw new Error(`not refused as it should be: ${String(error)}`);
  return error;
};

sshdTest("commands run with their input, output and codes", async () => {
  const remote = await connect(await target("known"), 20_000, () => {});
  expect(await remote.run(["sh", "-c", 'cat; echo "$1" >&2; exit 7', "sh", "it's"], { input: "in" })).toEqual({
    code: 7,
    out: "in",
    err: "it's\n",
  });
  const big = new Uint8Array(3 * 1024 * 1024).fill(97);
  const chunks = (async function* () {
    yield big;
  })();
  expect((await remote.run(["wc", "-c"], { input: chunks })).out.trim()).toBe(String(big.length));
  expect((await remote.run(["sh", "-c", "kill -9 $$"])).err).toContain("ended by");
  const late = await remote.run(["sleep", "20"], { deadline_ms: 200 }).then(() => "", String);
  expect(late).toContain("sleep does not end on the node");
  const shell = await nodeShell(remote, "me", "node", () => {});
  const [program, step] = await Promise.all([
    shell.run(["sleep", "20"], { deadline_ms: 200 }).then(() => "", String),
    shell.script("looking for it", "sleep 20", [], { deadline_ms: 200 }).then(() => "", String),
  ]);
  expect(program).toContain("sleep does not end on the node");
  expect(step).toContain("looking for it does not end on the node");
  remote.close();
});

sshdTest("a lost connection is told as one", async () => {
  const remote = await connect(await target("known"), 20_000, () => {});
  const pid = (await remote.run(["sh", "-c", "echo $PPID"])).out.trim();
  const running = remote.run(["sleep", "20"]).then(() => "", String);
  process.kill(Number(pid), "SIGKILL");
  expect(await running).toContain("ConnectionLost");
});

sshdTest("a host key is learned once, and a changed one is refused at once with its place", async () => {
  const said: string[] = [];
  const to = await target("changed");
  (await connect(to, 20_000, (text) => said.push(text))).close();
  (await connect(to, 20_000, (text) => said.push(text))).close();
  expect(said.filter((text) => text.includes("learned the host key"))).toHaveLength(1);
  await stopDaemon();
  startDaemon("other-host");
  const began_ms = performance.now();
  const error = await refused(to, 60_000);
  expect(performance.now() - began_ms).toBeLessThan(10_000);
  expect(error.code).toBe("E_SSH");
  expect(error.why).toContain(`${folder}/changed:1`);
  expect(error.remedy).toContain(`ssh-keygen -R '[127.0.0.1]:${port}' -f ${folder}/changed`);
  await stopDaemon();
  startDaemon();
});

sshdTest("a key nobody knows there is named, and not tried for long", async () => {
  (await connect(await target("known"), 20_000, () => {})).close();
  const error = await refused(await target("known", "stranger"), 60_000);
  expect([error.code, error.exit]).toEqual(["E_SSH", 3]);
  expect(error.why).toContain(`${folder}/stranger (SHA256:`);
});

sshdTest("an encrypted key opens with its passphrase, and is told of without one", async () => {
  const to = await target("known");
  (await connect({ ...to, credentials: await keyOf("locked", "open sesame") }, 20_000, () => {})).close();
  expect(await keyOf("locked").then(() => "", String)).toContain("cannot be used");
  expect(await keyOf("locked", "wrong").then(() => "", String)).toContain("cannot be used");
  expect(await keyOf("id.pub").then(() => "", String)).toContain("cannot be used");
});

sshdTest("a machine that comes up later is waited for", async () => {
  await stopDaemon();
  const said: string[] = [];
  const coming = connect(await target("known"), 20_000, (text) => said.push(text));
  await Bun.sleep(500);
  startDaemon();
  (await coming).close();
  expect(said.join()).toContain("connection refused");
});
