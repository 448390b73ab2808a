/**
 * server/ is the control plane: it keeps the truth in its store, lets core/ decide, and serves agents and admins on one
 * mutual TLS listener. It never serves users (the gateway process does) and never reaches into a node by itself.
 */
import { join, resolve } from "node:path";
import { catalogFaults } from "../core/spec.ts";
import type { Happening } from "../core/world.ts";
import { loadCatalog, loadServerConfig } from "../os/config-file.ts";
import { argFaultsOf } from "../engines/registry.ts";
import { makePrivateFolder } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { makeDialer } from "../pki/dial.ts";
import { loadIdentity, type Identity } from "../pki/identity.ts";
import { listenMutualTls, type PeerListener } from "../pki/listener.ts";
import { Trust, type Peer } from "../pki/trust.ts";
import type { Catalog } from "../protocol/catalog.ts";
import type { ServerConfig } from "../protocol/config.ts";
import { messageOf, OperatorError, explain } from "../protocol/errors.ts";
import { ROLES } from "../protocol/ids.ts";
import { checkExposure, GATEWAY_SOCKET, splitHostPort } from "../gateway/gateway.ts";
import { lastSnapshot } from "../gateway/snapshot.ts";
import { isRevoked } from "../protocol/plan.ts";
import { AdminApi } from "./admin-api.ts";
import { AgentApi } from "./agent-api.ts";
import { EngineReleases } from "./engine-releases.ts";
import { Fleet } from "./fleet.ts";
import { GatewayLink } from "./gateway-link.ts";
import { sendError } from "./http.ts";
import { Operations } from "./operations.ts";
import { Reconciler } from "./reconcile.ts";
import { snapshotOf } from "./snapshot.ts";
import { SourceHeads } from "./source-heads.ts";
import { Store, type KeyRow } from "./store.ts";

interface ServerOptions {
  readonly config_file: string;
  readonly config: ServerConfig;
  readonly log: Log;
  readonly signal: AbortSignal;
  readonly owner_pid: number | null;
}

/** Runs the control plane until its signal aborts. @throws OperatorError when it cannot start */
export async function runServer(options: ServerOptions): Promise<void> {
  checkExposure(options.config);
  const identity = await serverIdentity(options.config.tls);
  const catalog = await readCatalog(options.config.catalog);
  const { state } = options.config;
  const store = await Store.open(state, Math.floor(Date.now() / 1_000), () => lastSnapshot(state, options.log));
  try {
    const server = new Server(options, identity, store, catalog, await store.version());
    await server.run();
  } finally {
    await store.close();
  }
}

/** @throws OperatorError E_IDENTITY when the certificate is not a server's */
async function serverIdentity(paths: ServerConfig["tls"]): Promise<Identity> {
  const identity = await loadIdentity(paths);
  if (identity.role === "server") return identity;
  const why = `it is the certificate of ${identity.role} ${identity.name}`;
  throw new OperatorError("E_IDENTITY", `${paths.cert} is not a server's certificate`, why, "issue one with llmgw ca issue-server");
}

/** @throws OperatorError E_CONFIG, with every fault of the catalog that its form does not show */
async function readCatalog(path: string): Promise<Catalog> {
  const catalog = await loadCatalog(path);
  const [fault, ...more] = [...catalogFaults(catalog.models), ...catalog.models.flatMap(argFaultsOf)];
  if (fault !== undefined)
    throw new OperatorError("E_CONFIG", `${path} cannot be served`, [fault, ...more].join("; "), `llmgw config check ${path}`);
  return catalog;
}

class Server {
  readonly #options: ServerOptions;
  readonly #log: Log;
  readonly #store: Store;
  readonly #fleet: Fleet;
  readonly #trust: Trust;
  readonly #gateway: GatewayLink;
  readonly #reconciler: Reconciler;
  readonly #agents: AgentApi;
  readonly #admins: AdminApi;
  readonly #dialer;
  readonly #heads: SourceHeads;
  readonly #releases: EngineReleases;
  #identity: Identity;
  #listener: PeerListener | null = null;
  #keys: KeyRow[] = [];
  #serials = new Map<string, string>();
  #config_fault: string | null = null;

