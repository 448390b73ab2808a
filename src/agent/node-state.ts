import { randomUUID } from "node:crypto";
import { mkdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import * as v from "valibot";
import { readIfThere, writeAtomic } from "../os/files.ts";
import { bootId } from "../os/process.ts";
import type { SessionKey } from "../protocol/agent-api.ts";
import { comparePlanVersions, PlanVersion } from "../protocol/plan.ts";

/** What an agent remembers across its restarts, in `<state>/agent/`. */
export class NodeState {
  readonly #seen_file: string;
  #seen: PlanVersion;
  readonly session_key: SessionKey;

  private constructor(seen_file: string, seen: PlanVersion, session_key: SessionKey) {
    this.#seen_file = seen_file;
    this.#seen = seen;
    this.session_key = session_key;
  }

  static async open(state: string): Promise<NodeState> {
    const folder = join(state, "agent");
    await mkdir(folder, { recursive: true, mode: 0o700 });
    const seen_file = join(folder, "seen.json");
    const seen = v.safeParse(v.pipe(v.string(), v.parseJson(), PlanVersion), await readIfThere(seen_file));
    const session_key = { machine_id: await machineId(folder), boot_id: await bootId(), agent_start_id: randomUUID() };
    return new NodeState(seen_file, seen.success ? seen.output : { epoch: 0, generation: 0 }, session_key);
  }

  /** The newest plan this node was ever given. */
  get seen(): PlanVersion {
    return this.#seen;
  }

  /** Remembers a plan before anything is done for it. @returns false for one that is older than what was seen */
  async accept(version: PlanVersion): Promise<boolean> {
    const order = comparePlanVersions(version, this.#seen);
    if (order < 0) return false;
    if (order > 0) await writeAtomic(this.#seen_file, JSON.stringify(version));
    this.#seen = version;
    return true;
  }
}

/**
 * Names this machine and this state folder: several nodes can share a machine (each has its own folder), and a folder
 * that was copied to another machine is not the same node there.
 */
async function machineId(folder: string): Promise<string> {
  const file = join(folder, "id");
  let own = (await readIfThere(file))?.trim();
  if (!own) {
    own = randomUUID();
    await writeAtomic(file, `${own}\n`);
  }
  const machine = await readFile("/etc/machine-id", "utf8").catch(() => "none");
  return `${machine.trim()}/${own}`;
}
