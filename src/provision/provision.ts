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
import { PVE_ADDRESS_PROBE_MS, PVE_LOCK_TRIES_COUNT, PVE_TASK_FAULTS_COUNT, PVE_TASK_POLL_MS } from "../protocol/limits.ts";
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
import {
  AnswerLost,
  apiOver,
  forOperator,
  onOneLine,
  PveError,
  Stopped,
  TaskFailed,
  type PveParameters,
  type PveTransport,
} from "./pve.ts";
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
  /** Names this run in the machine's notes, so that it is known again. */
  readonly run: string;
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
  const { settings, report, dry_run } = options;
  const run = new Run(options);
  const note = cpuNote(settings.cpu);
  if (note !== null) report.note(`warning: ${note}`);
  const { place, image } = await run.step(
    "checks",
    () => run.look(),
    ({ place: { node, disks, bridge, gateway } }) =>
      `${node}, ${disks}, ${bridge}, ${gateway === null ? "no gateway" : `gateway ${gateway}`}; VMID, name and address are free`,
  );
  const parameters = createParameters(settings, place, options.keys, options.run);
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

/** A VMID that this run may have claimed. */
interface Claim {
  readonly node: string;
  /** Whether Proxmox said that it is ours. */
  readonly is_sure: boolean;
}

class Run {
  readonly #options: ProvisionOptions;
  readonly #api: Proxmox.Api;
  /** Ends the questions: somebody asked to stop, or the time is up. */
  readonly #over: AbortSignal;
  #claim: Claim | null = null;

  constructor(options: ProvisionOptions) {
    this.#options = options;
    this.#over = AbortSignal.any([options.signal, AbortSignal.timeout(options.timeout_ms)]);
    this.#api = apiOver(options.transport, this.#over);
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
      const known = forOperator(error instanceof Stopped ? this.#whyStopped() : error, `cannot make ${settings.name} (${name})`);
      throw this.#claim === null ? known : this.#halfMade(known, this.#claim);
    }
  }

