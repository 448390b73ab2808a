import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { randomBytes } from "node:crypto";
import { existsSync, readdirSync } from "node:fs";
import { appendFile, mkdir, mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { serialOf, type Subject } from "../../../src/pki/authority.ts";
import { initAuthority, issueInto, listIssued, requestWithKeyFile } from "../../../src/pki/ca-folder.ts";
import { loadIdentity } from "../../../src/pki/identity.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";
import { ROLES, type Role } from "../../../src/protocol/ids.ts";

const circumstances = () => ({ now_ms: Date.now(), random: (bytes: number) => randomBytes(bytes) });
const subject = (role: Role, name: string): Subject => ({
  name,
  role,
  ips: role === "node" || role === "server" ? ["127.0.0.2"] : [],
  dns: [],
  days: 365,
});
let folder: string;
let ca: string;

beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-ca-"));
  ca = join(folder, "ca");
  await initAuthority(ca, "test", circumstances());
});
afterEach(() => rm(folder, { recursive: true, force: true }));

function openssl(...args: string[]): { code: number; text: string } {
  const { exitCode, stdout, stderr } = Bun.spawnSync(["openssl", ...args], { stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  return { code: exitCode, text: stdout.toString() + stderr.toString() };
}

const issue = (role: Role, name: string, csr: string | null = null) =>
  issueInto({ folder: ca, subject: subject(role, name), out: join(folder, name), file_name: role, csr }, circumstances());
const mode = async (path: string) => ((await stat(path)).mode & 0o777).toString(8);
const codeOf = (promise: Promise<unknown>) =>
  promise.then(
    () => "none",
    (error: OperatorError) => error.code,
  );

describe("certificates as openssl sees them", () => {
  test.each(ROLES.map((role) => [role]))("%s: verified for what its role may do, and not for more", async (role) => {
    const { cert } = await issue(role, `${role}-1`);
    const both = role === "node" || role === "server";
    const verify = (purpose: string) => openssl("verify", "-x509_strict", "-purpose", purpose, "-CAfile", join(ca, "ca.crt"), cert).code;
    expect(verify("sslclient")).toBe(0);
    expect(verify("sslserver") === 0).toBe(both);
    const { text } = openssl("x509", "-in", cert, "-noout", "-text");
    expect(text).toMatch(new RegExp(`Subject: O ?= ?llmgw:${role}, CN ?= ?${role}-1`));
    expect(text).toContain("CA:FALSE");
    expect(text).toContain("prime256v1");
    expect(text).toContain("ecdsa-with-SHA256");
    if (both) expect(text).toContain("IP Address:127.0.0.2");
  });

  test("start a day before they were issued and end a year later; the authority after ten", async () => {
    const { cert } = await issue("node", "a");
    const date = (file: string, which: string) => Date.parse(openssl("x509", "-in", file, "-noout", which).text.split("=")[1] ?? "");
    const day = 86_400_000;
    expect(Math.round((Date.now() - date(cert, "-startdate")) / day)).toBe(1);
    expect(Math.round((date(cert, "-enddate") - Date.now()) / day)).toBe(365);
    expect(Math.round((date(join(ca, "ca.crt"), "-enddate") - Date.now()) / day)).toBe(3_653);
    expect(openssl("x509", "-in", join(ca, "ca.crt"), "-noout", "-text").text).toContain("CA:TRUE, pathlen:0");
  });

  test("serials rise with time and differ within a millisecond", () => {
    const at = (now_ms: number) => serialOf({ now_ms, random: (bytes) => randomBytes(bytes) });
    expect(at(1_000_000) < at(1_000_001)).toBe(true);
    expect(at(Date.now())).toHaveLength(32);
    expect(new Set(Array.from({ length: 100 }, () => at(5))).size).toBe(100);
  });
});

describe("the authority's folder", () => {
  test("is closed to others, and never overwritten", async () => {
    expect(await mode(ca)).toBe("700");
    expect(await mode(join(ca, "ca.key"))).toBe("600");
    const before = await readFile(join(ca, "ca.key"), "utf8");
    expect(await codeOf(initAuthority(ca, "again", circumstances()))).toBe("E_EXISTS");
    await rm(join(ca, "ca.crt"));
    expect(await codeOf(initAuthority(ca, "again", circumstances()))).toBe("E_EXISTS");
    expect(await readFile(join(ca, "ca.key"), "utf8")).toBe(before);
    expect((await readdir(ca)).sort()).toEqual(["ca.key"]);
  });

  test("two at once: one wins, whole", async () => {
    const both = join(folder, "both");
    const codes = await Promise.all([codeOf(initAuthority(both, "a", circumstances())), codeOf(initAuthority(both, "b", circumstances()))]);
    expect(codes.sort()).toEqual(["E_EXISTS", "none"]);
    await issueInto({ folder: both, subject: subject("node", "n"), out: join(folder, "n"), file_name: "node", csr: null }, circumstances());
  });

  test("is there whole or not at all, at every moment of its making", async () => {
    const fresh = join(folder, "below", "fresh");
    let making = true;
    let looks = 0;
    const look = async () => {
      while (making) {
        looks += 1;
        if (existsSync(fresh)) expect(readdirSync(fresh).sort()).toEqual(["ca.crt", "ca.key"]);
        await new Promise((resolve) => setImmediate(resolve));
      }
    };
    const looking = look();
    await initAuthority(fresh, "test", circumstances());
    making = false;
    await looking;
    expect(looks).toBeGreaterThan(5);
    expect(await mode(fresh)).toBe("700");
    expect(await readdir(join(folder, "below"))).toEqual(["fresh"]);
  });

  test("may be there before, with other files in it", async () => {
    const before = join(folder, "before");
    await mkdir(before);
    await writeFile(join(before, "README"), "ours");
    await initAuthority(before, "test", circumstances());
    expect((await readdir(before)).sort()).toEqual(["README", "ca.crt", "ca.key"]);
    expect(await mode(before)).toBe("700");
  });

  test("records what it issued, and reads on past a line that a crash cut", async () => {
    await issue("node", "a");
    await appendFile(join(ca, "issued.jsonl"), '{"serial":"00\n');
    await issue("admin", "alice");
    expect((await listIssued(ca)).map(({ role, name }) => `${role}/${name}`)).toEqual(["node/a", "admin/alice"]);
  });

  test("is not used while others can read its key", async () => {
    await Bun.$`chmod 640 ${join(ca, "ca.key")}`.quiet();
    expect(await codeOf(issue("node", "a"))).toBe("E_NOT_ALLOWED");
  });
});

describe("a key made on the node", () => {
  test("never leaves it: the request is signed for the name it asks for", async () => {
    const key = join(folder, "n", "node.key");
    const { csr, made } = await requestWithKeyFile(key, "a", "node");
    expect(made).toBe(true);
    expect(await mode(key)).toBe("600");
    await writeFile(join(folder, "csr"), csr);
    expect(openssl("req", "-in", join(folder, "csr"), "-noout", "-verify").text).toContain("verify OK");
    const issued = await issueInto(
      { folder: ca, subject: subject("node", "a"), out: join(folder, "n"), file_name: "node", csr },
      circumstances(),
    );
    expect(issued.key).toBeNull();
    expect((await loadIdentity({ ca: issued.ca, cert: issued.cert, key })).name).toBe("a");
    const again = await requestWithKeyFile(key, "a", "node");
    expect(again.made).toBe(false);
  });

  test("a request for another name, with a broken signature or that is none is refused", async () => {
    const { csr } = await requestWithKeyFile(join(folder, "k"), "a", "node");
    const lines = csr.split("\n");
    const middle = lines[2] ?? "";
    const broken = csr.replace(middle, middle.startsWith("A") ? `B${middle.slice(1)}` : `A${middle.slice(1)}`);
    expect(await codeOf(issue("node", "b", csr))).toBe("E_BAD_REQUEST");
    expect(await codeOf(issue("node", "a", broken))).toBe("E_BAD_REQUEST");
    expect(await codeOf(issue("node", "a", "hello"))).toBe("E_BAD_REQUEST");
  });
});

describe("an identity", () => {
  test("is refused when the key is another's, readable by others, or the certificate of another authority", async () => {
    const a = await issue("node", "a");
    const b = await issue("node", "b");
    expect(await codeOf(loadIdentity({ ca: a.ca, cert: a.cert, key: b.key ?? "" }))).toBe("E_CONFIG");
    await Bun.$`chmod 644 ${a.key ?? ""}`.quiet();
    expect(await codeOf(loadIdentity({ ca: a.ca, cert: a.cert, key: a.key ?? "" }))).toBe("E_NOT_ALLOWED");
    const other = join(folder, "other");
    await initAuthority(other, "other", circumstances());
    expect(await codeOf(loadIdentity({ ca: join(other, "ca.crt"), cert: b.cert, key: b.key ?? "" }))).toBe("E_CONFIG");
    expect(await codeOf(loadIdentity({ ca: join(folder, "none"), cert: b.cert, key: b.key ?? "" }))).toBe("E_FILE");
  });
});
