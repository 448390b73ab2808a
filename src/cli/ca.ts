import { isIP } from "node:net";
import { readFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import * as v from "valibot";
import { CERTIFICATE_DAYS } from "../pki/authority.ts";
import { circumstancesNow, initAuthority, issueInto, listIssued, openAuthority, type IssuedCertificate } from "../pki/ca-folder.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { NodeId, type Role } from "../protocol/ids.ts";
import { command, group } from "./frame.ts";
import { age, outputFlag, printList, span } from "./output.ts";
import { usageError } from "./parse.ts";
import type { Io } from "./spec.ts";

const dir = { type: "string", value: "DIR", default: "/etc/llmgw/ca", about: "the authority's folder" } as const;
const out = { type: "string", value: "DIR", about: "where the files go; DIR/issued/ROLE-NAME of the authority when absent" } as const;
const ip = { type: "list", value: "ADDRESS", about: "an IP address it is reached at; repeatable" } as const;
const dry = { type: "boolean", about: "say what would be done, and do nothing" } as const;
const days = {
  type: "number",
  value: "N",
  default: CERTIFICATE_DAYS,
  min: 1,
  max: 3_650,
  about: "days it is valid",
  hidden: true,
} as const;

/** What a next command needs to find an authority that is not where it usually is. */
const dirWords = (folder: string) => (folder === dir.default ? "" : ` --dir ${folder}`);

const init = command({
  name: "init",
  about: "Makes a new authority",
  examples: ["llmgw ca init", "llmgw ca init --dir ./ca"],
  flags: { dir, name: { type: "string", value: "NAME", default: "llmgw", about: "name of the authority" }, "dry-run": dry },
  args: [],
  run: async ({ flags, io }) => {
    const folder = resolve(io.cwd, flags.dir);
    if (flags["dry-run"]) {
      io.err(`would make an authority in ${folder}`);
      return;
    }
    const paths = await initAuthority(folder, flags.name, circumstancesNow());
    io.out(paths.cert);
    io.err(`made an authority: ${paths.cert} may be shown to everyone, ${paths.key} is its secret; keep a copy of the folder`);
    io.err(`next: llmgw ca issue-server --name NAME --ip ADDRESS --out tls${dirWords(flags.dir)}`);
  },
});

interface Wanted {
  readonly role: Role;
  readonly name: string;
  readonly file_name: string;
  readonly ips: readonly string[];
  readonly dns: readonly string[];
  readonly csr: string | null;
  /** What to do next, given the folder of the files. */
  readonly next: (target: string) => string;
}

interface IssueFlags {
  readonly dir: string;
  readonly out: string | undefined;
  readonly days: number;
  readonly "dry-run": boolean;
}

async function issue(flags: IssueFlags, io: Io, wanted: Wanted): Promise<void> {
  const folder = resolve(io.cwd, flags.dir);
  const { role, name, file_name, ips, dns, csr, next } = wanted;
  for (const address of ips)
    if (isIP(address) === 0)
      throw usageError("llmgw ca", `"${address}" is not an IP address`, "a certificate names addresses, not host names, with --ip");
  const target = flags.out === undefined ? join(folder, "issued", `${role}-${name}`) : resolve(io.cwd, flags.out);
  if (flags["dry-run"]) {
    await openAuthority(folder);
    io.err(`would issue a ${role} certificate for ${name} (${[...ips, ...dns].join(", ") || "no addresses"}) into ${target}`);
    return;
  }
  const issued = await issueInto(
    { folder, out: target, file_name, csr, subject: { name, role, ips, dns, days: flags.days } },
    circumstancesNow(),
  );
  io.out(issued.cert);
  const rest = issued.key === null ? `${issued.ca}` : `${issued.key} (secret) and ${issued.ca}`;
  io.err(`issued ${role} ${name}, valid for ${flags.days} days: ${issued.cert}, with ${rest}`);
  io.err(`next: ${next(target)}`);
}

const Name = v.pipe(v.string(), v.regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/));

function checkName(name: string): string {
  if (v.safeParse(Name, name).success) return name;
  throw usageError("llmgw ca", `"${name}" cannot be a certificate's name`, "it takes 1-63 of letters, digits, . _ -");
}

const issueServer = command({
  name: "issue-server",
  about: "Issues the certificate of a server",
  examples: ["llmgw ca issue-server --name control --ip 10.0.0.140 --out /etc/llmgw/tls"],
  flags: { dir, out, days, "dry-run": dry, ip, name: { type: "string", value: "NAME", required: true, about: "name of the server" } },
  args: [],
  run: async ({ flags, io }) => {
    const name = checkName(flags.name);
    if (flags.ip.length === 0)
      throw usageError(
        "llmgw ca issue-server",
        "--ip is missing",
        "agents reach a server by its address",
        "llmgw ca issue-server --name NAME --ip ADDRESS",
      );
    await issue(flags, io, {
      role: "server",
      name,
      file_name: "server",
      ips: flags.ip,
      dns: [name],
      csr: null,
      next: (target) => `llmgw ca issue-gateway --out ${target}${dirWords(flags.dir)}`,
    });
  },
});

