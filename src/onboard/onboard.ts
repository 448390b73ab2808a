/**
 * onboard/ makes a machine that ssh reaches into a node: it looks, refuses early, and does only what is missing, in
 * steps that are data. It signs with the authority's folder of this machine, and knows nothing of how the machine
 * came to be.
 */
import { openAuthority } from "../pki/ca-folder.ts";
import { readCertificate } from "../pki/certificate.ts";
import type { NodeView } from "../protocol/admin-api.ts";
import { OperatorError } from "../protocol/errors.ts";
import { ONBOARD_CLOCK_WARN_MS, ONBOARD_RECONNECTS_COUNT } from "../protocol/limits.ts";
import type { AgentKeys } from "./agent-config.ts";
import { chooseBinary, type Binary } from "./binary.ts";
import { askServers, type ControlPlane } from "./control-plane.ts";
import { FACTS_SCRIPT, parseFacts, type NodeFacts } from "./facts.ts";
import { nodeShell, type NodeShell } from "./node-shell.ts";
import { architectureOf, refusalOf } from "./refusal.ts";
import { connect, ConnectionLost, type SshTarget } from "./ssh.ts";
import { planSteps, type Copy, type Due, type Job, type NamedEngine, type Work } from "./step.ts";
import { STEPS } from "./steps.ts";

export interface OnboardOptions {
  readonly node: string;
  /** The node's own address: where ssh goes, and what its certificate names. */
  readonly address: string;
  readonly servers: readonly string[];
  readonly ssh: SshTarget;
  /** How long a machine that is not up yet is waited for, in ms. */
  readonly wait_ms: number;
  /** What can be installed; `given` when the operator named it. */
  readonly binaries: readonly Binary[];
  readonly binaries_given: boolean;
  readonly config: AgentKeys;
  readonly engines: readonly NamedEngine[];
  readonly copies: readonly Copy[];
  readonly ca_folder: string;
  /** The text of the agent's unit. */
  readonly unit: string;
  readonly renew: boolean;
  /** Look and say what would be done; change nothing. */
  readonly dry_run: boolean;
  readonly report: Reporter;
}

/** Is told how it goes. */
export interface Reporter {
  /** A step ended, or was not needed (`length_ms` null). */
  step(name: string, text: string, length_ms: number | null): void;
  note(text: string): void;
}

/**
 * Makes a machine a node, or sees that it is one.
 * @returns the node as a server lists it; null after a dry run
 * @throws OperatorError saying what failed; whatever was done by then is kept and not done again
 */
export async function onboard(options: OnboardOptions): Promise<NodeView | null> {
  const { ca_folder, servers: urls, report } = options;
  const { cert: ca } = await openAuthority(ca_folder);
  const servers = await askServers(urls, ca_folder);
  const since_ms = await timed(
    report,
    "server",
    () => servers.clock(),
    () => `${urls.join(", ")} trusts this authority`,
  );
  for (let reconnects = 0; ; reconnects += 1) {
    try {
      return await onboardOver(options, { ca, servers, since_ms });
    } catch (error) {
      if (!(error instanceof ConnectionLost)) throw error;
      if (reconnects === ONBOARD_RECONNECTS_COUNT)
        throw new OperatorError(
          "E_UNREACHABLE",
          `the connection to ${options.address} breaks again and again`,
          error.message,
          "look at the network",
        );
      report.note(`${error.message}; beginning again, what is done stays done`);
    }
  }
}

interface Ground {
  readonly ca: string;
  readonly servers: ControlPlane;
  readonly since_ms: number;
}

/** The whole way over one connection. */
async function onboardOver(options: OnboardOptions, { ca, servers, since_ms }: Ground): Promise<NodeView | null> {
  const { node, ssh, wait_ms, report } = options;
  const remote = await timed(
    report,
    "ssh",
    () => connect(ssh, wait_ms, (text) => report.note(text)),
    () => `${ssh.user}@${ssh.host}${ssh.port === 22 ? "" : ` port ${ssh.port}`}`,
  );
  try {
    const shell = await nodeShell(remote, ssh.user, ssh.host, (text) => report.note(text));
    const facts = await timed(report, "facts", () => factsOf(shell, node), describe);
    const job = jobOf(options, facts, ca);
    const refusal = refusalOf(facts, { node, binary_bytes: facts.binary === job.binary.digest ? 0 : job.binary.size, now_ms: Date.now() });
    if (refusal !== null) throw refusal;
    warnOfClock(facts, report);
    if (!options.renew) await refuseRevoked(facts, node, servers);
    const plan = await planSteps(STEPS, job, facts);
    if (options.dry_run) {
      showPlan(plan, report);
      return null;
    }
    const restarted = plan.flat().some(({ step, why }) => step.name === "agent" && why !== null);
    await applyPlan(plan, { job, facts, shell, servers, since_ms, restarted, say: (text) => report.note(text) }, report);
    return await servers.node(node);
  } finally {
    remote.close();
  }
}

