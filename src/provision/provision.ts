/**
 * provision/ makes a virtual machine on Proxmox that ssh reaches: it looks, refuses early, and creates in one call. It never
 * touches a machine that it did not make, and knows nothing of llmgw's own protocols; onboard/ makes a node of the machine.
 */
import { connect } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import type { Proxmox } from "proxmox-api";
import * as v from "valibot";
import { runProgram } from "../os/run-program.ts";
import { OperatorError } from "../protocol/errors.ts";
import { PVE_ADDRESS_PROBE_MS, PVE_LOCK_TRIES_COUNT, PVE_TASK_POLL_MS } from "../protocol/limits.ts";
import {
  chooseNetwork,
  chooseNode,
  chooseStorages,
  cpuNote,
  createParameters,
  imageOf,
  NetworkRow,
  NodeRow,
  refuseTaken,
  StorageRow,
  VmRow,
  vmidTaken,
  VolumeRow,
  type Image,
  type ImageFetch,
  type Place,
} from "./machine.ts";
import { AnswerLost, apiOver, forOperator, PveError, type PveParameters, type PveTransport } from "./pve.ts";
import type { Settings } from "./settings.ts";
import type { PublicKey } from "./ssh-keys.ts";

export interface ProvisionOptions {
  readonly settings: Settings;
  readonly transport: PveTransport;
  readonly keys: readonly PublicKey[];
  /** How long the whole may take, in ms. */
  readonly timeout_ms: number;
  /** Look, and say what would be called. */
  readonly dry_run: boolean;
  readonly report: ProvisionReporter;
  readonly signal: AbortSignal;
}

/** Is told how it goes. */
export interface ProvisionReporter {
  step(name: string, text: string, length_ms: number): void;
  note(text: string): void;
  /** A call as it would be made. */
  call(method: string, path: string, parameters: PveParameters): void;
}

/** A machine that was made; a dry run makes none. */
export interface Made {
  readonly vmid: number;
  readonly node: string;
}

/**
 * Makes the machine and starts it.
 * @throws OperatorError saying what is in the way; one that came after the VMID was claimed names the command that removes what is left
 */
export async function provision(options: ProvisionOptions): Promise<Made | null> {
  const { settings, transport, report, dry_run } = options;
  const run = new Run(options, apiOver(transport));
  const note = cpuNote(settings.cpu);
  if (note !== null) report.note(`warning: ${note}`);
  const { place, image } = await run.step(
    "checks",
    () => run.look(),
    ({ place: { node, disks, bridge, gateway } }) =>
      `${node}, ${disks}, ${bridge}, ${gateway === null ? "no gateway" : `gateway ${gateway}`}; VMID, name and address are free`,
  );
  const parameters = createParameters(settings, place, options.keys);
  if (dry_run) {
    if (image.fetch)
      report.call("POST", `/nodes/${place.node}/storage/${image.fetch.storage}/download-url`, run.fetchParameters(image.fetch));
    report.call("POST", `/nodes/${place.node}/qemu`, parameters);
    report.call("PUT", `/nodes/${place.node}/qemu/${settings.vmid}/resize`, { disk: "scsi0", size: `${settings.disk}G` });
    report.call("POST", `/nodes/${place.node}/qemu/${settings.vmid}/status/start`, {});
    return null;
  }
  const { fetch } = image;
  if (fetch)
    await run.step(
      "image",
      () => run.fetch(place.node, image.volid, fetch),
      () => `${image.volid}, fetched and checked`,
    );
  await run.step(
    "create",
    () => run.create(place, parameters),
    () => `VM ${settings.vmid} (${settings.name}), ${settings.cores} cores, ${settings.memory} MiB, ${settings.disk} GiB`,
  );
  await run.step(
    "start",
    () => run.start(place.node),
    () => `its address is ${settings.address}`,
  );
  return { vmid: settings.vmid, node: place.node };
}

type Seen = { readonly place: Place; readonly image: Image };

class Run {
  readonly #options: ProvisionOptions;
  readonly #api: Proxmox.Api;
  readonly #end_ms: number;
  /** Where the machine is that this run made, once it has claimed the VMID. */
  #made: string | null = null;

  constructor(options: ProvisionOptions, api: Proxmox.Api) {
    this.#options = options;
    this.#api = api;
    this.#end_ms = performance.now() + options.timeout_ms;
  }

  async step<T>(name: string, work: () => Promise<T>, tell: (result: T) => string): Promise<T> {
    const { report, settings } = this.#options;
    const began_ms = performance.now();
    try {
      this.#stillWanted();
      const result = await work();
      report.step(name, tell(result), performance.now() - began_ms);
      return result;
    } catch (error) {
      const known = forOperator(error, `cannot make ${settings.name} (${name})`);
      throw this.#made === null ? known : this.#halfMade(known, this.#made);
    }
  }

