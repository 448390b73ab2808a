import * as v from "valibot";

/**
 * Every error llmgw shows has one of these codes. `exit` is the process exit code (1 failed, 2 usage or
 * config, 3 cannot reach or not allowed, 4 timed out, 130 interrupted); `status` the HTTP status where the admin or agent API
 * answers with it. `docs/reference/errors.md` is generated from this table.
 */
export const ERRORS = {
  E_USAGE: { exit: 2, status: 400, about: "a command line flag or argument is wrong" },
  E_CONFIG: { exit: 2, status: 400, about: "a configuration or catalog file is wrong" },
  E_BAD_REQUEST: { exit: 1, status: 400, about: "a message does not have the form its schema asks for" },
  E_NOT_FOUND: { exit: 1, status: 404, about: "nothing has that name" },
  E_EXISTS: { exit: 1, status: 409, about: "it is already there and is not overwritten" },
  E_FILE: { exit: 1, status: 500, about: "a file cannot be read or written" },
  E_UNREACHABLE: { exit: 3, status: 502, about: "the other side does not answer" },
  E_TLS: { exit: 3, status: 502, about: "the mutual TLS handshake failed or the far side is not who was meant" },
  E_NOT_ALLOWED: { exit: 3, status: 403, about: "the certificate or key does not allow this" },
  E_IDENTITY: { exit: 3, status: 403, about: "the certificate is not that of the node it claims to be" },
  E_REVOKED: { exit: 3, status: 403, about: "the certificate was revoked or superseded" },
  E_DUPLICATE_NODE: { exit: 3, status: 409, about: "another machine is connected with the same certificate" },
  E_SSH: { exit: 3, status: 502, about: "a machine refuses us over ssh, or shows another host key than the known one" },
  E_NODE: { exit: 1, status: 500, about: "a machine cannot be a node as it is" },
  E_STALE_SESSION: { exit: 1, status: 409, about: "the message belongs to an older session" },
  E_PROTOCOL: { exit: 1, status: 426, about: "the two sides speak different protocol numbers" },
  E_TIMEOUT: { exit: 4, status: 504, about: "it did not happen within its deadline" },
  E_INTERRUPTED: { exit: 130, status: 500, about: "somebody asked it to stop" },
  E_SYSTEMD: { exit: 1, status: 500, about: "systemd does not run a service that was asked of it" },
  E_PROXMOX: { exit: 1, status: 502, about: "Proxmox refuses something or fails at it" },
  E_ENGINE: { exit: 1, status: 500, about: "an engine does not run or refused its arguments" },
  E_WEIGHTS: { exit: 1, status: 500, about: "weights cannot be fetched or are not what was named" },
  E_NO_ROOM: { exit: 1, status: 507, about: "there is not enough memory, disk or GPUs" },
  E_INTERNAL: { exit: 1, status: 500, about: "a fault in llmgw itself" },
} as const satisfies Record<string, { exit: 1 | 2 | 3 | 4 | 130; status: number; about: string }>;

export type ErrorCode = keyof typeof ERRORS;
export const ERROR_CODES = Object.keys(ERRORS) as [ErrorCode, ...ErrorCode[]];

/** The form of an error on the admin and agent APIs. */
export const WireError = v.object({
  error: v.object({ code: v.picklist(ERROR_CODES), what: v.string(), why: v.string(), remedy: v.string() }),
});
export type WireError = v.InferOutput<typeof WireError>;

/**
 * An error an operator may see: what failed, why, and what to try. Never holds a key, token or prompt.
 * The CLI prints it as three lines; the APIs send it as {@link WireError}.
 */
export class OperatorError extends Error {
  readonly code: ErrorCode;
  readonly why: string;
  readonly remedy: string;

  constructor(code: ErrorCode, what: string, why: string, remedy: string, options?: { cause?: unknown }) {
    super(what, options);
    this.name = "OperatorError";
    this.code = code;
    this.why = why;
    this.remedy = remedy;
  }

  /** The process exit code for this error. */
  get exit(): number {
    return ERRORS[this.code].exit;
  }

  /** The HTTP status for this error. */
  get status(): number {
    return ERRORS[this.code].status;
  }

  toWire(): WireError {
    return { error: { code: this.code, what: this.message, why: this.why, remedy: this.remedy } };
  }

  static fromWire(wire: WireError): OperatorError {
    const { code, what, why, remedy } = wire.error;
    return new OperatorError(code, what, why, remedy);
  }
}

/** The message of anything thrown, on one line. */
export function messageOf(thrown: unknown): string {
  const text = thrown instanceof Error ? thrown.message : String(thrown);
  // What Bun says of `fetch` ends with advice for programmers.
  return text.replace(/ For more information, pass `verbose: true`.*$/s, "").replaceAll(/\s*\n\s*/g, "; ");
}

/** What anything thrown says, and why where that is known, on one line: for a log or another error's reason. */
export function explain(thrown: unknown): string {
  return thrown instanceof OperatorError ? `${thrown.message}: ${thrown.why}` : messageOf(thrown);
}

/**
 * Checks a value from outside against its schema.
 * @param subject what the value is, for the error ("the report of node a")
 * @throws OperatorError E_BAD_REQUEST naming the first wrong place
 */
export function parseAs<S extends v.GenericSchema>(schema: S, value: unknown, subject: string): v.InferOutput<S> {
  const result = v.safeParse(schema, value);
  if (result.success) return result.output;
  const first = result.issues[0];
  const path = v.getDotPath(first) ?? "(top level)";
  throw new OperatorError(
    "E_BAD_REQUEST",
    `${subject} is not valid`,
    `${path}: ${first.message}`,
    "check that both sides run the same llmgw version",
  );
}