async function factsOf(shell: NodeShell, node: string): Promise<NodeFacts> {
  return parseFacts((await shell.run(["sh", "-s", "--", node], { input: FACTS_SCRIPT })).out);
}

function describe({ os, arch, cpu_model, glibc }: NodeFacts): string {
  return [os, arch, cpu_model, glibc === null ? "" : `glibc ${glibc}`].filter((part) => part !== "").join(", ");
}

function jobOf(options: OnboardOptions, facts: NodeFacts, ca: string): Job {
  const { node, address, servers, binaries, binaries_given, config, engines, copies, ca_folder, unit, renew } = options;
  const arch = architectureOf(facts);
  if (arch === null)
    throw new OperatorError("E_NODE", `there is no llmgw for ${facts.arch}`, "it runs on x86_64 and aarch64", "use another machine");
  const binary = chooseBinary(binaries, arch, binaries_given);
  return { node, address, servers, binary, config, engines, copies, ca_folder, ca, unit, renew };
}

function warnOfClock({ clock_s }: NodeFacts, report: Reporter): void {
  const ahead_ms = clock_s * 1_000 - Date.now();
  if (Math.abs(ahead_ms) < ONBOARD_CLOCK_WARN_MS) return;
  report.note(
    `its clock is ${Math.round(Math.abs(ahead_ms) / 1_000)} s ${ahead_ms > 0 ? "ahead" : "behind"}; timedatectl set-ntp true mends that`,
  );
}

/** @throws OperatorError E_REVOKED when the certificate that is there was revoked: only --renew may bring such a node back */
async function refuseRevoked({ cert }: NodeFacts, node: string, servers: ControlPlane): Promise<void> {
  const certificate = cert === null ? null : readCertificate(cert);
  if (certificate === null || "unreadable" in certificate) return;
  const revoked = (await servers.events(node, certificate.issued_ms)).findLast(
    ({ kind }) => kind === "certificate-revoked" || kind === "node-removed",
  );
  if (revoked === undefined) return;
  const when = new Date(revoked.at_ms).toISOString();
  throw new OperatorError("E_REVOKED", `the certificate of ${node} was revoked`, `${when}: ${revoked.text}`, "--renew gives it a new one");
}

function showPlan(plan: readonly (readonly Due[])[], report: Reporter): void {
  for (const { step, why } of plan.flat()) report.step(step.name, why === null ? "is there" : `would be done: ${why}`, null);
}

async function applyPlan(plan: readonly (readonly Due[])[], work: Work, report: Reporter): Promise<void> {
  const apply = async ({ step, why }: Due): Promise<void> => {
    if (why === null) report.step(step.name, "is there", null);
    else
      await timed(
        report,
        step.name,
        () => step.apply(work),
        (text) => text,
      );
  };
  const beside = settle(
    plan
      .flat()
      .filter(({ step }) => step.aside)
      .map(apply),
  );
  // Its failure is told below, once the stages are through; until then nobody waits for it.
  beside.catch(() => {});
  for (const stage of plan) await settle(stage.filter(({ step }) => !step.aside).map(apply));
  await beside;
}

/** Waits for all, then fails as the first that failed did: nothing goes on behind the back of an error. */
async function settle(works: readonly Promise<void>[]): Promise<void> {
  const failed = (await Promise.allSettled(works)).find((outcome) => outcome.status === "rejected");
  if (failed) throw failed.reason;
}

async function timed<T>(report: Reporter, name: string, act: () => Promise<T>, tell: (result: T) => string): Promise<T> {
  const began_ms = performance.now();
  const result = await act();
  report.step(name, tell(result), performance.now() - began_ms);
  return result;
}
