import { request as httpRequest } from "node:http";
import { connect, type TLSSocket } from "node:tls";
import { setTimeout as sleep } from "node:timers/promises";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { PVE_ANSWER_BYTES, PVE_ANSWER_MS, PVE_GET_TRIES_COUNT } from "../protocol/limits.ts";
import { AnswerLost, PveError, refusalText, type PveMethod, type PveParameters, type PveTransport } from "./pve.ts";

/** Whom to believe to be Proxmox. */
interface PveTrust {
  /** PEM; null = the system's authorities. */
  readonly ca: string | null;
  /** SHA-256 of its certificate, `AA:BB:...`; null = not pinned. */
  readonly fingerprint: string | null;
}

export type PveLogin =
  { readonly kind: "token"; readonly token: string } | { readonly kind: "password"; readonly user: string; readonly password: string };

/** Nothing was sent: whatever was asked for has not been done. */
class NotSent extends Error {}

/** Proxmox's API over HTTPS. Only questions are asked again: what was sent and not answered may have been done. */
export class HttpsTransport implements PveTransport {
  readonly shown: string;
  readonly local_node = null;
  readonly #host: string;
  readonly #port: number;
  readonly #trust: PveTrust;
  readonly #login: PveLogin;
  #ticket: { readonly cookie: string; readonly csrf: string } | null = null;

  /** @param url `https://host[:port]`, or a host alone */
  constructor(url: string, trust: PveTrust, login: PveLogin) {
    const { hostname, port } = new URL(url.startsWith("https://") ? url : `https://${url}`);
    this.#host = hostname.replace(/^\[|\]$/g, "");
    this.#port = Number(port || 8006);
    this.shown = `https://${hostname}:${this.#port}`;
    this.#trust = trust;
    this.#login = login;
  }

  async request(method: PveMethod, path: string, parameters: PveParameters): Promise<unknown> {
    const headers = await this.#credentials(method);
    for (let left = method === "GET" ? PVE_GET_TRIES_COUNT : 1; ; left--) {
      try {
        return await this.#once(method, path, parameters, headers);
      } catch (error) {
        const transient = error instanceof AnswerLost || error instanceof NotSent || (error instanceof PveError && error.status >= 595);
        if (transient && left > 1) {
          await sleep(1_000);
          continue;
        }
        if (error instanceof NotSent)
          throw new OperatorError(
            "E_UNREACHABLE",
            `cannot reach Proxmox at ${this.shown}`,
            error.message,
            "check --pve-host, and that port 8006 is open",
          );
        throw error;
      }
    }
  }

  async #credentials(method: PveMethod): Promise<Record<string, string>> {
    if (this.#login.kind === "token") return { authorization: `PVEAPIToken=${this.#login.token}` };
    this.#ticket ??= await this.#logIn(this.#login.user, this.#login.password);
    const { cookie, csrf } = this.#ticket;
    return { cookie: `PVEAuthCookie=${encodeURIComponent(cookie)}`, ...(method !== "GET" && { csrfpreventiontoken: csrf }) };
  }

