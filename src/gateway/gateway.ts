/**
 * gateway/ is the data plane in its own process: it answers users from the last snapshot it was given, by replicas it
 * reaches through their mutual TLS doors. It decides nothing about the fleet and needs no server to go on.
 */
import { isIP } from "node:net";
import { join } from "node:path";
import { makePrivateFolder } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { serveUnix } from "../os/unix-http.ts";
import { loadIdentity } from "../pki/identity.ts";
import type { ServerConfig } from "../protocol/config.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { Snapshot } from "../protocol/gateway-api.ts";
import type { GatewayStatus } from "../protocol/gateway-api.ts";
import { DRAIN_REQUESTS_MS } from "../protocol/limits.ts";
import { PROTOCOL } from "../protocol/protocol.ts";
import { VERSION } from "../protocol/version.ts";
import { checkDoors } from "./door-checks.ts";
import { Front } from "./front.ts";
import { GatewayMetrics } from "./gateway-metrics.ts";
import { Loads } from "./loads.ts";
import { Relay } from "./relay.ts";
import { Routes } from "./snapshot.ts";
import { Doors } from "./upstream.ts";

/** The control socket's name in the run folder. */
export const GATEWAY_SOCKET = "gateway.sock";

interface GatewayOptions {
  readonly config: ServerConfig;
  readonly log: Log;
  /** Ends the gateway once what is in flight has ended, or its bound is over. */
  readonly signal: AbortSignal;
}

/** Splits `host:port`; the brackets of an IPv6 address go. */
export function splitHostPort(text: string): { hostname: string; port: number } {
  const at = text.lastIndexOf(":");
  return { hostname: text.slice(0, at).replace(/^\[|\]$/g, ""), port: Number(text.slice(at + 1)) };
}

function isLoopback(hostname: string): boolean {
  return hostname === "localhost" || hostname === "::1" || (isIP(hostname) === 4 && hostname.startsWith("127."));
}

/** Refuses to serve the world without TLS or keys. @throws OperatorError E_CONFIG */
export function checkExposure({ listen, gateway }: ServerConfig): void {
  const { hostname } = splitHostPort(listen.gateway);
  if (isLoopback(hostname)) return;
  const refuse = (why: string, remedy: string) =>
    new OperatorError("E_CONFIG", `the gateway may not listen on ${listen.gateway}`, why, remedy);
  if (gateway.auth === "none") throw refuse("auth: none is for loopback only", "set gateway.auth: keys");
  if (!gateway.tls && !gateway.insecure_http)
    throw refuse("keys would cross the network in clear", "set gateway.tls, or gateway.insecure_http: true behind a proxy that ends TLS");
}

/** Runs the data plane until its signal aborts. @throws OperatorError when it cannot start */
export async function runGateway({ config, log: base, signal }: GatewayOptions): Promise<void> {
  const log = base.with({ component: "gateway" });
  checkExposure(config);
  const started_ms = Date.now();
  const identity = await loadIdentity({ ca: config.tls.ca, ...config.gateway.identity });
  const routes = await Routes.open(config.state, log);
  const loads = new Loads();
  const metrics = new GatewayMetrics(routes, loads);
  const doors = new Doors({ identity, revocations: () => routes.snapshot?.revocations ?? [] });
  const relay = new Relay({ routes, loads, upstream: doors, metrics, log });
  const may_be_open = isLoopback(splitHostPort(config.listen.gateway).hostname);
  const front = new Front({ routes, relay, metrics, log, leaving: () => signal.aborted, may_be_open });
  await makePrivateFolder(config.run);
  const status = (): GatewayStatus => ({
    protocol: PROTOCOL,
    pid: process.pid,
    started_ms,
    llmgw_version: VERSION,
    snapshot: routes.snapshot?.version ?? null,
    in_flight: loads.in_flight,
    loads: loads.list(),
  });
  const control = await serveUnix(join(config.run, GATEWAY_SOCKET), async (request) => {
    const path = `${request.method} ${new URL(request.url).pathname}`;
    if (path === "GET /status") return Response.json(status());
    if (path !== "PUT /snapshot") return new Response("no such path", { status: 404 });
    const accepted = await routes.accept(parseAs(Snapshot, await request.json(), "the snapshot"));
    loads.keepOnly(routes.models);
    return Response.json({ accepted });
  });
  const server = await listen(config, front);
  void checkDoors({ routes, loads, upstream: doors, signal });
  const reload = async () => {
    try {
      doors.setIdentity(await loadIdentity({ ca: config.tls.ca, ...config.gateway.identity }));
      log.info("took the certificate again");
    } catch (error) {
      log.error("kept the old certificate", { why: messageOf(error) });
    }
  };
  const onHangUp = () => void reload();
  process.on("SIGHUP", onHangUp);
  log.info("gateway started", { address: config.listen.gateway, pid: process.pid });
  await aborted(signal);
  process.off("SIGHUP", onHangUp);
  log.info("gateway is ending", { in_flight: loads.in_flight });
  await Promise.race([server.stop(), Bun.sleep(DRAIN_REQUESTS_MS)]);
  await server.stop(true);
  doors.close();
  await control.close();
}

async function listen(config: ServerConfig, front: Front): Promise<Bun.Server<undefined>> {
  const { hostname, port } = splitHostPort(config.listen.gateway);
  const { tls } = config.gateway;
  try {
    return Bun.serve({
      hostname,
      port,
      development: false,
      // The front counts bodies itself, so that a refusal is in OpenAI's form.
      maxRequestBodySize: Number.MAX_SAFE_INTEGER,
      ...(tls && { tls: { cert: await Bun.file(tls.cert).text(), key: await Bun.file(tls.key).text() } }),
      // An engine may think for minutes before its first byte; a client that stops in its request is cut by Bun's own 10 s.
      fetch: (request, server) => front.handle(request, () => server.timeout(request, 0)),
    });
  } catch (error) {
    const remedy = `find what listens there: ss -ltnp 'sport = :${port}', or set listen.gateway`;
    throw new OperatorError("E_EXISTS", `cannot listen on ${config.listen.gateway}`, messageOf(error), remedy, { cause: error });
  }
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener("abort", () => resolve(), { once: true });
  });
}
