import type { IncomingMessage, ServerResponse } from "node:http";
import type * as v from "valibot";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { MESSAGE_BODY_BYTES } from "../protocol/limits.ts";

/** Reads a JSON body, checked. @throws OperatorError E_BAD_REQUEST */
export async function readJson<S extends v.GenericSchema>(request: IncomingMessage, schema: S, subject: string): Promise<v.InferOutput<S>> {
  const bad = (why: string) =>
    new OperatorError("E_BAD_REQUEST", `${subject} is not valid`, why, "check that both sides run the same llmgw version");
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size > MESSAGE_BODY_BYTES) throw bad(`it is longer than ${MESSAGE_BODY_BYTES} bytes`);
    chunks.push(chunk);
  }
  let document: unknown;
  try {
    document = JSON.parse(Buffer.concat(chunks).toString("utf8"));
  } catch (error) {
    throw bad(`not JSON: ${messageOf(error)}`);
  }
  return parseAs(schema, document, subject);
}

export function sendJson(response: ServerResponse, document: unknown, status = 200): void {
  const body = JSON.stringify(document);
  response.writeHead(status, { "content-type": "application/json", "content-length": Buffer.byteLength(body) }).end(body);
}

/** Sends what was thrown as a WireError; what is no OperatorError is a fault of ours. */
export function sendError(response: ServerResponse, error: unknown): void {
  const known =
    error instanceof OperatorError
      ? error
      : new OperatorError("E_INTERNAL", "the request failed", messageOf(error), "see the server's log and report it");
  if (response.headersSent) response.destroy();
  else sendJson(response, known.toWire(), known.status);
}

/** Aborts when the caller is gone before it was answered. */
export function goneSignal(response: ServerResponse): AbortSignal {
  const gone = new AbortController();
  response.once("close", () => {
    if (!response.writableFinished) gone.abort();
  });
  return gone.signal;
}

/** One route: the method and the path, whose `:name` parts are handed over. */
export interface Route<C> {
  readonly method: string;
  readonly path: string;
  readonly run: (context: C, params: Readonly<Record<string, string>>) => Promise<void>;
}

/** The route of a request, with the parts of its path. */
export function findRoute<C>(
  routes: readonly Route<C>[],
  method: string,
  pathname: string,
): { route: Route<C>; params: Record<string, string> } | null {
  const parts = pathname.split("/");
  for (const route of routes) {
    const wanted = route.path.split("/");
    if (route.method !== method || wanted.length !== parts.length) continue;
    const params: Record<string, string> = {};
    const fits = wanted.every((want, index) => {
      const part = parts[index] ?? "";
      if (!want.startsWith(":")) return want === part;
      params[want.slice(1)] = decode(part);
      return part !== "";
    });
    if (fits) return { route, params };
  }
  return null;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
