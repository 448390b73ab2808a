import type { GenericSchema, InferOutput } from "valibot";
import { safeParse } from "valibot";
import { makeDialer, type Dialer } from "../pki/dial.ts";
import { messageOf, OperatorError, parseAs, WireError } from "../protocol/errors.ts";
import { ADMIN_ANSWER_MS, MESSAGE_BODY_BYTES } from "../protocol/limits.ts";
import { identityOf } from "./context-identity.ts";
import type { NamedContext } from "./context.ts";

/** The admin API as ctl sees it. Every answer is checked against its schema. */
export interface AdminClient {
  /** @throws OperatorError E_UNREACHABLE, E_TLS, E_NOT_ALLOWED, or what the server answers */
  get<S extends GenericSchema>(path: string, schema: S): Promise<InferOutput<S>>;
  /** @param within_ms how long its answer may take, when longer than usual */
  send<S extends GenericSchema>(
    method: "POST" | "DELETE",
    path: string,
    body: unknown,
    schema: S,
    within_ms?: number,
  ): Promise<InferOutput<S>>;
  /** An answer that is text, as it comes; it may go on without end. */
  text(path: string): Promise<ReadableStream<Uint8Array>>;
}

interface Ask {
  readonly method: string;
  readonly path: string;
  readonly body?: unknown;
  /** Null for an answer without end. */
  readonly deadline_ms: number | null;
}

/** Whether another server of the context may be asked instead. What changes something is never sent twice. */
const mayAskAnother = (error: unknown, { method }: Ask) =>
  method === "GET" && error instanceof OperatorError && error.code === "E_UNREACHABLE";

async function errorOf(response: Response, server: string): Promise<OperatorError> {
  const text = await response.text().catch(() => "");
  let body: unknown = null;
  try {
    body = JSON.parse(text);
  } catch {
    // Told below, as an answer that is not the admin API's.
  }
  const wire = safeParse(WireError, body);
  if (wire.success) return OperatorError.fromWire(wire.output);
  const why = `it answered ${response.status} in another form than the admin API's`;
  return new OperatorError("E_BAD_REQUEST", `${server} did not answer as a server of llmgw`, why, "llmgw ctl context show");
}

async function jsonOf(response: Response, server: string): Promise<unknown> {
  const declared = Number(response.headers.get("content-length") ?? "0");
  if (declared > MESSAGE_BODY_BYTES * 8) {
    throw new OperatorError("E_BAD_REQUEST", `the answer of ${server} is too long`, `it has ${declared} bytes`, "ask for less");
  }
  try {
    return await response.json();
  } catch (error) {
    throw new OperatorError(
      "E_BAD_REQUEST",
      `the answer of ${server} cannot be read`,
      messageOf(error),
      "llmgw version, here and on the server",
    );
  }
}

async function askOne(dialer: Dialer, server: string, ask: Ask): Promise<Response> {
  const headers: Record<string, string> = { accept: "application/json, text/plain" };
  if (ask.body !== undefined) headers["content-type"] = "application/json";
  const { signal, clear } = deadline(ask.deadline_ms);
  try {
    const response = await dialer.request(`${server.replace(/\/$/, "")}${ask.path}`, {
      method: ask.method,
      headers,
      ...(ask.body === undefined ? {} : { body: JSON.stringify(ask.body) }),
      signal,
      expect: { role: "server" },
    });
    if (!response.ok) throw await errorOf(response, server);
    return response;
  } catch (error) {
    if (error instanceof OperatorError && !(signal.aborted && error.code === "E_UNREACHABLE")) throw error;
    if (!signal.aborted) throw unreachable(server, messageOf(error));
    throw new OperatorError(
      "E_TIMEOUT",
      `${server} did not answer`,
      `nothing came within ${(ask.deadline_ms ?? ADMIN_ANSWER_MS) / 1_000} s`,
      "see the server's log: journalctl -u llmgw-server",
    );
  } finally {
    // The headers are here (or never will be); the body of an endless answer has no deadline.
    clear();
  }
}

function deadline(length_ms: number | null): { signal: AbortSignal; clear: () => void } {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), length_ms ?? ADMIN_ANSWER_MS);
  return { signal: controller.signal, clear: () => clearTimeout(timer) };
}

function unreachable(server: string, why: string): OperatorError {
  return new OperatorError(
    "E_UNREACHABLE",
    `cannot reach server ${server}`,
    why,
    "systemctl status llmgw-server, or llmgw ctl context show",
  );
}

/** A dialer's error, with the context it happened in and the way out ctl knows. */
function inContext(error: unknown, name: string): unknown {
  if (!(error instanceof OperatorError)) return error;
  const { code, message, why } = error;
  if (code === "E_UNREACHABLE")
    return new OperatorError(code, message, why, `systemctl status llmgw-server on that host, or llmgw ctl context show ${name}`);
  if (code === "E_TLS")
    return new OperatorError(code, message, why, `llmgw ctl context show ${name}: is this its authority and your certificate?`);
  return error;
}

/**
 * Makes the client of a context; nothing is sent yet.
 * @throws OperatorError when the context's certificate or key cannot be used
 */
export async function makeAdminClient({ name, context }: NamedContext): Promise<AdminClient> {
  const dialer = makeDialer(await identityOf(name, context));
  const ask = async (question: Ask): Promise<{ response: Response; server: string }> => {
    let last: unknown;
    for (const server of context.servers) {
      try {
        return { response: await askOne(dialer, server, question), server };
      } catch (error) {
        last = inContext(error, name);
        if (!mayAskAnother(error, question)) break;
      }
    }
    throw last;
  };
  const document = async <S extends GenericSchema>(question: Ask, schema: S): Promise<InferOutput<S>> => {
    const { response, server } = await ask(question);
    return parseAs(schema, await jsonOf(response, server), `the answer of ${server}`);
  };
  return {
    get: (path, schema) => document({ method: "GET", path, deadline_ms: ADMIN_ANSWER_MS }, schema),
    send: (method, path, body, schema, within_ms = ADMIN_ANSWER_MS) => document({ method, path, body, deadline_ms: within_ms }, schema),
    text: async (path) => {
      const { response } = await ask({ method: "GET", path, deadline_ms: null });
      return response.body ?? new Blob([]).stream();
    },
  };
}
