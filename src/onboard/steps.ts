import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { CERTIFICATE_DAYS } from "../pki/authority.ts";
import { circumstancesNow, issueInto } from "../pki/ca-folder.ts";
import { readCertificate } from "../pki/certificate.ts";
import type { NodeView } from "../protocol/admin-api.ts";
import { OperatorError } from "../protocol/errors.ts";
import { ONBOARD_JOIN_MS, ONBOARD_JOIN_POLL_MS, ONBOARD_RESTARTS_COUNT, SSH_SLOW_COMMAND_MS } from "../protocol/limits.ts";
import { agentConfigOf } from "./agent-config.ts";
import { copyFolder } from "./copy-folder.ts";
import { certificateNeed } from "./certificate-need.ts";
import { AGENT_UNIT, ENGINE_USER, NODE_PATHS } from "./node-paths.ts";
import { lastWords } from "./node-shell.ts";
import type { Step, Work } from "./step.ts";

const digestOf = (text: string) => createHash("sha256").update(text).digest("hex");
const short = (digest: string) => digest.slice(0, 12);

/** The input is compared before anything is replaced; a running program keeps its old file. */
const INSTALL = `
umask 022
new="$(dirname "$1")/.llmgw-$$.new"
trap 'rm -f "$new"' EXIT
trap 'exit 1' HUP PIPE TERM
mkdir -p "$(dirname "$1")"
cat > "$new"
[ "$(sha256sum < "$new" | cut -c1-64)" = "$2" ] || { echo "what arrived is not what was sent" >&2; exit 1; }
chmod 755 "$new"
"$new" version
mv -f "$new" "$1"
`;

const binary: Step = {
  name: "binary",
  need: ({ binary: { digest, path } }, facts) => {
    if (facts.binary === digest) return null;
    return `${facts.binary === null ? "none is there" : `it has sha256 ${short(facts.binary)}`}; ${path} has ${short(digest)}`;
  },
  apply: async ({ job, shell }) => {
    const { path, digest, size, arch } = job.binary;
    const input = createReadStream(path, { highWaterMark: 256 * 1024 }) as AsyncIterable<Uint8Array>;
    const ran = await shell.run(["sh", "-euc", INSTALL, "sh", NODE_PATHS.binary, digest], { input });
    if (ran.code !== 0) throw notInstalled(ran.code, lastWords(ran), path, arch);
    return `${ran.out.trim()}: ${path}, ${Math.round(size / 1024 / 1024)} MiB, sha256 ${digest}`;
  },
};

function notInstalled(code: number, words: string, path: string, arch: string): OperatorError {
  if (code === 132 || /illegal instruction/i.test(words)) {
    const why = "it dies of an illegal instruction: the CPU the machine shows lacks what it needs (SSE4.2)";
    return new OperatorError("E_NODE", "llmgw does not run on the node", why, "set the VM's CPU type to host, then stop and start the VM");
  }
  if (/exec format error/i.test(words))
    return new OperatorError(
      "E_NODE",
      "llmgw does not run on the node",
      `${path} is no program of its kind (${arch})`,
      "name another --binary",
    );
  if (/no space left/i.test(words))
    return new OperatorError("E_NO_ROOM", `${path} does not fit on the node`, words, `free some room under ${NODE_PATHS.binary}`);
  return new OperatorError("E_NODE", `${path} could not be installed on the node`, words, "mend that, then onboard again");
}

const trust: Step = {
  name: "trust",
  // It takes seconds, and nothing of llmgw asks the system whom it trusts.
  aside: true,
  need: ({ ca }, { trust: store }) => {
    if (store === null || store.digest === digestOf(ca)) return null;
    return store.digest === null
      ? `the system does not know the authority (${store.tool})`
      : "the system knows another authority by that name";
  },
  apply: async ({ job, facts: { trust: store }, shell }) => {
    if (store === null) return "this system has no list of authorities llmgw knows; nothing of llmgw needs it";
    await shell.write(store.file, job.ca, 0o644);
    await shell.script(store.tool, `${store.tool} >/dev/null`, [], { deadline_ms: SSH_SLOW_COMMAND_MS });
    return `the authority is in ${store.file}`;
  },
};

const USER = `
nologin=$(command -v nologin || echo /usr/sbin/nologin)
id -u "$1" >/dev/null 2>&1 || useradd --system --user-group --no-create-home --home-dir /nonexistent --shell "$nologin" "$1"
for group in video render; do if getent group $group >/dev/null; then usermod -aG $group "$1"; fi; done
`;

const engineUser: Step = {
  name: "user",
  need: (_job, facts) => (facts.engine_user ? null : `there is no user ${ENGINE_USER}, as whom engines run`),
  apply: async ({ shell }) => {
    await shell.script(`making the user ${ENGINE_USER}`, USER, [ENGINE_USER]);
    return `engines run as ${ENGINE_USER}`;
  },
};

