import { request as httpRequest } from "node:http";
import { connect, type TLSSocket } from "node:tls";
import { setTimeout as sleep } from "node:timers/promises";
import * as v from "valibot";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { PVE_ANSWER_BYTES, PVE_ANSWER_MS, PVE_GET_TRIES_COUNT, PVE_RETRY_MS } from "../protocol/limits.ts";
import { AnswerLost, PveError, refusalText, Stopped, type PveMethod, type PveParameters, type PveTransport } from "./pve.ts";

/** Whom to believe to be Proxmox. */
interface PveTrust {
  /** PEM; null = the system's authorities. */
  readonly ca: string | null;
  /** SHA-256 of its certificate, `AA:BB:...`; null = not pinned. */
  readonly fingerprint: string | null;
}

export type PveLogin =
  { readonly kind: "token"; readonly token: string } | { readonly kind: "password"; readonly user: string; readonly password: string };

const Ticket = v.looseObject({ ticket: v.pipe(v.string(), v.minLength(1)), CSRFPreventionToken: v.string() });

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

  /**
   * @param url `https://host[:port]`, or a host alone
   * @throws OperatorError E_USAGE when it is something else
   */
  constructor(url: string, trust: PveTrust, login: PveLogin) {
    const { hostname, port } = hostIn(url);
    this.#host = hostname.replace(/^\[|\]$/g, "");
    this.#port = Number(port || 8006);
    this.shown = `https://${hostname}:${this.#port}`;
    this.#trust = trust;
    this.#login = login;
  }

  async request(method: PveMethod, path: string, parameters: PveParameters, signal?: AbortSignal): Promise<unknown> {
    const isQuestion = method === "GET";
    let renewed = false;
    for (let left = isQuestion ? PVE_GET_TRIES_COUNT : 1; ; left--) {
      try {
        return await this.#once(method, path, parameters, await this.#credentials(method), isQuestion ? signal : undefined);
      } catch (error) {
        if (signal?.aborted && isQuestion) throw new Stopped();
        // A ticket lives for two hours. What is refused was not done.
        if (this.#ticket !== null && !renewed && error instanceof PveError && error.status === 401) {
          this.#ticket = null;
          renewed = true;
          left++;
          continue;
        }
        const transient = error instanceof AnswerLost || error instanceof NotSent || (error instanceof PveError && error.status >= 595);
        if (transient && left > 1) {
          await sleep(PVE_RETRY_MS, undefined, { signal }).catch(() => {});
          continue;
        }
        throw this.#told(error, isQuestion);
      }
    }
  }

  /** What a question went unanswered by is no doubt about what was done. */
  #told(error: unknown, isQuestion: boolean): unknown {
    const unreachable = (what: string, remedy: string) => new OperatorError("E_UNREACHABLE", what, messageOf(error), remedy);
    if (error instanceof NotSent)
      return unreachable(`cannot reach Proxmox at ${this.shown}`, "check --pve-host, and that port 8006 is open");
    if (error instanceof AnswerLost && isQuestion)
      return unreachable(
        `no whole answer comes from ${this.shown}`,
        "check that --pve-host is a Proxmox, and that nothing between cuts connections",
      );
    return error;
  }

  async #credentials(method: PveMethod): Promise<Record<string, string>> {
    if (this.#login.kind === "token") return { authorization: `PVEAPIToken=${this.#login.token}` };
    this.#ticket ??= await this.#logIn(this.#login.user, this.#login.password);
    const { cookie, csrf } = this.#ticket;
    return { cookie: `PVEAuthCookie=${encodeURIComponent(cookie)}`, ...(method !== "GET" && { csrfpreventiontoken: csrf }) };
  }

  async #logIn(username: string, password: string) {
    const answer = await this.#once("POST", "/access/ticket", { username, password }, {}).catch((error) => {
      // Whether we were let in matters to nobody when the answer is lost.
      throw error instanceof AnswerLost ? new NotSent(error.message) : error;
    });
    const given = v.safeParse(Ticket, answer);
    // A wrong password is not tried again.
    if (!given.success)
      throw new OperatorError(
        "E_NOT_ALLOWED",
        "Proxmox gave no ticket",
        "a second factor is not supported",
        "use a token: --pve-token-file",
      );
    return { cookie: given.output.ticket, csrf: given.output.CSRFPreventionToken };
  }

  async #once(
    method: PveMethod,
    path: string,
    parameters: PveParameters,
    headers: Record<string, string>,
    signal?: AbortSignal,
  ): Promise<unknown> {
    const form = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== undefined) form.set(name, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
    }
    const inUrl = method === "GET" || method === "DELETE";
    const body = inUrl ? "" : form.toString();
    const query = inUrl && form.size > 0 ? `?${form.toString()}` : "";
    const socket = await this.#connect(signal);
    const stop = () => void socket.destroy(new Stopped());
    signal?.addEventListener("abort", stop);
    try {
      return await exchange(socket, { method, path: `/api2/json${path}${query}`, host: this.#host, port: this.#port, headers, body });
    } finally {
      signal?.removeEventListener("abort", stop);
      socket.destroy();
    }
  }

  /** A connection whose other end is known before a word is said. */
  #connect(signal?: AbortSignal): Promise<TLSSocket> {
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
      const stop = () => void socket.destroy(new Stopped());
      const settled = () => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", stop);
      };
      if (signal?.aborted) stop();
      signal?.addEventListener("abort", stop);
      socket.once("error", (error) => {
        settled();
        reject(trustFault(error) ?? new NotSent(messageOf(error)));
      });
      socket.once("secureConnect", () => {
        settled();
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

function hostIn(text: string): URL {
  const [, rest] = /^(?:https:\/\/)?((?:\[[\da-f:.]+\]|[a-z\d._-]+)(?::\d+)?)\/?$/i.exec(text) ?? [];
  const url = rest === undefined ? null : URL.parse(`https://${rest}`);
  if (url !== null) return url;
  throw new OperatorError(
    "E_USAGE",
    `Proxmox cannot be at "${text.replace(/[^/]*@/, "...@")}"`,
    "it is https://HOST or https://HOST:PORT",
    "--pve-host https://pve1:8006",
  );
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
        try {
          const text = Buffer.concat(parts).toString("utf8");
          resolve(judge(response.statusCode ?? 0, response.statusMessage ?? "", text, { method, path: path.split("?")[0] ?? "" }));
        } catch (error) {
          reject(error as Error);
        }
      });
    });
    request.end(body);
  });
}

/** What an answer means: its data, a refusal of Proxmox, or the words of something else that stands in its place. */
function judge(status: number, reason: string, text: string, { method, path }: Pick<Exchange, "method" | "path">): unknown {
  const body = documentIn(text);
  const isProxmox = typeof body === "object" && body !== null;
  if (isProxmox && status >= 200 && status < 300) return (body as { data?: unknown }).data ?? null;
  // Proxmox refuses by an empty page as well, or one of its own statuses.
  if (isProxmox || status >= 595 || (text.trim() === "" && status >= 400)) {
    // Another node of the cluster was to do it, and may have.
    if (method !== "GET" && status >= 595) throw new AnswerLost(`${status}: ${refusalText(reason, body)}`);
    throw new PveError(status, refusalText(reason, body), path);
  }
  const what = `${status} ${refusalText(reason, null)}, which is not what Proxmox answers`;
  // A proxy between gives up sooner than Proxmox does.
  if (method !== "GET") throw new AnswerLost(`${method} ${path}: ${what}`);
  throw new OperatorError(
    "E_UNREACHABLE",
    "what answers is no Proxmox",
    `it says ${what}`,
    "check --pve-host: https://HOST:8006, and a proxy that stands between",
  );
}

function documentIn(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
