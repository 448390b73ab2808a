// What stands for Proxmox answers by halves, late, as somebody else or not at all: it is said for what it is, --timeout and a signal
// are obeyed, and nothing of another's is touched.
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "bun:test";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { TLSSocket } from "node:tls";
import { binary } from "../../release/fresh.ts";
import { until } from "../fixtures/machines.ts";
import { PASSWORD, Proxmox, TOKEN } from "../fixtures/proxmox.ts";
import { answer, ProxmoxFront } from "../fixtures/proxmox-front.ts";

const TEST_MS = 60_000;
const KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpdeEdBjlVOp2ViFmKa/j2WaGGMGlVlsjJmqw9BWHkT ops@laptop";
const IMAGE = "local:import/debian-13-genericcloud-amd64-20260914-2601.qcow2";
let folder = "";
let pve: Proxmox;
let front: ProxmoxFront;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-answers-"));
  await mkdir(join(folder, ".ssh"));
  await writeFile(join(folder, ".ssh", "authorized_keys"), `${KEY}\n`);
  await writeFile(join(folder, "token"), TOKEN, { mode: 0o600 });
  await writeFile(join(folder, "password"), PASSWORD, { mode: 0o600 });
});
afterAll(() => rm(folder, { recursive: true, force: true }));
beforeEach(async () => {
  pve = await Proxmox.open();
  pve.images.push(IMAGE);
  front = await ProxmoxFront.open(pve);
});
afterEach(async () => {
  front.close();
  await pve.close();
});

