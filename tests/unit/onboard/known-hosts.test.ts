import { describe, expect, test } from "bun:test";
import { createHmac } from "node:crypto";
import { mkdtemp, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fingerprintOf } from "../../../src/os/ssh-key.ts";
import {
  algorithmsFor,
  forgetHost,
  hostKeyError,
  hostName,
  judgeHostKey,
  keyTypeOf,
  learnHostKey,
  parseKnownHosts,
  readKnownHosts,
} from "../../../src/onboard/known-hosts.ts";

const blob = (type: string, rest = "rest") => {
  const length = Buffer.alloc(4);
  length.writeUInt32BE(type.length);
  return Buffer.concat([length, Buffer.from(type), Buffer.from(rest)]);
};
const ED = blob("ssh-ed25519").toString("base64");
const OTHER = blob("ssh-ed25519", "other").toString("base64");
const RSA = blob("ssh-rsa").toString("base64");

function hashed(name: string): string {
  const salt = Buffer.from("0123456789abcdefghij");
  return `|1|${salt.toString("base64")}|${createHmac("sha1", salt).update(name).digest("base64")}`;
}

const CASES: readonly [string, string, string][] = [
  ["a plain name", `10.0.0.5 ssh-ed25519 ${ED}`, "known"],
  ["another host", `10.0.0.6 ssh-ed25519 ${ED}`, "unknown"],
  ["nothing", "", "unknown"],
  ["a comment", `# 10.0.0.5 ssh-ed25519 ${OTHER}`, "unknown"],
  ["one of several names", `gpu,10.0.0.5 ssh-ed25519 ${ED} a comment`, "known"],
  ["another key", `10.0.0.5 ssh-ed25519 ${OTHER}`, "changed"],
  ["only a key of another type", `10.0.0.5 ssh-rsa ${RSA}`, "changed"],
  ["another key and this one", `10.0.0.5 ssh-ed25519 ${OTHER}\n10.0.0.5 ssh-ed25519 ${ED}`, "known"],
  ["a hashed name", `${hashed("10.0.0.5")} ssh-ed25519 ${ED}`, "known"],
  ["a hashed name with another key", `${hashed("10.0.0.5")} ssh-ed25519 ${OTHER}`, "changed"],
  ["a hashed name of another host", `${hashed("10.0.0.9")} ssh-ed25519 ${OTHER}`, "unknown"],
  ["wildcards", `10.0.?.* ssh-ed25519 ${ED}`, "known"],
  ["a dot is no wildcard", `10x0.0.5 ssh-ed25519 ${OTHER}`, "unknown"],
  ["a negated pattern", `10.0.0.*,!10.0.0.5 ssh-ed25519 ${OTHER}`, "unknown"],
  ["a revoked key", `@revoked * ssh-ed25519 ${ED}`, "revoked"],
  ["a revoked key that is known too", `10.0.0.5 ssh-ed25519 ${ED}\n@revoked * ssh-ed25519 ${ED}`, "revoked"],
  ["another revoked key", `@revoked * ssh-ed25519 ${OTHER}`, "unknown"],
  ["an authority alone", `@cert-authority * ssh-ed25519 ${OTHER}`, "unknown"],
  ["a port that is not ours", `[10.0.0.5]:2222 ssh-ed25519 ${OTHER}`, "unknown"],
  ["half a line", "10.0.0.5 ssh-ed25519", "unknown"],
];

describe("the key of 10.0.0.5 where known_hosts has", () => {
  test.each(CASES)("%s", (_name, text, verdict) => {
    expect(judgeHostKey(parseKnownHosts(text, "kh"), hostName("10.0.0.5", 22), ED).verdict).toBe(verdict as "known");
  });
});

test("a port other than 22 is part of the name", () => {
  const known = parseKnownHosts(`[10.0.0.5]:2222 ssh-ed25519 ${ED}`, "kh");
  expect(judgeHostKey(known, hostName("10.0.0.5", 2222), ED).verdict).toBe("known");
  expect(judgeHostKey(parseKnownHosts(`10.0.0.5 ssh-ed25519 ${ED}`, "kh"), hostName("10.0.0.5", 2222), ED).verdict).toBe("unknown");
});

test("a refusal names file, line and the command that clears it", () => {
  const verdict = judgeHostKey(parseKnownHosts(`\n10.0.0.5 ssh-ed25519 ${OTHER}`, "/k/h"), "10.0.0.5", ED);
  if (verdict.verdict !== "changed") throw new Error(verdict.verdict);
  const error = hostKeyError("10.0.0.5", "10.0.0.5", Buffer.from(ED, "base64"), verdict);
  expect(error.why).toContain("/k/h:2 (ssh-ed25519)");
  expect(error.why).toContain(fingerprintOf(Buffer.from(ED, "base64")));
  expect(error.remedy).toContain("ssh-keygen -R '10.0.0.5' -f /k/h");
});

test("a host is asked first for the key types it is known by", () => {
  const known = parseKnownHosts(`h ssh-rsa ${RSA}\nh ssh-ed25519 ${ED}\nother ecdsa-sha2-nistp256 AAAA`, "kh");
  expect(algorithmsFor(known, "h")).toEqual(["rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519"]);
  expect(keyTypeOf(Buffer.from(RSA, "base64"))).toBe("ssh-rsa");
});

test("a learned key is known from then on, and other lines stay whole", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-known-"));
  try {
    const file = join(folder, "ssh", "known_hosts");
    await learnHostKey(file, "10.0.0.5", Buffer.from(ED, "base64"));
    expect((await stat(file)).mode & 0o077).toBe(0);
    await writeFile(file, (await readFile(file, "utf8")).trimEnd());
    await learnHostKey(file, "[10.0.0.6]:2222", Buffer.from(RSA, "base64"));
    const known = await readKnownHosts([file, join(folder, "none")]);
    expect(judgeHostKey(known, "10.0.0.5", ED).verdict).toBe("known");
    expect(judgeHostKey(known, hostName("10.0.0.6", 2222), RSA).verdict).toBe("known");
    expect(judgeHostKey(known, "10.0.0.5", OTHER).verdict).toBe("changed");
  } finally {
    await rm(folder, { recursive: true });
  }
});

test("a host that was made anew is forgotten, with its name as it is and hashed; lines that speak of others stay", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-kh-"));
  const file = join(folder, "known_hosts");
  const salt = Buffer.alloc(20, 1);
  const hash = createHmac("sha1", salt).update("10.0.0.5").digest("base64");
  const lines = [
    "# mine",
    "10.0.0.5 ssh-ed25519 AAAA",
    "10.0.0.5,other ssh-ed25519 AAAA",
    `|1|${salt.toString("base64")}|${hash} ssh-rsa AAAA`,
    "@revoked 10.0.0.5 ssh-ed25519 AAAA",
    "10.0.0.50 ssh-ed25519 AAAA",
    "",
  ];
  await writeFile(file, lines.join("\n"), { mode: 0o600 });
  expect(await forgetHost(file, "10.0.0.5")).toBe(2);
  expect(await readFile(file, "utf8")).toBe([lines[0], lines[2], lines[4], lines[5], ""].join("\n"));
  expect((await stat(file)).mode & 0o777).toBe(0o600);
  expect(await forgetHost(file, "10.0.0.5")).toBe(0);
  expect(await forgetHost(join(folder, "none"), "10.0.0.5")).toBe(0);
  await rm(folder, { recursive: true });
});