const issueGateway = command({
  name: "issue-gateway",
  about: "Issues the certificate with which a gateway reaches the nodes",
  examples: ["llmgw ca issue-gateway --out /etc/llmgw/tls"],
  flags: { dir, out, days, "dry-run": dry, name: { type: "string", value: "NAME", default: "gateway", about: "name of the gateway" } },
  args: [],
  run: ({ flags, io }) =>
    issue(flags, io, {
      role: "gateway",
      name: checkName(flags.name),
      file_name: "gateway",
      ips: [],
      dns: [],
      csr: null,
      next: (target) => `put ${target} where server.yaml says (/etc/llmgw/tls), then llmgw ca issue-admin YOU${dirWords(flags.dir)}`,
    }),
});

const issueAdmin = command({
  name: "issue-admin",
  about: "Issues the certificate of a person who uses llmgw ctl",
  examples: ["llmgw ca issue-admin alice", "llmgw ca issue-admin bob --viewer"],
  flags: { dir, out, days, "dry-run": dry, viewer: { type: "boolean", about: "may only look" } },
  args: [{ name: "NAME", about: "who it is" }],
  run: async ({ flags, args, io }) => {
    const role = flags.viewer ? "viewer" : "admin";
    await issue(flags, io, {
      role,
      name: checkName(args.NAME),
      file_name: role,
      ips: [],
      dns: [],
      csr: null,
      next: (target) => {
        const [ca, cert, key] = ["ca.crt", `${role}.crt`, `${role}.key`].map((file) => join(target, file));
        return `llmgw ctl context add NAME --server https://ADDRESS:7443 --ca ${ca} --cert ${cert} --key ${key}`;
      },
    });
  },
});

const issueNode = command({
  name: "issue-node",
  about: "Issues the certificate of a node, from its request or with a new key",
  examples: [
    "llmgw ca issue-node llmgw-node05 --ip 10.0.0.145 --csr node05.csr",
    "llmgw ca issue-node llmgw-node05 --ip 10.0.0.145 --out ./tls",
  ],
  flags: {
    dir,
    out,
    days,
    "dry-run": dry,
    ip,
    csr: { type: "string", value: "FILE", about: "the request llmgw keygen printed on the node; - is standard input" },
  },
  args: [{ name: "NODE", about: "node id" }],
  run: async ({ flags, args, io }) => {
    const name = args.NODE;
    if (!v.safeParse(NodeId, name).success)
      throw usageError("llmgw ca issue-node", `"${name}" cannot be a node id`, "it takes 1-63 of a-z 0-9 -, not starting or ending with -");
    if (flags.ip.length === 0)
      throw usageError(
        "llmgw ca issue-node",
        "--ip is missing",
        "others reach a node by its address",
        `llmgw ca issue-node ${name} --ip ADDRESS`,
      );
    const csr = flags.csr === undefined ? null : await readInput(flags.csr, io);
    await issue(flags, io, {
      role: "node",
      name,
      file_name: "node",
      ips: flags.ip,
      dns: [name],
      csr,
      next: (target) => `copy the files of ${target} to /etc/llmgw/tls on the node, then llmgw agent`,
    });
  },
});

async function readInput(path: string, io: Io): Promise<string> {
  try {
    return path === "-" ? await Bun.stdin.text() : await readFile(resolve(io.cwd, path), "utf8");
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot read ${path}`, messageOf(error), "check the path");
  }
}

const list = command({
  name: "list",
  about: "Lists what the authority issued",
  examples: ["llmgw ca list", "llmgw ca list -o json"],
  flags: { dir, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const items = await listIssued(resolve(io.cwd, flags.dir));
    const now_ms = Date.now();
    printList(io, flags.output, items, {
      columns: [
        { title: "ROLE", cell: (item: IssuedCertificate) => item.role },
        { title: "NAME", cell: (item) => item.name },
        { title: "ISSUED", cell: (item) => `${age(item.issued_ms, now_ms)} ago` },
        { title: "LEFT", cell: (item) => (item.expires_ms <= now_ms ? "expired" : span(item.expires_ms - now_ms)) },
        { title: "ADDRESSES", cell: (item) => item.addresses.join(" ") },
        { title: "SERIAL", cell: (item) => item.serial, wide: true },
      ],
      name: (item) => `${item.role}/${item.name}`,
      document: { items },
      empty: "nothing was issued yet",
    });
  },
});

export const caCommands = group({
  name: "ca",
  about: "Makes certificates: the authority, servers, gateways, people, nodes",
  examples: ["llmgw ca init", "llmgw ca issue-node llmgw-node05 --ip 10.0.0.145", "llmgw ca list"],
  commands: () => [init, issueServer, issueGateway, issueAdmin, issueNode, list],
});
