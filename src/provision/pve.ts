import { proxmoxApi, type Proxmox } from "proxmox-api";
import { OperatorError } from "../protocol/errors.ts";
import { PVE_REASON_COUNT } from "../protocol/limits.ts";

export type PveMethod = "GET" | "POST" | "PUT" | "DELETE";
export type PveParameters = Readonly<Record<string, string | number | boolean | undefined>>;

/** A way to Proxmox's API. Answers are what stands under `data`. */
export interface PveTransport {
  /** For people. */
  readonly shown: string;
  /** The Proxmox node it runs on itself; null = over the network. */
  readonly local_node: string | null;
  /**
   * @param signal ends a question; a change is waited for, since nobody would know whether it was done
   * @throws PveError what Proxmox refuses; AnswerLost when it may or may not have done it; Stopped; OperatorError when it is not reached
   */
  request(method: PveMethod, path: string, parameters: PveParameters, signal?: AbortSignal): Promise<unknown>;
}

/** Proxmox said no. */
export class PveError extends Error {
  /** HTTP status; 0 where there is none. */
  readonly status: number;
  readonly path: string;

  constructor(status: number, reason: string, path: string) {
    super(reason);
    this.name = "PveError";
    this.status = status;
    this.path = path;
  }

  /** Another task holds what this one needs, for a while. */
  get is_locked(): boolean {
    return /can't lock file|got timeout/.test(this.message);
  }

  /** The VMID is another machine's, for good. */
  get is_taken(): boolean {
    return /already exists/.test(this.message);
  }
}

/** A task of Proxmox ended, and not well. */
export class TaskFailed extends PveError {}

/** We stopped asking: whoever gave the signal knows why. */
export class Stopped extends Error {}

/** Nobody knows whether it was done. */
export class AnswerLost extends Error {}

/** The API with its types, over a transport; its questions end with the signal. */
export function apiOver(transport: PveTransport, signal: AbortSignal): Proxmox.Api {
  return proxmoxApi({
    doRequest: (method, path, _template, parameters) =>
      transport.request(
        method.replace("$", "").toUpperCase() as PveMethod,
        path.replace(/^\/api2\/json/, ""),
        (parameters ?? {}) as PveParameters,
        signal,
      ),
  });
}

/** The words of an answer that is a refusal: single fields first, then the message, then the reason of the status line. */
export function refusalText(reason: string, body: unknown): string {
  const { errors, message } = (typeof body === "object" && body !== null ? body : {}) as { errors?: unknown; message?: unknown };
  const fields =
    typeof errors === "object" && errors !== null ? Object.entries(errors).map(([name, what]) => `${name}: ${String(what).trim()}`) : [];
  if (fields.length > 0) return onOneLine(fields.join("; "));
  return onOneLine(typeof message === "string" && message.trim() !== "" ? message : reason) || "no reason is given";
}

/** Words from outside, for a line of a terminal. */
export function onOneLine(text: string): string {
  return text
    .replaceAll(/[\p{Cc}\s]+/gu, " ")
    .trim()
    .slice(0, PVE_REASON_COUNT);
}

/** An error of Proxmox for an operator. */
export function forOperator(error: unknown, doing: string): OperatorError {
  if (error instanceof OperatorError) return error;
  if (error instanceof AnswerLost)
    return new OperatorError(
      "E_UNREACHABLE",
      `${doing}: nobody knows whether it was done`,
      error.message,
      "look at the tasks in Proxmox before trying again",
    );
  if (!(error instanceof PveError)) throw error;
  const { status, message } = error;
  if (status === 401)
    return new OperatorError("E_NOT_ALLOWED", doing, message, "check the token or password; a token file holds USER@REALM!NAME=UUID");
  if (status === 403)
    return new OperatorError(
      "E_NOT_ALLOWED",
      doing,
      message,
      "give the token the privilege it names: docs/adding-a-node.md has the commands",
    );
  if (status >= 595)
    return new OperatorError("E_UNREACHABLE", doing, `${status}: ${message}`, "check --pve-node: it is the short name as Proxmox lists it");
  if (error.is_locked) return new OperatorError("E_TIMEOUT", doing, message, "another task holds the lock; try again when it has ended");
  const remedy =
    error instanceof TaskFailed ? "see the task's log in Proxmox" : "see journalctl -u pvedaemon -u pveproxy on the Proxmox host";
  return new OperatorError("E_PROXMOX", doing, message, remedy);
}
