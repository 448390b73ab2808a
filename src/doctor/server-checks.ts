import { connect } from "node:net";
import { makeDialer } from "../pki/dial.ts";
import { loadIdentity } from "../pki/identity.ts";
import type { Identity } from "../pki/identity.ts";
import { messageOf, OperatorError, explain } from "../protocol/errors.ts";
import { DOCTOR_REACH_MS, DOCTOR_TOOL_MS } from "../protocol/limits.ts";
import { fail, pass, skipped, unknown, warn } from "./check.ts";
import type { Check, Finding } from "./check.ts";
import type { Machine } from "./machine.ts";

const DAY_MS = 86_400_000;
const RENEW_DAYS = 30;
const NO_SERVER = "no --server given";

/** Own identity, or why there is none. */
async function identityOf(machine: Machine): Promise<Identity | OperatorError> {
  try {
    return await loadIdentity(machine.options.tls);
  } catch (error) {
    return error instanceof OperatorError ? error : new OperatorError("E_FILE", "no identity", messageOf(error), "");
  }
}

async function identity(machine: Machine): Promise<Finding> {
  const { cert } = machine.options.tls;
  const own = await identityOf(machine);
  if (own instanceof OperatorError) {
    // Before it joins, a machine has none.
    const absent = own.code === "E_FILE" && own.why.includes("ENOENT");
    return absent ? skipped(`no certificate yet in ${cert}`) : fail(explain(own), cert, own.remedy);
  }
  const days = Math.floor((own.expires_ms - Date.now()) / DAY_MS);
  const found = `${own.role} ${own.name}, ${days} days left`;
  const remedy = `llmgw ca issue-node ${machine.options.node}`;
  if (own.role !== "node" || own.name !== machine.options.node)
    return fail(`${found}, but this is node ${machine.options.node}`, cert, remedy);
  if (own.issued_ms > Date.now() + DAY_MS) return fail(`${found}, not yet valid`, cert, "set the clock");
  if (days < 0) return fail(`${own.role} ${own.name}: expired ${-days} days ago`, cert, remedy);
  return days < RENEW_DAYS ? warn(found, cert, remedy) : pass(found, cert);
}

async function reach(machine: Machine): Promise<Finding> {
  const { server } = machine.options;
  if (server === null) return skipped(NO_SERVER);
  const { hostname, port } = new URL(server);
  const source = `tcp ${hostname}:${port || 443}`;
  const start = performance.now();
  const why = await new Promise<string | null>((resolve) => {
    const socket = connect({ host: hostname.replaceAll(/[[\]]/g, ""), port: Number(port || 443), timeout: DOCTOR_REACH_MS });
    const end = (text: string | null) => {
      socket.destroy();
      resolve(text);
    };
    socket.once("connect", () => end(null));
    socket.once("timeout", () => end(`no answer in ${DOCTOR_REACH_MS / 1_000} s`));
    socket.once("error", (error) => end(messageOf(error)));
  });
  if (why === null) return pass(`answers in ${Math.round(performance.now() - start)} ms`, source);
  return fail(why, source, "check that the server runs, the address, and the firewall (7443)");
}

/** One request to the server: how far its clock is ahead of ours in ms. */
async function askServer(machine: Machine, own: Identity): Promise<{ ahead_ms: number } | OperatorError> {
  const start = Date.now();
  try {
    const url = new URL("/agent/v1/doctor", machine.options.server ?? "").href;
    const signal = AbortSignal.timeout(DOCTOR_REACH_MS);
    const answer = await makeDialer(own).request(url, { expect: { role: "server" }, signal });
    await answer.body?.cancel();
    // The header has whole seconds; the middle of one is the best guess.
    const date = Date.parse(answer.headers.get("date") ?? "");
    return { ahead_ms: date + 500 - (start + Date.now()) / 2 };
  } catch (error) {
    if (error instanceof OperatorError) return error;
    return new OperatorError("E_UNREACHABLE", "the server does not answer", messageOf(error), "check that it runs");
  }
}

async function trust(machine: Machine): Promise<Finding> {
  const { server, tls } = machine.options;
  if (server === null) return skipped(NO_SERVER);
  const own = await identityOf(machine);
  if (own instanceof OperatorError) return skipped(`no identity to speak with: ${own.why}`);
  const answer = await askServer(machine, own);
  if (answer instanceof OperatorError) return fail(explain(answer), server, answer.remedy);
  return pass(`it is a server of the authority in ${tls.ca} and admits this certificate`, server);
}

async function clock(machine: Machine): Promise<Finding> {
  const { server } = machine.options;
  const own = server === null ? null : await identityOf(machine);
  if (server !== null && own !== null && !(own instanceof OperatorError)) {
    const answer = await askServer(machine, own);
    if (!(answer instanceof OperatorError) && !Number.isNaN(answer.ahead_ms)) {
      const off = `${(Math.abs(answer.ahead_ms) / 1_000).toFixed(1)} s ${answer.ahead_ms > 0 ? "behind" : "ahead of"} the server`;
      const remedy = "systemctl enable --now systemd-timesyncd (or chrony)";
      if (Math.abs(answer.ahead_ms) > 300_000) return fail(`${off}: certificates may be refused`, server, remedy);
      return Math.abs(answer.ahead_ms) > 5_000 ? warn(off, server, remedy) : pass(off, server);
    }
  }
  const source = "timedatectl";
  const said = await machine.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], DOCTOR_TOOL_MS);
  const word = "code" in said && said.code === 0 ? said.out.trim() : "";
  if (word === "yes") return pass("kept by NTP", source);
  if (word === "no") return warn("not synchronised", source, "systemctl enable --now systemd-timesyncd (or chrony)");
  if (server === null)
    return unknown(
      "timedatectl does not tell",
      source,
      "llmgw doctor --server URL compares it with the server's, once the node has a certificate",
    );
  return unknown(
    "neither the server nor timedatectl tells",
    source,
    "see what is said of the server and of the certificate, and run it again",
  );
}

const row = (id: string, title: string, why: string, remedy: string, run: Check["run"]): Check => ({ id, title, why, remedy, run });

export const SERVER_CHECKS: readonly Check[] = [
  row("server.reach", "server reachable", "The agent dials the server.", "Check address and firewall (7443).", reach),
  row(
    "server.trust",
    "mutual TLS with the server",
    "Agent and server must be of one authority.",
    "Use one CA file on both; issue again.",
    trust,
  ),
  row("host.clock", "clock", "Certificates have dates, and reports carry times.", "Synchronise it with NTP.", clock),
  row("agent.certificate", "own certificate", "An expired one locks the node out.", "`llmgw ca issue-node NODE`.", identity),
];
