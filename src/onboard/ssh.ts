import { setTimeout as sleep } from "node:timers/promises";
import ssh2 from "ssh2";
import type { Client, ClientChannel } from "ssh2";
import { fingerprintOf } from "../os/ssh-key.ts";
import { OperatorError } from "../protocol/errors.ts";
import { SSH_COMMAND_MS, SSH_KEEPALIVE_MS, SSH_OUTPUT_BYTES, SSH_READY_MS, SSH_STALL_MS } from "../protocol/limits.ts";
import type { Credential } from "./keys.ts";
import { algorithmsFor, hostKeyError, hostName, judgeHostKey, learnHostKey, readKnownHosts } from "./known-hosts.ts";
import { nextTry, troubleOf, type SshTrouble } from "./patience.ts";

/** Where to log in, and as whom. */
export interface SshTarget {
  readonly host: string;
  readonly port: number;
  readonly user: string;
  readonly credentials: readonly Credential[];
  /** Files with known host keys; a new one is learned into the first. */
  readonly known_hosts: readonly [string, ...string[]];
}

/** A command that ended. */
export interface Ran {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

export interface RunOptions {
  /** What the command reads; chunks of a file, or a text. */
  readonly input?: string | AsyncIterable<Uint8Array>;
  /** It must end within this time; an upload only has to move on. */
  readonly deadline_ms?: number;
  /** What it is called when it does not end; its program when absent. */
  readonly what?: string;
}

/** A machine we are logged in on. */
export interface Remote {
  /** Runs a program as the login user. @throws ConnectionLost, OperatorError E_TIMEOUT */
  run(argv: readonly string[], options?: RunOptions): Promise<Ran>;
  close(): void;
}

/** The connection ended in the middle; what was asked may or may not have been done. */
export class ConnectionLost extends Error {
  override readonly name = "ConnectionLost";
}

/** One word of a POSIX shell's command line that means exactly this text. */
export function quote(word: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/**
 * Logs in, with the patience a booting machine needs.
 * @param wait_ms how long a machine that is not up yet is waited for
 * @param say is told what is waited for, when that changes and every ten seconds
 * @throws OperatorError E_SSH (host key, login), E_TIMEOUT, E_UNREACHABLE
 */
export async function connect(target: SshTarget, wait_ms: number, say: (text: string) => void): Promise<Remote> {
  const started_ms = performance.now();
  let seen_booting = false;
  let refused_ms: number | null = null;
  let told = { why: "", at_ms: 0 };
  for (;;) {
    const result = await connectOnce(target, say);
    if (!("kind" in result)) return result;
    const now_ms = performance.now();
    if (result.kind === "booting") seen_booting = true;
    if (result.kind === "login") refused_ms ??= now_ms;
    const pause_ms = nextTry(result, { started_ms, now_ms, wait_ms, seen_booting, refused_ms });
    if (pause_ms === null) throw gaveUp(target, result, now_ms - started_ms);
    if (told.why !== result.why || now_ms - told.at_ms > 10_000) {
      told = { why: result.why, at_ms: now_ms };
      say(`waiting for ssh on ${target.host}: ${result.why}`);
    }
    await sleep(pause_ms);
  }
}

function gaveUp({ host, port, user, credentials }: SshTarget, { kind, why }: SshTrouble, waited_ms: number): OperatorError {
  const offered = credentials.map(({ shown }) => shown).join(", ");
  if (kind === "login")
    return new OperatorError(
      "E_SSH",
      `${user}@${host} refuses the login`,
      `offered: ${offered}`,
      `put the public key into ~${user}/.ssh/authorized_keys there, or name another with --ssh-key or --ssh-user`,
    );
  if (kind === "final") return new OperatorError("E_UNREACHABLE", `no ssh with ${host} port ${port}`, why, "check --addr and --ssh-port");
  const remedy = "look at the machine's console; --wait 10m waits longer";
  return new OperatorError("E_TIMEOUT", `${host} did not speak ssh within ${Math.round(waited_ms / 1_000)} s`, why, remedy);
}

/** One try. @throws OperatorError E_SSH when the host key is refused: no second try makes that right */
async function connectOnce(target: SshTarget, say: (text: string) => void): Promise<Remote | SshTrouble> {
  const { host, port, user, credentials, known_hosts } = target;
  const name = hostName(host, port);
  const known = await readKnownHosts(known_hosts);
  const client = new ssh2.Client();
  let refusal: OperatorError | null = null;
  const left = [...credentials];
  const verify = (blob: Buffer, answer: (trusted: boolean) => void): void => {
    const judged = judgeHostKey(known, name, blob.toString("base64"));
    if (judged.verdict === "known") return answer(true);
    if (judged.verdict !== "unknown") {
      refusal = hostKeyError(host, name, blob, judged);
      return answer(false);
    }
    learnHostKey(known_hosts[0], name, blob).then(
      () => {
        say(`learned the host key of ${name}: ${fingerprintOf(blob)}, into ${known_hosts[0]}`);
        answer(true);
      },
      (error: OperatorError) => {
        refusal = error;
        answer(false);
      },
    );
  };
  const trouble = await new Promise<SshTrouble | null>((resolve) => {
    client.once("ready", () => resolve(null));
    client.on("error", (error) =>
      resolve(troubleOf({ level: error.level, code: (error as NodeJS.ErrnoException).code, message: error.message })),
    );
    // A server that hangs up after its banner ends the connection without an error.
    client.once("close", () => resolve(troubleOf({ message: "it hung up" })));
    client.connect({
      host,
      port,
      username: user,
      readyTimeout: SSH_READY_MS,
      keepaliveInterval: SSH_KEEPALIVE_MS,
      keepaliveCountMax: 3,
      hostVerifier: verify,
      algorithms: { serverHostKey: { prepend: algorithmsFor(known, name), append: [], remove: [] } as never },
      authHandler: (_methods, _partial, next) => {
        const credential = left.shift();
        // ssh2 ends the login when it is handed `false`, which its types do not know.
        if (credential) next(credential.method(user));
        else next(false as never);
      },
    });
  });
  if (trouble === null) return remoteOf(client);
  client.destroy();
  if (refusal !== null) throw refusal as OperatorError;
  return trouble;
}

function remoteOf(client: Client): Remote {
  const lost = Promise.withResolvers<never>();
  lost.promise.catch(() => {});
  client.once("close", () => lost.reject(new ConnectionLost("the ssh connection was lost")));
  return {
    run: (argv, options = {}) => Promise.race([lost.promise, runOn(client, argv, options)]),
    close: () => void client.end(),
  };
}

async function runOn(
  client: Client,
  argv: readonly string[],
  { input, deadline_ms = SSH_COMMAND_MS, what = argv[0] ?? "" }: RunOptions,
): Promise<Ran> {
  const channel = await new Promise<ClientChannel>((resolve, reject) => {
    client.exec(argv.map(quote).join(" "), (error, opened) => (error ? reject(new ConnectionLost(error.message)) : resolve(opened)));
  });
  const out = collect(channel);
  const err = collect(channel.stderr);
  const ended = new Promise<{ code: number | null; signal: string | undefined }>((resolve) => {
    channel.once("close", (code: number | null, signal?: string) => resolve({ code, signal }));
  });
  const upload = typeof input === "string" || input === undefined ? null : input;
  const timer = alarm(upload === null ? deadline_ms : SSH_STALL_MS);
  const feed = async () => {
    try {
      if (upload === null) return void channel.end(input ?? "");
      for await (const chunk of upload) {
        await write(channel, chunk);
        timer.again();
      }
      channel.end();
    } catch {
      // The command ended before it had read everything; its own code and words say why.
    }
  };
  void feed();
  try {
    const { code, signal } = await Promise.race([ended, timer.rang]);
    if (code === null && signal === undefined) throw new ConnectionLost("the ssh connection was lost");
    return { code: code ?? 255, out: out(), err: signal === undefined ? err() : `${err()}it was ended by ${signal}` };
  } catch (error) {
    channel.destroy();
    if (!(error instanceof Alarm)) throw error;
    const why =
      upload === null ? `it runs for more than ${deadline_ms / 1_000} s` : "nothing more is taken: an MTU too large looks like this";
    throw new OperatorError("E_TIMEOUT", `${what} does not end on the node`, why, "look at the machine's console");
  } finally {
    timer.clear();
  }
}

class Alarm extends Error {}

/** A timer that rejects, and can be wound again. */
function alarm(length_ms: number): { rang: Promise<never>; again: () => void; clear: () => void } {
  const { promise, reject } = Promise.withResolvers<never>();
  promise.catch(() => {});
  let timer = setTimeout(() => reject(new Alarm()), length_ms);
  return {
    rang: promise,
    again: () => {
      clearTimeout(timer);
      timer = setTimeout(() => reject(new Alarm()), length_ms);
    },
    clear: () => clearTimeout(timer),
  };
}

/** What a stream says, up to its limit; it is always read, or the channel would never close. */
function collect(stream: NodeJS.ReadableStream): () => string {
  const chunks: Buffer[] = [];
  let length = 0;
  stream.on("data", (chunk: Buffer) => {
    if (length < SSH_OUTPUT_BYTES) chunks.push(chunk);
    length += chunk.length;
  });
  return () => Buffer.concat(chunks).toString("utf8");
}

function write(channel: ClientChannel, chunk: Uint8Array): Promise<void> {
  return new Promise((resolve, reject) => {
    channel.once("close", reject);
    channel.write(chunk, (error) => {
      channel.off("close", reject);
      if (error) reject(error);
      else resolve();
    });
  });
}
