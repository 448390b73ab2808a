import { beforeAll, expect, test } from "bun:test";
import { randomBytes } from "node:crypto";
import { certificateNeed, type CertificateWish } from "../../../src/onboard/certificate-need.ts";
import { issueForRequest, makeAuthority, makeKey, makeRequest, type KeyedCertificate } from "../../../src/pki/authority.ts";
import type { Role } from "../../../src/protocol/ids.ts";

const NOW_MS = 1_800_000_000_000;
const DAY_MS = 86_400_000;
const random = (bytes: number) => new Uint8Array(randomBytes(bytes));
let authority: KeyedCertificate;
let csr: string;
let wish: CertificateWish;

beforeAll(async () => {
  authority = await makeAuthority("llmgw", { now_ms: NOW_MS - 400 * DAY_MS, random });
  csr = await makeRequest("node-5", "node", await makeKey());
  wish = { node: "node-5", address: "10.0.0.5", ca: authority.cert, now_ms: NOW_MS, renew: false };
});

const issue = (name = "node-5", role: Role = "node", ip = "10.0.0.5", age_days = 1, by = authority) =>
  issueForRequest(by, { name, role, ips: [ip], dns: [name], days: 365 }, csr, { now_ms: NOW_MS - age_days * DAY_MS, random });
const need = (cert: string | null, change: Partial<CertificateWish> = {}, request: string | null = csr) =>
  certificateNeed({ cert, key: true, csr: request }, { ...wish, ...change });

test("a good certificate is kept, with or without the request to compare", async () => {
  expect(await need(await issue())).toBeNull();
  expect(await need(await issue(), {}, null)).toBeNull();
});

test("a certificate is needed where there is no key or none of it", async () => {
  expect(await certificateNeed({ cert: await issue(), key: false, csr: null }, wish)).toContain("no key");
  expect(await need(null)).toContain("no certificate");
  expect(await need("rubbish")).toContain("not a certificate");
});

test("a certificate that is another's, or for another place, is replaced", async () => {
  expect(await need(await issue("node-6"))).toContain("that of node node-6");
  expect(await need(await issue("node-5", "server"))).toContain("that of server node-5");
  expect(await need(await issue("node-5", "node", "10.0.0.6"))).toContain("does not name 10.0.0.5");
  const other = await makeAuthority("llmgw", { now_ms: NOW_MS - DAY_MS, random });
  expect(await need(await issue("node-5", "node", "10.0.0.5", 1, other))).toContain("another authority");
  const strange = await makeRequest("node-5", "node", await makeKey());
  expect(await need(await issue(), {}, strange)).toContain("not that of its key");
});

test("it is renewed from two thirds of its life, at its end, and when asked", async () => {
  expect(await need(await issue("node-5", "node", "10.0.0.5", 240))).toBeNull();
  expect(await need(await issue("node-5", "node", "10.0.0.5", 250))).toContain("days are left");
  expect(await need(await issue("node-5", "node", "10.0.0.5", 366))).toContain("expired");
  expect(await need(await issue(), { renew: true })).toContain("--renew");
});
