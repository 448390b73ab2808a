import { foldAnswer, isDisjoint, UNSEEN } from "../core/fabrics.ts";
import type { Seen } from "../core/fabrics.ts";
import type { FabricPort } from "../protocol/inventory.ts";
import { assignFabrics } from "./fabric-declaration.ts";
import type { FabricDeclaration, FabricOfPort } from "./fabric-declaration.ts";
import { portName, readIbPorts, REAL_IB_ROOT } from "./infiniband.ts";
import type { IbPort } from "./infiniband.ts";
import { askManagers, askSwitches } from "./subnet-managers.ts";
import { runTool } from "./tool.ts";
import type { RunTool } from "./tool.ts";

interface FabricWatchOptions {
  readonly ib_root?: string;
  readonly fabrics: readonly FabricDeclaration[];
  /** NUMA nodes with GPUs: adapters near them are chosen first. */
  readonly gpu_numa?: readonly number[];
  readonly run?: RunTool;
  readonly now?: () => number;
}

/** Follows a node's InfiniBand ports: which there are, on which fabric they are declared, and which subnet managers each last saw. */
export class FabricWatch {
  readonly #options: FabricWatchOptions;
  readonly #run: RunTool;
  readonly #now: () => number;
  readonly #seen = new Map<string, { guid: string | null; seen: Seen }>();
  #of: FabricOfPort = new Map();
  #usable = "";
  #ports: readonly IbPort[] = [];
  #looking: Promise<FabricPort[]> | null = null;

  private constructor(options: FabricWatchOptions) {
    this.#options = options;
    this.#run = options.run ?? runTool;
    this.#now = options.now ?? Date.now;
  }

  /**
   * Reads the ports and gives them to the declared fabrics; asks nobody yet.
   * @throws OperatorError E_CONFIG: an adapter under two fabrics, not here, or one that cannot carry a fabric
   */
  static async open(options: FabricWatchOptions): Promise<FabricWatch> {
    const watch = new FabricWatch(options);
    watch.#ports = await readIbPorts(options.ib_root ?? REAL_IB_ROOT);
    watch.#assign();
    return watch;
  }

  /** All ports as they were last seen. */
  ports(): FabricPort[] {
    return this.#ports.map((port) => {
      const { device, guid, excluded, state, rate_gbps, numa } = port;
      const { managers, switches, answered_ms, answering } = this.#seenOf(port);
      const fabric = this.#of.get(portName(port)) ?? "";
      const known = { managers: [...managers], switches: [...switches], answered_ms, answering };
      return { device, port: port.port, guid, fabric, excluded, state, rate_gbps, numa, ...known };
    });
  }

  /** Reads the ports again and asks the declared ones for their subnet managers. A look that is under way is shared. */
  look(): Promise<FabricPort[]> {
    this.#looking ??= this.#look().finally(() => {
      this.#looking = null;
    });
    return this.#looking;
  }

  async #look(): Promise<FabricPort[]> {
    this.#ports = await readIbPorts(this.#options.ib_root ?? REAL_IB_ROOT);
    try {
      this.#assign();
    } catch {
      // What was declared was here when the agent started; what is gone is seen from the ports that are left.
    }
    await Promise.all(this.#ports.filter((port) => this.#of.has(portName(port))).map((port) => this.#ask(port)));
    return this.ports();
  }

  /** Chooses anew only when other ports can be used than before, so that a choice stays. */
  #assign(): void {
    const usable = this.#ports.filter((port) => port.excluded === "").map((port) => `${portName(port)} ${port.guid}`);
    if (this.#usable === usable.join()) return;
    this.#of = assignFabrics(this.#options.fabrics, this.#ports, this.#options.gpu_numa);
    this.#usable = usable.join();
  }

  #seenOf(port: IbPort): Seen {
    const kept = this.#seen.get(portName(port));
    // Another GUID under the same name is another adapter.
    return kept && kept.guid === port.guid ? kept.seen : UNSEEN;
  }

  async #ask(port: IbPort): Promise<void> {
    const known = this.#seenOf(port);
    const answer = await askManagers(port.device, port.port, this.#run);
    const managers = "managers" in answer ? answer.managers.map((manager) => manager.guid).toSorted() : null;
    const changed = managers !== null && (isDisjoint(known, managers) || managers.join() !== known.managers.join());
    const switches = changed ? await askSwitches(port.device, port.port, this.#run) : null;
    this.#seen.set(portName(port), { guid: port.guid, seen: foldAnswer(known, { managers, switches }, this.#now()) });
  }
}
