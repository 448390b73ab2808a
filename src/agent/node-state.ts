import { randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import * as v from "valibot";
import { makeFolderOnce, readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { bootId } from "../os/process.ts";
import type { SessionKey } from "../protocol/agent-api.ts";
import { messageOf } from "../protocol/errors.ts";
import { Count } from "../protocol/ids.ts";
import { comparePlanVersions, PlanVersion, Revocation } from "../protocol/plan.ts";

/** What the newest server said that has to be known also without one: the newest plan's version, and who is revoked. */
const Seen = v.object({ ...PlanVersion.entries, revocations: v.optional(v.array(Revocation), []), joins: v.optional(Count, 0) });
type Seen = v.InferOutput<typeof Seen>;

/** What an agent remembers across its restarts, in `<state>/agent/`. */
export class NodeState {
  readonly #file: string;
  readonly #log: Log;
  #seen: Seen;
  readonly session_key: SessionKey;

  private constructor(file: string, log: Log, seen: Seen, session_key: SessionKey) {
    this.#file = file;
    this.#log = log;
    this.#seen = seen;
    this.session_key = session_key;
  }

  /** @throws OperatorError E_FILE when the state folder cannot be used */
  static async open(state: string, log: Log): Promise<NodeState> {
    const folder = join(state, "agent");
    await makeFolderOnce(folder, 0o700);
    const file = join(folder, "seen.json");
    const text = await readIfThere(file);
    const seen = v.safeParse(v.pipe(v.string(), v.parseJson(), Seen), text);
    if (text !== null && !seen.success) log.warn("cannot read what was seen last; taking any plan", { file });
    const session_key = { machine_id: await machineId(folder), boot_id: await bootId(), agent_start_id: randomUUID() };
    return new NodeState(file, log, seen.success ? seen.output : { epoch: 0, generation: 0, revocations: [], joins: 0 }, session_key);
  }

  /** The version of the newest plan this node was ever given. */
  get seen(): PlanVersion {
    const { epoch, generation } = this.#seen;
    return { epoch, generation };
  }

  get revocations(): readonly Revocation[] {
    return this.#seen.revocations;
  }

  /** Remembers a plan before anything is done for it. @returns false for one that is older than what was seen */
  async accept({ epoch, generation }: PlanVersion): Promise<boolean> {
    const order = comparePlanVersions({ epoch, generation }, this.#seen);
    if (order > 0) await this.#keep({ ...this.#seen, epoch, generation });
    return order >= 0;
  }

  /** The number of the next join. */
  async nextJoin(): Promise<number> {
    await this.#keep({ ...this.#seen, joins: this.#seen.joins + 1 });
    return this.#seen.joins;
  }

  /** @returns false when nothing is new */
  async revoke(revocations: readonly Revocation[]): Promise<boolean> {
    if (JSON.stringify(revocations) === JSON.stringify(this.#seen.revocations)) return false;
    await this.#keep({ ...this.#seen, revocations: [...revocations] });
    return true;
  }

  /** On a full disk the node goes on, and stops what it is told to stop: that may be what makes room. */
  async #keep(seen: Seen): Promise<void> {
    this.#seen = seen;
    try {
      await writeAtomic(this.#file, JSON.stringify(seen), 0o600);
    } catch (error) {
      this.#log.error("cannot remember the plan's version", { why: messageOf(error), file: this.#file });
    }
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
