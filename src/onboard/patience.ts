import { SSH_LOGIN_BOOTING_MS, SSH_LOGIN_FINAL_MS, SSH_LOGIN_RETRY_MS, SSH_RETRY_MS } from "../protocol/limits.ts";

/**
 * Why ssh did not work. `booting`: what a machine does that is not up yet; `login`: it speaks ssh and refuses our keys;
 * `final`: waiting does not help.
 */
export interface SshTrouble {
  readonly kind: "booting" | "login" | "final";
  readonly why: string;
}

/** What ssh2 says of a failed connection. */
interface SshFault {
  readonly level?: string | undefined;
  readonly code?: string | undefined;
  readonly message: string;
}

const SOCKET_WORDS: Readonly<Record<string, string>> = {
  ECONNREFUSED: "connection refused: the machine is there, and nothing listens on the ssh port",
  EHOSTUNREACH: "no machine answers at that address",
  ENETUNREACH: "there is no route to that network",
  ETIMEDOUT: "no answer at all: it is off, or a firewall drops the packets",
  ECONNRESET: "the connection was reset before ssh began",
};

/** Tells what an ssh failure means. */
export function troubleOf({ level, code, message }: SshFault): SshTrouble {
  if (level === "client-authentication") return { kind: "login", why: "it refused every key that was offered" };
  if (level === "client-timeout") return { kind: "booting", why: "it accepts connections and stays silent" };
  const words = code === undefined ? undefined : SOCKET_WORDS[code];
  if (words !== undefined) return { kind: "booting", why: words };
  if (/no matching/i.test(message)) return { kind: "final", why: `no common way to speak ssh: ${message}` };
  if (level === "client-socket" && code !== undefined) return { kind: "final", why: message };
  return { kind: "booting", why: `it ended the connection before a login (${message})` };
}

/** What happened so far, in ms of one clock. */
interface Waiting {
  readonly started_ms: number;
  readonly now_ms: number;
  /** How long the operator lets us wait. */
  readonly wait_ms: number;
  /** Whether any try showed a machine that was not up. */
  readonly seen_booting: boolean;
  /** When it first refused our keys; null = never yet. */
  readonly refused_ms: number | null;
}

/** How long to wait before the next try; null = that was the last. */
export function nextTry({ kind }: SshTrouble, { started_ms, now_ms, wait_ms, seen_booting, refused_ms }: Waiting): number | null {
  if (kind === "final") return null;
  const pause = kind === "login" ? SSH_LOGIN_RETRY_MS : SSH_RETRY_MS;
  if (now_ms + pause - started_ms > wait_ms) return null;
  if (kind === "booting") return pause;
  const patience = seen_booting ? SSH_LOGIN_BOOTING_MS : SSH_LOGIN_FINAL_MS;
  return now_ms + pause - (refused_ms ?? now_ms) > patience ? null : pause;
}