const certificate: Step = {
  name: "certificate",
  need: async ({ node, address, ca, renew }, facts) => {
    const why = await certificateNeed(facts, { node, address, ca, renew, now_ms: Date.now() });
    return why ?? (facts.ca === digestOf(ca) ? null : "it does not have the authority's certificate");
  },
  apply: async ({ job: { node, address, ca_folder, ca }, shell }) => {
    const ran = await shell.run([NODE_PATHS.binary, "keygen", "--node", node]);
    if (ran.code !== 0) throw new OperatorError("E_NODE", "the node cannot make its key", lastWords(ran), `see ${NODE_PATHS.key} there`);
    const subject = { name: node, role: "node", ips: [address], dns: [node], days: CERTIFICATE_DAYS } as const;
    const out = join(ca_folder, "issued", `node-${node}`);
    const issued = await issueInto({ folder: ca_folder, subject, out, file_name: "node", csr: ran.out }, circumstancesNow());
    const pem = await readFile(issued.cert, "utf8");
    const made = readCertificate(pem);
    if ("unreadable" in made || made.name !== node || made.role !== "node")
      throw new OperatorError(
        "E_INTERNAL",
        "the certificate is not the node's",
        "unreadable" in made ? made.unreadable : made.name,
        "report it",
      );
    await shell.write(NODE_PATHS.ca, ca, 0o644);
    await shell.write(NODE_PATHS.cert, pem, 0o644);
    return `CN=${node}, role node, ${address}, until ${new Date(made.expires_ms).toISOString().slice(0, 10)}; its key never left the node`;
  },
};

const configuration: Step = {
  name: "config",
  need: ({ config }, facts) => {
    if (agentConfigOf(facts.config, config) === null) return null;
    return facts.config === null ? `there is no ${NODE_PATHS.config}` : `${NODE_PATHS.config} says something else`;
  },
  apply: async ({ job, facts, shell }) => {
    await shell.write(NODE_PATHS.config, agentConfigOf(facts.config, job.config) ?? facts.config ?? "", 0o600);
    return NODE_PATHS.config;
  },
};

const unit: Step = {
  name: "unit",
  need: (job, facts) => {
    if (facts.unit === digestOf(job.unit)) return null;
    return facts.unit === null ? `there is no ${NODE_PATHS.unit}` : `${NODE_PATHS.unit} is another; drop-ins of your own stay`;
  },
  apply: async ({ job, shell }) => {
    await shell.write(NODE_PATHS.unit, job.unit, 0o644);
    return NODE_PATHS.unit;
  },
};

const copies: Step = {
  name: "copy",
  need: ({ copies: folders }) => (folders.length === 0 ? undefined : `${folders.map(({ folder }) => folder).join(", ")} must be there`),
  apply: async ({ job, shell }) => {
    const said: string[] = [];
    for (const { folder } of job.copies) said.push(await copyFolder(folder, shell));
    return said.join("; ");
  },
};

/** Runs a program as engines are run: as their user, who may not go everywhere, and without the /tmp of others. */
const AS_ENGINE = [
  "systemd-run",
  "--quiet",
  "--pipe",
  "--wait",
  "--collect",
  `--property=User=${ENGINE_USER}`,
  "--property=PrivateTmp=yes",
];
/** This shell says why a program cannot be started, and by its code what ended it. */
const SAYING_WHY = ["--", "sh", "-c", '"$@"; exit $?', "sh"];

const engines: Step = {
  name: "engines",
  need: ({ engines: named }) => (named.length === 0 ? undefined : `${named.map(({ argv }) => argv[0]).join(", ")} must answer`),
  apply: async ({ job, shell }) => {
    const said: string[] = [];
    for (const { kind, argv } of job.engines) {
      const ran = await shell.run([...AS_ENGINE, ...SAYING_WHY, ...argv], { what: argv[0] });
      const first = `${ran.out}\n${ran.err}`.trim().split("\n")[0] ?? "";
      if (ran.code !== 0)
        throw new OperatorError(
          "E_ENGINE",
          `${kind} does not run on the node`,
          `${argv.join(" ")}: ${ran.code === 132 ? "illegal instruction: the build needs a newer CPU" : lastWords(ran)}`,
          `mend it on the node, or name another path: ${ENGINE_USER} must be able to run it, and /tmp is not seen by the agent`,
        );
      said.push(`${argv[0]}: ${first}`);
    }
    return said.join("; ");
  },
};

/** Steps after which the agent has to be started anew. */
const RESTART_AFTER = ["binary", "certificate", "config", "unit"];

