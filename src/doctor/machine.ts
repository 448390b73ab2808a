import { access, readdir, readFile, stat, statfs } from "node:fs/promises";
import { join } from "node:path";
import { assignFabrics } from "../hardware/fabric-declaration.ts";
import type { FabricDeclaration } from "../hardware/fabric-declaration.ts";
import { askTier, findNvidiaSmi, gpuNumaNodes, nvidiaOnPci, readGpus } from "../hardware/gpus.ts";
import type { Graphics } from "../hardware/gpus.ts";
import { parseMeminfo } from "../hardware/cpu.ts";
import { portName, readIbPorts } from "../hardware/infiniband.ts";
import type { IbPort } from "../hardware/infiniband.ts";
import { parseTier } from "../hardware/nvidia-smi.ts";
import type { Row, Tier } from "../hardware/nvidia-smi.ts";
import { askManagers } from "../hardware/subnet-managers.ts";
import type { ManagerAnswer } from "../hardware/subnet-managers.ts";
import { runTool } from "../hardware/tool.ts";
import type { RunTool } from "../hardware/tool.ts";
import { messageOf } from "../protocol/errors.ts";
import { MANAGER_RETRY_MS, MANAGER_WAIT_MS } from "../protocol/limits.ts";

/** What doctor is asked to look at. */
export interface DoctorOptions {
  readonly nvidia_smi?: string;
  readonly ib_root: string;
  readonly fabrics: readonly FabricDeclaration[];
  /** `https://host:port`; null = not given. */
  readonly server: string | null;
  readonly state: string;
  readonly tls: { readonly ca: string; readonly cert: string; readonly key: string };
  readonly node: string;
  /** What it waits for, for people. */
  readonly note: (text: string) => void;
  /** Stands for `/` in tests. */
  readonly root?: string;
  readonly run?: RunTool;
  readonly is_root?: boolean;
  /** How long a silent subnet manager is asked again; a failover takes up to a minute. */
  readonly manager_wait_ms?: number;
}

/** What nvidia-smi says, all of it. */
export interface Smi {
  readonly path: string | null;
  readonly graphics: Graphics;
  readonly took_ms: number;
  /** Rows of one tier by GPU index; empty when the tier is not answered. */
  readonly rows: Readonly<Record<Tier, ReadonlyMap<number, Row>>>;
}

/** Declared ports, or why the declaration cannot be. */
type Assigned =
  { readonly of: ReadonlyMap<string, string>; readonly ports: readonly IbPort[] } | { readonly wrong: string; readonly remedy: string };

/** The machine under examination. Costly facts are read once, when the first check asks. */
export class Machine {
  readonly options: DoctorOptions;
  readonly root: string;
  readonly run: RunTool;
  readonly is_root: boolean;
  readonly #once = new Map<string, Promise<unknown>>();

  constructor(options: DoctorOptions) {
    this.options = options;
    this.root = options.root ?? "/";
    this.run = options.run ?? runTool;
    this.is_root = options.is_root ?? process.getuid?.() === 0;
  }

  /** A file's text without its end, or null when it cannot be read. */
  text(path: string): Promise<string | null> {
    return readFile(join(this.root, path), "utf8").then(
      (text) => text.trim(),
      () => null,
    );
  }

  list(path: string): Promise<string[]> {
    return readdir(join(this.root, path)).catch(() => []);
  }

  exists(path: string): Promise<boolean> {
    return stat(join(this.root, path)).then(
      () => true,
      () => false,
    );
  }

  /** Whether this user may read and write a file. */
  usable(path: string): Promise<boolean> {
    return access(join(this.root, path), 6).then(
      () => true,
      () => false,
    );
  }

  /** Bytes of the file system a folder is on, or null. */
  space(path: string): Promise<{ total: number; free: number } | null> {
    return statfs(join(this.root, path)).then(
      (found) => ({ total: found.blocks * found.bsize, free: found.bavail * found.bsize }),
      () => null,
    );
  }

  gpusOnPci(): Promise<string[]> {
    return this.#keep("pci", () => nvidiaOnPci(this.root));
  }

  smi(): Promise<Smi> {
    return this.#keep("smi", async () => {
      const { nvidia_smi } = this.options;
      const path = await findNvidiaSmi(nvidia_smi);
      const system = parseMeminfo((await this.text("proc/meminfo")) ?? "");
      const start = performance.now();
      const graphics = await readGpus({ nvidia_smi, system, root: this.root, run: this.run });
      const took_ms = performance.now() - start;
      const rows: Record<Tier, ReadonlyMap<number, Row>> = { base: new Map(), more: new Map(), health: new Map(), fabric: new Map() };
      const stuck = graphics.gpus.length + graphics.unusable.length === 0;
      for (const tier of path === null || stuck ? [] : (["base", "more", "health", "fabric"] as const)) {
        const answer = await askTier(path ?? "", tier, this.run);
        if ("code" in answer) rows[tier] = parseTier(tier, answer.out).rows;
      }
      return { path, graphics, took_ms, rows };
    });
  }

  ports(): Promise<IbPort[]> {
    return this.#keep("ports", () => readIbPorts(this.options.ib_root));
  }

  /** Which port is declared on which fabric. */
  assigned(): Promise<Assigned> {
    return this.#keep("assigned", async () => {
      const ports = await this.ports();
      try {
        const of = assignFabrics(this.options.fabrics, ports, await gpuNumaNodes());
        return { of, ports: ports.filter((port) => of.has(portName(port))) };
      } catch (error) {
        const { why = "", remedy = "" } = error as { why?: string; remedy?: string };
        return { wrong: [messageOf(error), why].filter(Boolean).join(": "), remedy };
      }
    });
  }

  /** The ports that matter: those declared, else all that could carry a fabric. */
  async watched(): Promise<readonly IbPort[]> {
    const assigned = await this.assigned();
    if ("ports" in assigned && this.options.fabrics.length > 0) return assigned.ports;
    return (await this.ports()).filter((port) => port.excluded === "");
  }

  /** The subnet managers of every watched port; a silent one is asked again for as long as a failover may take. */
  managers(): Promise<ReadonlyMap<string, ManagerAnswer>> {
    return this.#keep("managers", async () => {
      const ports = await this.watched();
      const answers = await Promise.all(ports.map((port) => this.#askPatiently(port)));
      return new Map(ports.map((port, at) => [portName(port), answers[at] as ManagerAnswer]));
    });
  }

  async #askPatiently(port: IbPort): Promise<ManagerAnswer> {
    const end = performance.now() + (this.options.manager_wait_ms ?? MANAGER_WAIT_MS);
    let told = false;
    for (;;) {
      const answer = await askManagers(port.device, port.port, this.run);
      // Only a port that was set up by a manager before has one that may be in the middle of a failover.
      const waits = "unknown" in answer && answer.unknown === "no answer" && port.state === "ACTIVE";
      if (!waits || performance.now() > end) return answer;
      if (!told)
        this.options.note(`${portName(port)}: its subnet manager does not answer; asking for a minute, because a failover takes that long`);
      told = true;
      await Bun.sleep(Math.min(MANAGER_RETRY_MS, Math.max(0, end - performance.now()) + 1));
    }
  }

  #keep<T>(name: string, read: () => Promise<T>): Promise<T> {
    const kept = (this.#once.get(name) as Promise<T> | undefined) ?? read();
    this.#once.set(name, kept);
    return kept;
  }
}