  /** What this run made and did not finish stays: it is for a person to say that it goes. */
  #halfMade({ code, message, why }: OperatorError, { node, is_sure }: Claim): OperatorError {
    const { settings, transport, run } = this.#options;
    const { vmid } = settings;
    const where = transport.local_node === node ? "" : ` on ${node}`;
    if (is_sure)
      return new OperatorError(
        code,
        message,
        `${why}; VM ${vmid} was made by this run and is left as it is`,
        `qm destroy ${vmid} --purge${where} removes it; then try again`,
      );
    return new OperatorError(
      code,
      message,
      `${why}; VM ${vmid} may be there: when this run made it, its notes say "run ${run}"`,
      `look at VM ${vmid}${where} before trying again`,
    );
  }

  #stillWanted(): void {
    if (this.#over.aborted) throw this.#whyStopped();
  }

  #whyStopped(): OperatorError {
    const { signal, timeout_ms } = this.#options;
    if (signal.aborted) return new OperatorError("E_INTERRUPTED", "interrupted", "it was asked to stop", "run it again");
    return new OperatorError("E_TIMEOUT", "it takes too long", `${timeout_ms / 1_000} s are over`, "allow more with --timeout");
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
      this.#stillWanted();
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
  async create({ node }: Place, parameters: PveParameters): Promise<void> {
    const { vmid } = this.#options.settings;
    type Create = NonNullable<Parameters<ReturnType<Proxmox.Api["nodes"]["$"]>["qemu"]["$post"]>[0]>;
    let upid: unknown = null;
    let lost: AnswerLost | null = null;
    try {
      upid = await this.#api.nodes.$(node).qemu.$post({ ...parameters } as unknown as Create);
      if (!isTask(upid)) lost = new AnswerLost("it names no task");
    } catch (error) {
      if (error instanceof PveError && error.is_taken) throw vmidTaken(vmid, SOMETHING);
      if (!(error instanceof AnswerLost)) throw error;
      lost = error;
    }
    this.#claim = { node, is_sure: lost === null };
    if (lost !== null) upid = await this.#lostCreate(node);
    try {
      await this.#task(node, upid, `create VM ${vmid}`);
    } catch (error) {
      // Proxmox takes back what a failed creation had made.
      if (error instanceof TaskFailed && (await this.#isOurs(node)) !== true) this.#claim = null;
      throw error;
    }
    if (lost !== null) await this.#proveOurs(node, lost);
  }

  /**
   * Another may have been given the VMID while our call was lost: only a machine with our notes is ours.
   * @throws OperatorError E_EXISTS; `lost` when nobody can tell
   */
  async #proveOurs(node: string, lost: AnswerLost): Promise<void> {
    const ours = await this.#isOurs(node);
    if (ours === null) throw lost;
    this.#claim = ours ? { node, is_sure: true } : null;
    if (!ours) throw vmidTaken(this.#options.settings.vmid, SOMETHING);
  }

  /** Whether the machine is the one this run made; null when that cannot be seen. */
  async #isOurs(node: string): Promise<boolean | null> {
    const { settings, run } = this.#options;
    const machine = this.#api.nodes.$(node).qemu.$(settings.vmid);
    const config: unknown = await machine.config.$get().catch((error: unknown) => {
      if (error instanceof PveError) return null;
      throw error;
    });
    const read = v.safeParse(v.looseObject({ description: v.optional(v.string(), "") }), config);
    return read.success ? read.output.description.includes(run) : null;
  }

  /** The newest task that made a machine of this VMID; null when there is none. Ours, or another's. */
  async #lostCreate(node: string): Promise<string | null> {
    const { vmid } = this.#options.settings;
    const Task = v.looseObject({ upid: v.string(), starttime: v.optional(v.number(), 0) });
    // Without `all` only tasks that ended are listed.
    const asked = { vmid, typefilter: "qmcreate", source: "all" } as const;
    const found: unknown = await this.#api.nodes.$(node).tasks.$get(asked);
    const newest = rows(Task, found).sort((a, b) => b.starttime - a.starttime)[0];
    return newest?.upid ?? null;
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

  /** Follows a task to its end. @throws TaskFailed with what its log says */
  async #task(node: string, upid: unknown, doing: string): Promise<void> {
    // Some calls have done all when they answer.
    if (!isTask(upid)) return;
    for (let faults = 0; ;) {
      const state = await this.#stateOf(node, upid).catch((error: unknown) => {
        faults += 1;
        if (!isPassing(error) || faults > PVE_TASK_FAULTS_COUNT) throw error;
        return null;
      });
      if (state !== null) faults = 0;
      if (state?.status === "stopped") {
        const { exitstatus } = state;
        if (exitstatus === "OK") return;
        const log = await this.#log(node, upid);
        if (/^WARNINGS: \d+$/.test(exitstatus)) return this.#options.report.note(`warning: to ${doing} ended with ${exitstatus}: ${log}`);
        throw new TaskFailed(0, `to ${doing} ended with: ${onOneLine(exitstatus)}${log === "" ? "" : ` (${log})`}`, upid);
      }
      await sleep(PVE_TASK_POLL_MS);
      this.#stillWanted();
    }
  }

  async #stateOf(node: string, upid: string): Promise<{ status: string; exitstatus: string }> {
    const State = v.looseObject({ status: v.string(), exitstatus: v.optional(v.string(), "no word") });
    const read = v.safeParse(State, await this.#api.nodes.$(node).tasks.$(upid).status.$get());
    if (read.success) return read.output;
    throw new PveError(500, `Proxmox does not say how the task ${upid} is`, upid);
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
      .map(onOneLine)
      .join("; ");
  }
}

/** Proxmox says no more than this to a token that may not see the other one. */
const SOMETHING = "Proxmox has a machine or container of that number";

/** Those of a list that are understood. @throws PveError when it is no list: nothing could then be said to be free */
function rows<S extends v.GenericSchema>(schema: S, list: unknown): v.InferOutput<S>[] {
  if (!Array.isArray(list)) throw new PveError(500, "Proxmox answers something else than a list", "");
  return list.flatMap((row) => {
    const read = v.safeParse(schema, row);
    return read.success ? [read.output] : [];
  });
}

const isTask = (answer: unknown): answer is string => typeof answer === "string" && answer.startsWith("UPID:");

/** Whether the same question may be answered a little later: Proxmox's proxy starts anew, or is busy. */
function isPassing(error: unknown): boolean {
  if (error instanceof PveError) return error.status === 0 || error.status >= 500;
  return error instanceof OperatorError && error.code === "E_UNREACHABLE";
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