  async #logIn(username: string, password: string) {
    const answer = (await this.#once("POST", "/access/ticket", { username, password }, {})) as {
      ticket?: string;
      CSRFPreventionToken?: string;
    };
    if (!answer.ticket || !answer.CSRFPreventionToken)
      throw new PveError(401, "Proxmox gave no ticket: a second factor is not supported, use a token", "/access/ticket");
    return { cookie: answer.ticket, csrf: answer.CSRFPreventionToken };
  }

  async #once(method: PveMethod, path: string, parameters: PveParameters, headers: Record<string, string>): Promise<unknown> {
    const form = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== undefined) form.set(name, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
    }
    const inUrl = method === "GET" || method === "DELETE";
    const body = inUrl ? "" : form.toString();
    const query = inUrl && form.size > 0 ? `?${form.toString()}` : "";
    const socket = await this.#connect();
    try {
      return await exchange(socket, { method, path: `/api2/json${path}${query}`, host: this.#host, port: this.#port, headers, body });
    } finally {
      socket.destroy();
    }
  }

  /** A connection whose other end is known before a word is said. */
  #connect(): Promise<TLSSocket> {
    const { ca, fingerprint } = this.#trust;
    return new Promise((resolve, reject) => {
      const socket = connect({
        host: this.#host,
        port: this.#port,
        ...(/^[\d.:]+$/.test(this.#host) ? {} : { servername: this.#host }),
        ...(ca !== null && { ca }),
        rejectUnauthorized: fingerprint === null,
      });
      const timer = setTimeout(() => socket.destroy(new Error(`no answer within ${PVE_ANSWER_MS / 1_000} s`)), PVE_ANSWER_MS);
      socket.once("error", (error) => {
        clearTimeout(timer);
        reject(trustFault(error) ?? new NotSent(messageOf(error)));
      });
      socket.once("secureConnect", () => {
        clearTimeout(timer);
        const shown = socket.getPeerCertificate().fingerprint256;
        if (fingerprint === null || shown?.toUpperCase() === fingerprint.toUpperCase()) return resolve(socket);
        socket.destroy();
        reject(
          new OperatorError(
            "E_NOT_ALLOWED",
            "this is not the Proxmox that was pinned",
            `its certificate is ${shown}, and ${fingerprint} is expected`,
            "compare with the certificate that Proxmox shows under Node, System, Certificates",
          ),
        );
      });
    });
  }
}

function trustFault(error: Error): OperatorError | null {
  const code = (error as NodeJS.ErrnoException).code ?? "";
  if (!/CERT|SELF_SIGNED|UNABLE_TO|ALTNAME/.test(code)) return null;
  return new OperatorError(
    "E_NOT_ALLOWED",
    "cannot trust the certificate of Proxmox",
    code,
    "name its authority with --pve-ca (/etc/pve/pve-root-ca.pem), or pin it with --pve-fingerprint",
  );
}

interface Exchange {
  readonly method: PveMethod;
  readonly path: string;
  readonly host: string;
  readonly port: number;
  readonly headers: Record<string, string>;
  readonly body: string;
}

function exchange(socket: TLSSocket, { method, path, host, port, headers, body }: Exchange): Promise<unknown> {
  return new Promise((resolve, reject) => {
    const lost = (why: string) => reject(new AnswerLost(`${method} ${path.split("?")[0]}: ${why}`));
    const length = { "content-type": "application/x-www-form-urlencoded", "content-length": String(Buffer.byteLength(body)) };
    // With `agent: false` Bun passes over the socket and dials by itself: the token would go to whoever answers there.
    const request = httpRequest({
      createConnection: () => socket,
      method,
      path,
      headers: { host: `${host}:${port}`, connection: "close", accept: "application/json", ...headers, ...(body !== "" && length) },
    });
    const timer = setTimeout(() => request.destroy(new Error(`no answer within ${PVE_ANSWER_MS / 1_000} s`)), PVE_ANSWER_MS);
    request.once("error", (error) => {
      clearTimeout(timer);
      lost(messageOf(error));
    });
    request.once("response", (response) => {
      const parts: Buffer[] = [];
      let bytes = 0;
      response.on("data", (part: Buffer) => {
        bytes += part.length;
        if (bytes > PVE_ANSWER_BYTES) request.destroy(new Error("the answer is too long"));
        parts.push(part);
      });
      response.once("error", (error) => lost(messageOf(error)));
      response.once("aborted", () => lost("the connection was cut"));
      response.once("end", () => {
        clearTimeout(timer);
        judge(response.statusCode ?? 0, response.statusMessage ?? "", Buffer.concat(parts).toString("utf8"), path, resolve, reject);
      });
    });
    request.end(body);
  });
}

function judge(
  status: number,
  reason: string,
  text: string,
  path: string,
  resolve: (data: unknown) => void,
  reject: (error: Error) => void,
): void {
  let body: unknown = null;
  try {
    body = JSON.parse(text);
  } catch {
    if (status === 200) return reject(new PveError(status, "its answer is no JSON: is this a Proxmox?", path));
  }
  if (status >= 200 && status < 300) return resolve((body as { data?: unknown } | null)?.data ?? null);
  reject(new PveError(status, refusalText(reason, body), path));
}