function start(...more: string[]) {
  const who = ["--name", "llmgw-node05", "--ip", "239.77.0.145/24", "--pve-host", front.url, "--pve-ca", pve.ca_file];
  const login = more.includes("--pve-user") ? [] : ["--pve-token-file", "token"];
  return Bun.spawn([binary, "provision", ...who, ...login, ...more], {
    cwd: folder,
    env: { PATH: process.env["PATH"] ?? "", HOME: folder },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
}

async function run(...more: string[]) {
  const child = start(...more);
  const [out, err, code] = await Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  expect(out + err).not.toContain(TOKEN.split("=")[1] as string);
  expect(out + err).not.toContain(PASSWORD);
  expect(err).not.toMatch(/E_INTERNAL|\n\s+at /);
  if (code !== 0) expect(err).toMatch(/\n {2}\S.*\n {2}try: \S.*\n$/);
  return { out, err, code };
}

const changes = () => front.calls.filter((call) => !call.startsWith("GET"));
/** Answers the calls that match. */
const on = (calls: RegExp, act: (socket: TLSSocket) => unknown) => {
  front.front = (call, socket) => {
    if (!calls.test(call)) return false;
    act(socket);
    return true;
  };
};
const HTML = "<html><title>502 Bad Gateway</title></html>";
const DATA = "content-type: application/json;charset=UTF-8";

test.each<[string, (socket: TLSSocket) => unknown, number, RegExp]>([
  ["a page with 200", (s) => answer(s, "200 OK", HTML, "text/html"), 3, /what answers is no Proxmox/],
  ["a page with 502", (s) => answer(s, "502 Bad Gateway", HTML, "text/html"), 3, /what answers is no Proxmox[^]*502 Bad Gateway/],
  ["a redirect", (s) => answer(s, "301 Moved Permanently", HTML, "text/html"), 3, /what answers is no Proxmox[^]*301 Moved/],
  ["half a document", (s) => answer(s, "200 OK", '{"data":['), 3, /what answers is no Proxmox/],
  ["half an answer", (s) => s.end(`HTTP/1.1 200 OK\r\n${DATA}\r\ncontent-length: 100\r\n\r\n{"data":[`), 3, /no whole answer comes from/],
  [
    "half a chunk",
    (s) => s.end(`HTTP/1.1 200 OK\r\n${DATA}\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{"da`),
    3,
    /no whole answer comes from/,
  ],
  ["another protocol", (s) => s.end("SSH-2.0-OpenSSH_9.2\r\n"), 3, /no whole answer comes from/],
  ["nothing", (s) => s.destroy(), 3, /no whole answer comes from/],
  ["too much", (s) => answer(s, "200 OK", `{"data":"${"a".repeat(17 * 2 ** 20)}"}`), 3, /the answer is too long/],
  ["no data", (s) => answer(s, "200 OK", '{"data":null}'), 1, /something else than a list/],
  ["other data", (s) => answer(s, "200 OK", '{"data":[{"node":5},7]}'), 1, /Proxmox lists no node/],
  ["a refusal", (s) => answer(s, "401 permission denied - invalid PVE ticket", ""), 3, /invalid PVE ticket/],
])(
  "%s at the first question",
  async (_what, act, code, words) => {
    on(/^GET \/nodes$/, act);
    const ran = await run();
    expect(ran.err).toMatch(words);
    expect(ran.code).toBe(code);
    expect(ran.err).not.toContain("nobody knows");
    expect(changes()).toEqual([]);
  },
  TEST_MS,
);

test(
  "the words of another machine do not steer the terminal, and do not fill it",
  async () => {
    const words = JSON.stringify({ data: null, message: "\u001b]0;mine\u0007\n".repeat(5_000) });
    on(/^GET \/nodes$/, (socket) => answer(socket, "500 \u009b31mred", words));
    const { err } = await run();
    expect(err.replaceAll("\n", "")).not.toMatch(/\p{Cc}/u);
    expect(err.length).toBeLessThan(2_000);
  },
  TEST_MS,
);

test(
  "ten megabytes are read",
  async () => {
    const data = [{ node: "pve1", status: "online", note: "a".repeat(10 * 2 ** 20) }];
    on(/^GET \/nodes$/, (socket) => answer(socket, "200 OK", JSON.stringify({ data })));
    expect((await run("--dry-run")).code).toBe(0);
  },
  TEST_MS,
);

test(
  "a ticket that ends in the middle is made anew, once",
  async () => {
    let ended = 0;
    const refuse = (socket: TLSSocket) => answer(socket, "401 permission denied - invalid PVE ticket", '{"data":null}');
    front.front = (call, socket) => call.endsWith("/storage") && ended++ === 0 && refuse(socket);
    const login = ["--dry-run", "--pve-user", "root@pam", "--pve-password-file", "password"];
    expect((await run(...login)).code).toBe(0);
    front.front = (call, socket) => call.endsWith("/storage") && refuse(socket);
    expect((await run(...login)).code).toBe(3);
    expect(front.calls.filter((call) => call.endsWith("/access/ticket"))).toHaveLength(4);
  },
  TEST_MS,
);

/** Sends one letter of an answer after another, without end. */
function drip(socket: TLSSocket): void {
  socket.write(`HTTP/1.1 200 OK\r\n${DATA}\r\ncontent-length: 100000\r\n\r\n`);
  const timer = setInterval(() => socket.write(" "), 200);
  socket.once("close", () => clearInterval(timer));
}

test.each<[string, (socket: TLSSocket) => unknown]>([
  ["is silent", () => {}],
  ["drips", drip],
])(
  "Proxmox %s: --timeout and signals are obeyed in the middle of a question",
  async (_what, act) => {
    on(/^GET \/cluster\/resources$/, act);
    const late = await run("--timeout", "2s");
    expect(late.err).toContain("it takes too long (E_TIMEOUT)\n  2 s are over");
    expect(late.code).toBe(4);
    for (const signal of ["SIGINT", "SIGTERM"] as const) {
      front.calls.length = 0;
      const child = start();
      await until("it asks", () => front.calls.some((call) => call.endsWith("/resources")), TEST_MS);
      child.kill(signal);
      const [err, code] = await Promise.all([child.stderr.text(), child.exited]);
      expect(err).toContain("interrupted (E_INTERRUPTED)");
      expect(code).toBe(130);
      expect(changes()).toEqual([]);
    }
  },
  TEST_MS,
);

test(
  "a change that goes unanswered is waited for; who asks twice to stop is obeyed at once",
  async () => {
    on(/^POST \/nodes\/pve1\/qemu$/, () => {});
    const child = start();
    await until("it creates", () => changes().length > 0, TEST_MS);
    child.kill("SIGINT");
    const reader = child.stderr.getReader();
    let said = "";
    while (!said.includes("ask again to end at once")) {
      const { value, done } = await reader.read();
      if (done) break;
      said += Buffer.from(value).toString();
    }
    expect(said).toContain("asked to stop");
    child.kill("SIGINT");
    expect(await child.exited).toBe(130);
  },
  TEST_MS,
);

const LOST: readonly [string, (socket: TLSSocket) => unknown][] = [
  ["is cut", (s) => s.end('HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"da')],
  ["is reset", (s) => s.destroy()],
  ["is a page of a proxy", (s) => answer(s, "504 Gateway Time-out", HTML, "text/html")],
  ["is a page with 200", (s) => answer(s, "200 OK", HTML, "text/html")],
  ["comes from another node", (s) => answer(s, "595 Connection timed out", "")],
  ["names no task", (s) => answer(s, "200 OK", '{"data":null}')],
];

const CREATE = /^POST \/nodes\/pve1\/qemu$/;
const TOUCH = /145\/(resize|status\/start)$/;

test.each(LOST)(
  "the answer to create %s, and another got the VMID: theirs is not touched, and not called ours",
  async (_what, act) => {
    on(CREATE, async (socket) => {
      const rival = ["--name", "rival", "--ip", "239.77.0.146/24", "--vmid", "145", "--pve-host", pve.url];
      const words = [...rival, "--pve-token-file", "token", "--pve-ca", pve.ca_file];
      const child = Bun.spawn([binary, "provision", ...words], { cwd: folder, env: { HOME: folder }, stdout: "ignore", stderr: "ignore" });
      expect(await child.exited).toBe(0);
      act(socket);
    });
    const { err, code } = await run();
    expect(err).toContain("VMID 145 is taken");
    expect(err).not.toContain("qm destroy");
    expect(code).toBe(1);
    expect(pve.machines.get(145)?.["name"]).toBe("rival");
    expect(front.calls.filter((call) => TOUCH.test(call))).toEqual([]);
  },
  TEST_MS,
);

test.each(LOST)(
  "the answer to create %s, and the machine was made: it is known again by its notes, and started",
  async (_what, act) => {
    front.after = (call, socket) => CREATE.test(call) && (act(socket), true);
    const { err, code } = await run();
    expect(err).toContain("is made and starts");
    expect(code).toBe(0);
    expect(front.calls.filter((call) => CREATE.test(call))).toHaveLength(1);
    expect(front.calls.filter((call) => TOUCH.test(call))).toHaveLength(2);
  },
  TEST_MS,
);

test.each(LOST)(
  "the answer to create %s, and nothing was made: nobody knows, and that is said",
  async (_what, act) => {
    on(CREATE, act);
    const { err, code } = await run();
    expect(err).toMatch(
      /nobody knows whether it was done[^]*VM 145 may be there: when this run made it, its notes say "run [0-9a-f-]{36}"/,
    );
    expect(err).toContain("try: look at VM 145 on pve1 before trying again");
    expect(code).toBe(3);
    expect(front.calls.filter((call) => TOUCH.test(call))).toEqual([]);
  },
  TEST_MS,
);

const STATUS = /qmcreate.*\/status$/;
test.each<[string, (socket: TLSSocket) => unknown]>([
  ["500", (s) => answer(s, "500 got timeout", '{"data":null}')],
  ["596", (s) => answer(s, "596 Broken pipe", "")],
  ["a page of a proxy", (s) => answer(s, "502 Bad Gateway", HTML, "text/html")],
  ["nothing", (s) => s.destroy()],
  ["no data", (s) => answer(s, "200 OK", '{"data":null}')],
])(
  "%s when it is asked how the task is: once is got over, for ever is said with what is left",
  async (_what, act) => {
    let asked = 0;
    front.front = (call, socket) => STATUS.test(call) && asked++ === 0 && (act(socket), true);
    expect((await run()).code).toBe(0);
    pve.machines.clear();
    on(STATUS, act);
    const { err, code } = await run("--timeout", "3s");
    expect(err).toContain("VM 145 was made by this run and is left as it is\n  try: qm destroy 145 --purge on pve1");
    expect(code).toBe(4);
  },
  TEST_MS,
);

test(
  "a right that ends while the machine is made: what is left is said",
  async () => {
    on(STATUS, (socket) => answer(socket, "401 permission denied - invalid PVE ticket", '{"data":null}'));
    const { err, code } = await run();
    expect(err).toContain("VM 145 was made by this run and is left as it is");
    expect(code).toBe(3);
  },
  TEST_MS,
);