/** The count of restarts begins at nothing again: it tells afterwards whether the agent stays up. */
const START = `
systemctl daemon-reload
systemctl enable -q "$1"
systemctl reset-failed "$1" 2>/dev/null || true
systemctl restart "$1"
`;

const start: Step = {
  name: "agent",
  need: (_job, { active, enabled, unread, restless }, due) => {
    const changed = RESTART_AFTER.filter((name) => due.has(name));
    if (active !== "active") return `it does not run (${active || "never started"})`;
    if (changed.length > 0) return `new ${changed.join(", ")}; what it serves goes on`;
    if (unread) return "its unit was changed, and systemd has not read it; what it serves goes on";
    if (restless) return "systemd has to start it again and again";
    return enabled === "enabled" ? null : "it would not start at boot";
  },
  apply: async ({ shell }) => {
    await shell.script("starting the agent", START, [AGENT_UNIT]);
    return `${AGENT_UNIT} was started; engines that ran go on`;
  },
};

const joined: Step = {
  name: "joined",
  need: (job) => `${job.servers.join(", ")} must list it`,
  apply: async (work) => {
    const node = await waitJoined(work);
    const { engines: offers } = node.inventory;
    const missed = offers.find(({ kind, offered }) => !offered && work.job.engines.some((named) => named.kind === kind));
    if (missed)
      throw new OperatorError(
        "E_ENGINE",
        `${work.job.node} has joined, and does not offer ${missed.kind}`,
        missed.reason,
        `mend it on the node, then: systemctl restart ${AGENT_UNIT}`,
      );
    const offered = offers.filter((offer) => offer.offered).map(({ kind, version }) => `${kind} ${version}`.trim());
    return `${node.state}, agent ${node.agent_version}, engines: ${offered.join(", ") || "none yet"}`;
  },
};

/** Waits until a server lists the node as ready, with a session begun after what we changed. */
async function waitJoined(work: Work): Promise<NodeView> {
  const { job, servers, since_ms, restarted } = work;
  const end_ms = performance.now() + ONBOARD_JOIN_MS;
  let last: NodeView | null = null;
  while (performance.now() < end_ms) {
    const came = !restarted || (await servers.events(job.node, since_ms)).some(({ kind }) => kind === "node-joined");
    last = came ? await servers.node(job.node) : last;
    // Its last word must be newer than our coming: a node that was cut off is listed as ready for a while.
    if (came && last?.state === "ready" && last.last_seen_ms >= since_ms) return last;
    if (await givesUp(work)) break;
    await sleep(ONBOARD_JOIN_POLL_MS);
  }
  throw await notJoined(work, last);
}

/** Whether the agent we started ends again and again. */
async function givesUp({ shell, restarted }: Work): Promise<boolean> {
  if (!restarted) return false;
  const { out } = await shell.run(["systemctl", "show", "-p", "ActiveState,NRestarts", AGENT_UNIT]);
  return out.includes("ActiveState=failed") || Number(/NRestarts=(\d+)/.exec(out)?.[1] ?? 0) >= ONBOARD_RESTARTS_COUNT;
}

/** What systemd says at each restart of shims that it was told to leave alone. */
const LEFT_RUNNING = /remains running after unit stopped|Found left-over process|^This usually indicates unclean termination/;
const JOURNAL_LINES = 100;
const SHOWN_LINES = 12;

/** Why it did not join, in the words of both sides. */
async function notJoined({ job, shell, servers, since_ms, say }: Work, last: NodeView | null): Promise<OperatorError> {
  const journal = await shell.run(["journalctl", "-u", AGENT_UNIT, "-n", `${JOURNAL_LINES}`, "-o", "cat", "--no-pager"]).catch(() => null);
  const lines = (journal?.out ?? "").trim().split("\n");
  const agent = lines.filter((line) => !LEFT_RUNNING.test(line)).slice(-SHOWN_LINES);
  const events = await servers.events(job.node, since_ms).catch(() => []);
  for (const line of agent) say(`agent:  ${line}`);
  for (const { level, text } of events) say(`server: ${level} ${text}`);
  const server = events.findLast(({ level }) => level !== "info")?.text ?? last?.state_reason;
  const word = agent.findLast((line) => / (warn|error) |\(E_\w+\)$/.test(line)) ?? agent.at(-1);
  return new OperatorError(
    "E_TIMEOUT",
    `${job.node} was started, and no server lists it as ready`,
    `the agent says: ${word || "nothing"}; the server says: ${server || "nothing of it"}`,
    `on the node: journalctl -u ${AGENT_UNIT} -f`,
  );
}

/** Everything a machine needs to be a node, in order. */
export const STEPS: readonly (readonly Step[])[] = [
  [binary, trust, engineUser, copies],
  [certificate],
  [configuration, unit, engines],
  [start],
  [joined],
];