  /** What this run made and did not finish stays: it is for a person to say that it goes. */
  #halfMade({ code, message, why }: OperatorError, node: string): OperatorError {
    const { vmid } = this.#options.settings;
    const { local_node } = this.#options.transport;
    const where = local_node === node ? "" : ` on ${node}`;
    return new OperatorError(
      code,
      message,
      `${why}; VM ${vmid} was made by this run and is left as it is`,
      `qm destroy ${vmid} --purge${where} removes it; then try again`,
    );
  }

  #stillWanted(): void {
    const { signal, timeout_ms } = this.#options;
    if (signal.aborted) throw new OperatorError("E_TIMEOUT", "interrupted", "it was asked to stop", "run it again");
    if (performance.now() > this.#end_ms)
      throw new OperatorError(
        "E_TIMEOUT",
        "it takes too long",
        `${Math.round(timeout_ms / 1_000)} s are over`,
        "allow more with --timeout",
      );
  }

  /** Everything that can be known before anything is made. */
  async look(): Promise<Seen> {
    const { settings, transport } = this.#options;
    const api = this.#api;
    const node = chooseNode(rows(NodeRow, await api.nodes.$get()), settings.pve_node, transport.local_node);
    await this.#refuseVmid();
    const machines = rows(VmRow, await api.cluster.resources.$get({ type: "vm" }));
    refuseTaken(machines, settings);
    await Promise.all([this.#refuseConfigured(machines), refuseAnswering(settings.address)]);
    const at = api.nodes.$(node);
    const { disks, images } = chooseStorages(rows(StorageRow, await at.storage.$get({ enabled: true })), settings);
    const { bridge, gateway } = chooseNetwork(rows(NetworkRow, await at.network.$get()), settings);
    const volumes = rows(VolumeRow, await at.storage.$(images).content.$get({ content: "import" })).map(({ volid }) => volid);
    const image = imageOf(settings.image, images, volumes);
    return { place: { node, disks, bridge, gateway, volid: image.volid }, image };
  }

  /** Proxmox itself knows every machine and container of the cluster; a token may not see them all. */
  async #refuseVmid(): Promise<void> {
    const { vmid } = this.#options.settings;
    try {
      await this.#api.cluster.nextid.$get({ vmid });
    } catch (error) {
      if (!(error instanceof PveError) || !error.is_taken) throw error;
      throw vmidTaken(vmid, SOMETHING);
    }
  }

  /** Another machine may have the address and be off. What a token may not read is passed over. */
  async #refuseConfigured(machines: readonly VmRow[]): Promise<void> {
    const { address } = this.#options.settings;
    for (const { vmid, node, name, type } of machines) {
      if (vmid === undefined || node === undefined || type === "lxc") continue;
      const config: unknown = await this.#api.nodes
        .$(node)
        .qemu.$(Number(vmid))
        .config.$get()
        .catch(() => ({}));
      const own = Object.entries(config as Record<string, unknown>).filter(([key]) => /^ipconfig\d+$/.test(key));
      if (own.some(([, text]) => typeof text === "string" && new RegExp(`(^|,)ip=${address.replaceAll(".", "\\.")}(/|,|$)`).test(text)))
        throw new OperatorError(
          "E_EXISTS",
          `${address} is taken`,
          `VM ${vmid} (${name ?? "without a name"}) has it`,
          "take another address",
        );
    }
  }

  fetchParameters({ url, file }: ImageFetch): PveParameters {
    const [algorithm, checksum] = (this.#options.settings.image_checksum ?? "").split(":");
    return { content: "import", filename: file, url, ...(checksum !== undefined && { checksum, "checksum-algorithm": algorithm }) };
  }

  async fetch(node: string, volid: string, what: ImageFetch): Promise<void> {
    const { report, settings } = this.#options;
    if (settings.image_checksum === undefined)
      report.note(`warning: ${what.url} is fetched without a checksum; name one with --image-checksum`);
    report.note(`fetching ${what.url} to ${volid}, once for all machines to come`);
    // Newer than the library's model of the API.
    const parameters = this.fetchParameters(what) as unknown as never;
    const upid: unknown = await this.#api.nodes.$(node).storage.$(what.storage)["download-url"].$post(parameters);
    await this.#task(node, upid, "fetch the image");
  }

  /** The guard against a race: Proxmox gives a VMID to one caller only. */
  async create(place: Place, parameters: PveParameters): Promise<void> {
    const { node } = place;
    const { vmid } = this.#options.settings;
    type Create = NonNullable<Parameters<ReturnType<Proxmox.Api["nodes"]["$"]>["qemu"]["$post"]>[0]>;
    let upid: unknown;
    try {
      upid = await this.#api.nodes.$(node).qemu.$post({ ...parameters } as unknown as Create);
    } catch (error) {
      if (error instanceof PveError && error.is_taken) throw vmidTaken(vmid, SOMETHING);
      if (!(error instanceof AnswerLost)) throw error;
      upid = await this.#lostCreate(node);
      if (upid === null) throw error;
    }
    this.#made = node;
    try {
      await this.#task(node, upid, `create VM ${vmid}`);
    } catch (error) {
      // Proxmox takes back what a failed creation had made.
      if (error instanceof PveError) this.#made = null;
      throw error;
    }
  }

  /** The task that our unanswered call began, by its VMID; null when it began none. */
  async #lostCreate(node: string): Promise<unknown> {
    const { vmid } = this.#options.settings;
    const Task = v.looseObject({ upid: v.string(), starttime: v.optional(v.number()) });
    const since_s = Date.now() / 1_000 - 300;
    const found: unknown = await this.#api.nodes
      .$(node)
      .tasks.$get({ vmid, typefilter: "qmcreate" })
      .catch(() => []);
    return rows(Task, found).find(({ starttime = Infinity }) => starttime >= since_s)?.upid ?? null;
  }

  async start(node: string): Promise<void> {
    const { vmid, disk } = this.#options.settings;
    const machine = this.#api.nodes.$(node).qemu.$(vmid);
    await this.#unlocked(async () => this.#task(node, await machine.resize.$put({ disk: "scsi0", size: `${disk}G` }), "resize its disk"));
    await this.#unlocked(async () => this.#task(node, await machine.status.start.$post(), "start it"));
  }

  /** Another machine's creation may hold a lock for a while. */
  async #unlocked(work: () => Promise<void>): Promise<void> {
    for (let left = PVE_LOCK_TRIES_COUNT; ; left--) {
      try {
        return await work();
      } catch (error) {
        if (left === 0 || !(error instanceof PveError) || !error.is_locked) throw error;
        await sleep(2_000);
        this.#stillWanted();
      }
    }
  }

  /** Follows a task to its end. @throws PveError with what its log says */
  async #task(node: string, upid: unknown, doing: string): Promise<void> {
    // Some calls have done all when they answer.
    if (typeof upid !== "string" || !upid.startsWith("UPID:")) return;
    const task = this.#api.nodes.$(node).tasks.$(upid);
    const Status = v.looseObject({ status: v.string(), exitstatus: v.optional(v.string()) });
    for (;;) {
      const { status, exitstatus = "" } = v.parse(Status, await task.status.$get());
      if (status === "stopped") {
        if (exitstatus === "OK") return;
        const log = await this.#log(node, upid);
        if (/^WARNINGS: \d+$/.test(exitstatus)) return this.#options.report.note(`warning: to ${doing} ended with ${exitstatus}: ${log}`);
        throw new PveError(0, `to ${doing} ended with: ${exitstatus}${log === "" ? "" : ` (${log})`}`, upid);
      }
      await sleep(PVE_TASK_POLL_MS);
      this.#stillWanted();
    }
  }

  async #log(node: string, upid: string): Promise<string> {
    const Line = v.looseObject({ t: v.optional(v.string(), "") });
    const lines = rows(
      Line,
      await this.#api.nodes
        .$(node)
        .tasks.$(upid)
        .log.$get({ limit: 50 })
        .catch(() => []),
    );
    return lines
      .map(({ t }) => t.trim())
      .filter((line) => line !== "" && !line.startsWith("TASK "))
      .slice(-3)
      .join("; ");
  }
}

