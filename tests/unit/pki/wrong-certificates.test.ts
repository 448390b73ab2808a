// A door against `openssl s_client`: who is wrong gets no answer and one line in the log that says who, why and from where.
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { makeLog } from "../../../src/os/log.ts";
import { CLIENT_AUTH, SERVER_AUTH } from "../../../src/pki/certificate.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import type { PeerListener } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import { issued, oddCertificate, testAuthority } from "./authority-for-tests.ts";
import type { TestAuthority } from "./authority-for-tests.ts";
import { askWithOpenssl } from "./openssl-for-tests.ts";
import type { Shown } from "./openssl-for-tests.ts";

const DAY_MS = 86_400_000;
const VERSIONS = ["-tls1_2", "-tls1_3"] as const;
let ours: TestAuthority;
/** Its name is the same as ours. */
let theirs: TestAuthority;
let trust: Trust;
let door: PeerListener;
let folder: string;
let clock_offset_ms = 0;
let handled = 0;
const lines: string[] = [];
const log = makeLog({ level: "debug", format: "text", write: (line) => lines.push(line) });

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-door-"));
  [ours, theirs] = await Promise.all([testAuthority(), testAuthority()]);
  trust = new Trust(ours.ca.cert);
  door = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    identity: await ours.identity("server", "control"),
    trust,
    roles: ["node", "admin"],
    log,
    now: () => Date.now() + clock_offset_ms,
    handle: (_request, response, { role, name }) => {
      handled += 1;
      response.end(`hello ${role} ${name}\n`);
    },
  });
});
afterAll(async () => {
  await door.close();
  await rm(folder, { recursive: true, force: true });
});
beforeEach(() => {
  lines.length = 0;
  handled = 0;
  clock_offset_ms = 0;
  trust.setRevocations([]);
});

const ask = (shown: Shown | null, version: (typeof VERSIONS)[number], more: { save?: string; resume?: string } = {}) =>
  askWithOpenssl({ port: door.port, folder, shown, version, ...more });

/** What the log says once the door has said no. */
async function refusal(): Promise<string> {
  const deadline_ms = Date.now() + 2_000;
  while (lines.length === 0 && Date.now() < deadline_ms) await Bun.sleep(5);
  expect(lines).toHaveLength(1);
  return lines[0] ?? "";
}

interface Wrong {
  readonly what: string;
  readonly shown: () => Promise<Shown | null>;
  /** Words of its log line. */
  readonly says: readonly string[];
}

const named = (role: string, name: string) => [`certificate=${name}`, `role=${role}`, "serial="];
const WRONG: readonly Wrong[] = [
  { what: "none", shown: async () => null, says: ["it showed no certificate"] },
  {
    what: "of another authority of the same name",
    shown: () => issued(theirs.ca, "node", "a"),
    says: [...named("node", "a"), "another authority"],
  },
  {
    what: "of another authority, sent along",
    shown: async () => ({ ...(await issued(theirs.ca, "node", "a")), chain: theirs.ca.cert }),
    says: [...named("node", "a"), "another authority"],
  },
  {
    what: "signed by itself with the name of a node",
    shown: () => oddCertificate(null, { subject: "O=llmgw:node, CN=a", usages: [CLIENT_AUTH] }),
    says: [...named("node", "a"), "signed by itself"],
  },
  {
    what: "expired",
    shown: () => issued(ours.ca, "node", "b", { days: 1 }, Date.now() - 3 * DAY_MS),
    says: [...named("node", "b"), "it expired"],
  },
  {
    what: "not yet valid",
    shown: () => issued(ours.ca, "node", "c", {}, Date.now() + 3 * DAY_MS),
    says: [...named("node", "c"), "not valid yet: check the clocks"],
  },
  {
    what: "issued by a node that plays the authority",
    shown: async () => {
      const node = await issued(ours.ca, "node", "rogue");
      return { ...(await issued(node, "admin", "root")), chain: node.cert };
    },
    says: named("admin", "root"),
  },
  {
    what: "issued by an authority below a strange one",
    shown: async () => {
      const between = await oddCertificate(theirs.ca, { subject: "CN=between", authority: true });
      return { ...(await issued(between, "admin", "root")), chain: between.cert + theirs.ca.cert };
    },
    says: [...named("admin", "root"), "signature is not that of the authority"],
  },
  {
    what: "issued by an authority below ours, which may have none",
    shown: async () => {
      const between = await oddCertificate(ours.ca, { subject: "CN=between", authority: true });
      return { ...(await issued(between, "admin", "root")), chain: between.cert };
    },
    says: named("admin", "root"),
  },
  {
    what: "of a role that is not for this door",
    shown: () => issued(ours.ca, "gateway", "g"),
    says: [...named("gateway", "g"), "its role is gateway", "E_NOT_ALLOWED"],
  },
  {
    what: "not meant for clients",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=d", usages: [SERVER_AUTH] }),
    says: named("node", "d"),
  },
  {
    what: "with no stated use",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=e" }),
    says: [...named("node", "e"), "not meant for clients"],
  },
  {
    what: "without a role",
    shown: () => oddCertificate(ours.ca, { subject: "O=other, CN=f", usages: [CLIENT_AUTH] }),
    says: ["no role of llmgw"],
  },
  {
    what: "with two names",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=g, CN=h", usages: [CLIENT_AUTH] }),
    says: ["no single common name"],
  },
  {
    what: "that is an authority's",
    shown: () => oddCertificate(ours.ca, { subject: "O=llmgw:node, CN=i", usages: [CLIENT_AUTH], authority: true }),
    says: named("node", "i"),
  },
];