  constructor(options: ServerOptions, identity: Identity, store: Store, catalog: Catalog, version: { epoch: number; generation: number }) {
    const { config, log, owner_pid } = options;
    this.#options = options;
    this.#log = log.with({ component: "server" });
    this.#store = store;
    this.#identity = identity;
    this.#trust = new Trust(identity.ca);
    this.#fleet = new Fleet(version, Date.now());
    this.#heads = new SourceHeads(this.#log, () => this.#reconciler.poke());
    this.#fleet.heads = this.#heads.shapes;
    this.#fleet.measuring = this.#heads.measuring;
    this.#releases = new EngineReleases({
      folder: join(config.state, "engines"),
      log: this.#log,
      signal: options.signal,
      changed: () => this.#fleet.notify(),
    });
    this.#fleet.engines = () => this.#releases.wanted;
    this.#setCatalog(catalog);
    this.#dialer = makeDialer(identity, { revocations: () => this.#fleet.revocations });
    this.#gateway = new GatewayLink({
      socket: join(config.run, GATEWAY_SOCKET),
      config_file: config.gateway.process === "child" ? resolve(options.config_file) : null,
      owner_pid,
      log: this.#log,
      content: () => snapshotOf(this.#fleet, this.#keys, config.gateway.auth, Date.now()),
    });
    const shared = { fleet: this.#fleet, store, log: this.#log, now: Date.now, say: (event: Happening) => this.#say(event) };
    const counts = () => ({ in_flight: this.#gateway.in_flight(), unreachable: this.#gateway.unreachable() });
    this.#reconciler = new Reconciler({
      ...shared,
      counts,
      decided: () => this.#gateway.poke(),
    });
    this.#agents = new AgentApi({ ...shared, observed: () => this.#reconciler.poke() });
    const operations = new Operations({
      ...shared,
      counts,
      revoke: (name) => this.#revoke(name),
      poke: () => this.#reconciler.poke(),
      catalog: async () => (await readCatalog((await loadServerConfig(options.config_file)).catalog)).models,
    });
    this.#admins = new AdminApi({
      ...shared,
      operations,
      dialer: this.#dialer,
      gateway: () => ({ status: this.#gateway.status, trouble: this.#gateway.trouble, address: config.listen.gateway }),
      in_flight: () => this.#gateway.in_flight(),
      config_fault: () => this.#config_fault,
      keys: () => this.#keys,
      keysChanged: () => this.#readKeys(),
      reload: () => this.#reload(),
      revoke: (name) => this.#revoke(name),
    });
  }

  async run(): Promise<void> {
    const { config, signal, owner_pid } = this.#options;
    await makePrivateFolder(config.run);
    await this.#remember();
    const { hostname, port } = splitHostPort(config.listen.control);
    this.#listener = await listenMutualTls({
      host: hostname,
      port,
      identity: this.#identity,
      trust: this.#trust,
      roles: ROLES.filter((role) => role === "node" || role === "admin" || role === "viewer"),
      log: this.#log,
      now: Date.now,
      handle: (request, response, peer) => this.#handle(request, response, peer),
    });
    const reload = () => void this.#reload().catch(() => {});
    process.on("SIGHUP", reload);
    this.#log.info("server started", {
      control: config.listen.control,
      gateway: config.listen.gateway,
      models: this.#fleet.models.length,
      epoch: this.#fleet.version.epoch,
    });
    this.#releases.follow(config.engines);
    await Promise.all([this.#reconciler.run(signal), this.#gateway.run(signal)]);
    process.off("SIGHUP", reload);
    this.#heads.stop();
    this.#log.info("server is ending; gateway and engines go on");
    if (owner_pid !== null) this.#gateway.end();
    await this.#listener.close();
  }

  /** What the store knows comes back: nothing has to be told again. */
  async #remember(): Promise<void> {
    const [replicas, nodes, revocations, serials] = await Promise.all([
      this.#store.replicas(),
      this.#store.nodes(),
      this.#store.revocations(),
      this.#store.newestSerials(),
    ]);
    this.#fleet.replicas = replicas;
    for (const kept of nodes) this.#fleet.nodes.set(kept.id, { kept, session: null, ranks: null });
    this.#fleet.revocations = revocations;
    this.#trust.setRevocations(revocations);
    this.#serials = serials;
    for (const [holder, serial] of serials) {
      const role = ROLES.find((candidate) => holder.startsWith(`${candidate}/`));
      if (role) this.#trust.setNewest(role, holder.slice(role.length + 1), serial);
    }
    this.#keys = await this.#store.keys();
    this.#fleet.intents = await this.#store.intents();
    await this.#dropScales();
  }

  /** A number wanted of a model ends with the model: one that comes back later is as the catalog says. */
  async #dropScales(): Promise<void> {
    const names = new Set(this.#fleet.catalog.map(({ name }) => name));
    for (const model of (await this.#store.scales()).keys()) if (!names.has(model)) await this.#store.saveScale(model, null);
    this.#fleet.scales = await this.#store.scales();
  }

  async #handle(...[request, response, peer]: Parameters<AgentApi["handle"]>): Promise<void> {
    try {
      await this.#noteSerial(peer);
      const isAgent = request.url?.startsWith("/agent/") ?? false;
      if (isAgent !== (peer.role === "node")) {
        this.#log.warn("refused a request that the role may not make", {
          certificate: peer.name,
          role: peer.role,
          path: request.url?.split("?")[0],
          address: peer.address,
        });
        const why = `its certificate is that of a ${peer.role}`;
        throw new OperatorError(
          "E_NOT_ALLOWED",
          `${peer.name} may not use this API`,
          why,
          "agents use node certificates, people use admin or viewer certificates",
        );
      }
      await (isAgent ? this.#agents : this.#admins).handle(request, response, peer);
    } catch (error) {
      if (!(error instanceof OperatorError))
        this.#log.error("a request failed", { path: request.url?.split("?")[0], why: messageOf(error) });
      sendError(response, error);
    }
  }

  /** Once a newer certificate of a name has connected, older ones stay refused, also after a restart. */
  async #noteSerial({ role, name, serial }: Peer): Promise<void> {
    const holder = `${role}/${name}`;
    if ((this.#serials.get(holder) ?? "") >= serial) return;
    this.#serials.set(holder, serial);
    await this.#store.saveNewestSerial(holder, serial);
  }

  async #readKeys(): Promise<void> {
    this.#keys = await this.#store.keys();
    this.#gateway.poke();
  }

  async #revoke(name: string): Promise<void> {
    const revocation = { name, until_ms: Date.now() };
    await this.#store.revoke(revocation);
    this.#fleet.revocations = await this.#store.revocations();
    this.#trust.setRevocations(this.#fleet.revocations);
    this.#listener?.dropPeers((peer) => isRevoked([revocation], peer));
    this.#log.warn("revoked the certificates of a name", { name });
    this.#fleet.notify();
    this.#gateway.poke();
  }

  #setCatalog({ models }: Catalog): void {
    this.#fleet.setCatalog(models);
    this.#heads.follow(models);
  }

  /** Reads configuration, catalog and certificates again; whatever is wrong leaves all as it was. */
  async #reload(): Promise<string[]> {
    const { config_file, config } = this.#options;
    try {
      const next = await loadServerConfig(config_file);
      checkExposure(next);
      const catalog = await readCatalog(next.catalog);
      const identity = await serverIdentity(next.tls);
      const { catalog: _path, engines, ...rest } = next;
      const changed: string[] = [];
      if (JSON.stringify(catalog.models) !== JSON.stringify(this.#fleet.catalog)) changed.push("catalog");
      if (this.#releases.follow(engines)) changed.push("engines");
      if (identity.serial !== this.#identity.serial) changed.push("certificate");
      const { catalog: _old, engines: _engines, ...old } = config;
      if (JSON.stringify(rest) !== JSON.stringify(old)) changed.push("server.yaml (counts after a restart)");
      this.#setCatalog(catalog);
      await this.#dropScales();
      this.#identity = identity;
      this.#listener?.setIdentity(identity);
      this.#dialer.setIdentity(identity);
      this.#config_fault = null;
      this.#log.info("reloaded", { changed: changed.join(", ") || "nothing" });
      if (changed.length > 0) await this.#say({ level: "info", kind: "reloaded", subject: "server", text: changed.join(", ") });
      this.#reconciler.poke();
      return changed;
    } catch (error) {
      this.#config_fault = explain(error);
      this.#log.error("kept the old configuration", { why: this.#config_fault });
      throw error;
    }
  }

  async #say(event: Happening): Promise<void> {
    await this.#store.addEvent(event, Date.now());
  }
}