/** Proxmox says no more than this to a token that may not see the other one. */
const SOMETHING = "Proxmox has a machine or container of that number";

function rows<S extends v.GenericSchema>(schema: S, list: unknown): v.InferOutput<S>[] {
  return Array.isArray(list) ? list.flatMap((row) => (v.is(schema, row) ? [v.parse(schema, row)] : [])) : [];
}

/** Something that answers at the address is another machine. @throws OperatorError E_EXISTS */
async function refuseAnswering(address: string): Promise<void> {
  const [open, echoes] = await Promise.all([hasOpenSsh(address), answersPing(address)]);
  const how = open ? "its ssh port is open" : echoes ? "it answers ping" : null;
  if (how === null) return;
  const remedy = "take another address, or onboard that machine with --onboard-only";
  throw new OperatorError("E_EXISTS", `${address} is taken`, `something is there: ${how}`, remedy);
}

/** A refusal proves nothing: Bun says the same of a network that cannot be reached. */
function hasOpenSsh(address: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect({ host: address, port: 22 });
    const done = (open: boolean) => {
      clearTimeout(timer);
      socket.destroy();
      resolve(open);
    };
    const timer = setTimeout(() => done(false), PVE_ADDRESS_PROBE_MS);
    socket.once("connect", () => done(true));
    socket.once("error", () => done(false));
  });
}

async function answersPing(address: string): Promise<boolean> {
  if (Bun.which("ping") === null) return false;
  const bounds = { env: process.env, cwd: "/", within_ms: 3 * PVE_ADDRESS_PROBE_MS, max_bytes: 4_096 };
  const ran = await runProgram(["ping", "-c", "1", "-W", "1", address], bounds).catch(() => null);
  return ran?.code === 0;
}