describe("a door refuses a certificate", () => {
  test.each(WRONG.flatMap((wrong) => VERSIONS.map((version) => [wrong.what, version, wrong] as const)))(
    "%s (%s)",
    async (_what, version, wrong) => {
      const answer = await ask(await wrong.shown(), version);
      expect(answer).not.toContain("HTTP/1.1");
      const line = await refusal();
      expect(line).toContain("refused a connection");
      expect(line).toContain("address=127.0.0.1");
      for (const word of wrong.says) expect(line).toContain(word);
      expect(handled).toBe(0);
    },
  );

  test("whose key it does not have", async () => {
    const [a, b] = await Promise.all([issued(ours.ca, "node", "a"), issued(ours.ca, "node", "b")]);
    // openssl refuses to start with such a pair, so Bun's own client has to try.
    const tls = { cert: a.cert, key: b.key, rejectUnauthorized: false };
    const status = await fetch(`https://127.0.0.1:${door.port}/`, { tls }).then(
      (response) => response.status,
      () => 0,
    );
    expect(status).toBe(0);
    expect(handled).toBe(0);
  });

  test.each(VERSIONS.map((version) => [version]))("only when it is wrong (%s)", async (version) => {
    expect(await ask(await issued(ours.ca, "node", "right"), version)).toContain("hello node right");
    expect(await ask(await issued(ours.ca, "admin", "alice"), version)).toContain("hello admin alice");
    expect(lines).toEqual([]);
  });
});

describe("a resumed session is judged anew", () => {
  const changes: readonly [string, string, (name: string) => Promise<void>][] = [
    ["revoked", "it was revoked", async (name) => trust.setRevocations([{ name, until_ms: Date.now() }])],
    ["expired", "it expired", async () => void (clock_offset_ms = 31 * DAY_MS)],
    [
      "superseded",
      "a newer certificate of that name",
      async (name) => {
        expect(await ask(await issued(ours.ca, "node", name), "-tls1_3")).toContain(`hello node ${name}`);
      },
    ],
  ];
  test.each(changes.flatMap((change) => VERSIONS.map((version) => [change[0], version, change] as const)))(
    "%s since (%s)",
    async (what, version, [, why, change]) => {
      const name = `resumed-${what}${version.slice(-1)}`;
      const session = join(folder, name);
      const shown = await issued(ours.ca, "node", name, {}, Date.now() - 1_000);
      expect(await ask(shown, version, { save: session })).toContain(`hello node ${name}`);
      const resumed = await ask(shown, version, { resume: session, save: session });
      expect(resumed).toContain("Reused,");
      expect(resumed).toContain(`hello node ${name}`);
      await change(name);
      expect(lines).toEqual([]);
      expect(await ask(shown, version, { resume: session })).not.toContain("HTTP/1.1");
      const line = await refusal();
      for (const word of [...named("node", name), why, "address=127.0.0.1"]) expect(line).toContain(word);
    },
  );
});
