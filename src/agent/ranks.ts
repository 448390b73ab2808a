import { existsSync } from "node:fs";
import { readdir, rm, stat } from "node:fs/promises";
import { join } from "node:path";
import * as v from "valibot";
import { makeFolderOnce, makePassableFolder, makePrivateFolder, readIfThere, writeAtomic } from "../os/files.ts";
import type { RankStatus } from "../protocol/agent-api.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { AttemptId } from "../protocol/ids.ts";
import { SOCKET_PATH_BYTES } from "../protocol/limits.ts";
import { RankLaunch } from "../protocol/plan.ts";
import { SPEC_FILE } from "../protocol/shim-api.ts";
import type { Action } from "./converge.ts";
import { foldersToDrop } from "./kept-folders.ts";
import type { EndedFolder } from "./kept-folders.ts";
import { Rank, socketsOf } from "./rank.ts";
import type { RankContext } from "./rank.ts";
import { ShimClient } from "./shim-client.ts";

/** All attempts of one node, running and lately ended. */
export class Ranks {
  readonly #context: RankContext;
  readonly #ranks = new Map<AttemptId, Rank>();
  /** Attempts an earlier agent took up but never came to start. */
  #unstarted: Rank[] = [];

  constructor(context: RankContext) {
    this.#context = context;
  }

  /**
   * Makes the folders and finds again what an earlier agent started: a healthy rank is followed on, never touched.
   * @throws OperatorError E_CONFIG when the run folder's path is too long, E_FILE
   */
  async open(): Promise<void> {
    const { ranks_folder, socket_folder, engine_user, log } = this.#context;
    const { control, engine } = socketsOf(socket_folder, "0".repeat(16));
    const longest = Math.max(Buffer.byteLength(control), Buffer.byteLength(engine));
    if (longest > SOCKET_PATH_BYTES) {
      const why = `socket paths in ${socket_folder} would have ${longest} bytes, ${SOCKET_PATH_BYTES} is the most`;
      throw new OperatorError("E_CONFIG", "the run folder's path is too long", why, "set a shorter `run` in agent.yaml");
    }
    await makeFolderOnce(ranks_folder, 0o711);
    // An engine of another user has to come through to its own folder in it.
    await (engine_user === null ? makePrivateFolder(socket_folder) : makePassableFolder(socket_folder));
    const attempts = (await readdir(ranks_folder)).filter((entry) => v.is(AttemptId, entry));
    await Promise.all(attempts.map((attempt) => this.#adopt(attempt)));
    await Promise.all((await readdir(socket_folder)).map((name) => this.#restore(name)));
    const running = this.statuses().filter((status) => status.phase !== "exited").length;
    if (running > 0) log.info("found running ranks again", { ranks: running });
  }

  async #adopt(attempt: AttemptId): Promise<void> {
    const { ranks_folder, log } = this.#context;
    const folder = join(ranks_folder, attempt);
    try {
      const launch = await readLaunch(folder);
      if (launch === null) return;
      const rank = new Rank(launch, this.#context);
      this.#ranks.set(attempt, rank);
      if (!(await rank.adopt())) this.#unstarted.push(rank);
    } catch (error) {
      log.warn("cannot read an attempt's folder", { attempt, why: messageOf(error) });
    }
  }

  /** Takes up an attempt whose folder is gone or damaged, when its shim lives: that knows what it was started with. */
  async #restore(socket: string): Promise<void> {
    const { ranks_folder, socket_folder, log, patience } = this.#context;
    const attempt = socket.replace(/\.shim$/, "");
    if (attempt === socket || !v.is(AttemptId, attempt) || this.#ranks.has(attempt)) return;
    try {
      const spec = await new ShimClient(join(socket_folder, socket), patience).spec();
      const folder = join(ranks_folder, attempt);
      await makeFolderOnce(folder, 0o711);
      await writeAtomic(join(folder, "launch.json"), JSON.stringify(spec.launch), 0o600);
      await writeAtomic(join(folder, SPEC_FILE), JSON.stringify(spec), 0o600);
      await this.#adopt(attempt);
      log.warn("an attempt whose folder was lost runs on", { attempt, replica: spec.launch.replica });
    } catch (error) {
      log.debug("a socket that is nobody's any more", { socket, why: messageOf(error) });
    }
  }

  /** Begins again what an earlier agent took up but did not come to start. */
  resume(): void {
    for (const rank of this.#unstarted) void rank.start();
    this.#unstarted = [];
  }

  statuses(): RankStatus[] {
    return [...this.#ranks.values()].map((rank) => rank.status);
  }

  /** Versions of an engine that ranks here were started with and still run. */
  versionsOf(kind: RankLaunch["engine"]): Set<string> {
    const running = this.statuses().filter(({ phase, launch }) => phase !== "exited" && launch.engine === kind);
    return new Set(running.flatMap(({ engine_version }) => engine_version ?? []));
  }

  /** The folder of an attempt, for its log, also of one that ended long ago; null when there is none. */
  folderOf(attempt: AttemptId): string | null {
    const folder = join(this.#context.ranks_folder, attempt);
    return existsSync(folder) ? folder : null;
  }

  /** Never rejects: what goes wrong with one attempt is told in its status. */
  async act(action: Action): Promise<void> {
    switch (action.kind) {
      case "start": {
        const rank = new Rank(action.launch, this.#context);
        this.#ranks.set(action.launch.attempt, rank);
        void rank.start();
        return;
      }
      case "stop":
        await this.#ranks.get(action.attempt)?.stop(action.reason);
        return;
      case "forget":
        await this.#forget(action.attempt);
        return;
    }
  }

  async #forget(attempt: AttemptId): Promise<void> {
    const rank = this.#ranks.get(attempt);
    this.#ranks.delete(attempt);
    try {
      await rank?.clearSockets();
      for (const folder of foldersToDrop(await this.#ended())) await rm(folder, { recursive: true, force: true });
    } catch (error) {
      this.#context.log.warn("cannot remove what ended attempts left", { why: messageOf(error) });
    }
  }

  async #ended(): Promise<EndedFolder[]> {
    const { ranks_folder } = this.#context;
    const attempts = (await readdir(ranks_folder)).filter((entry) => v.is(AttemptId, entry) && !this.#ranks.has(entry));
    const folders = await Promise.all(
      attempts.map(async (attempt) => {
        const folder = join(ranks_folder, attempt);
        const launch = await readLaunch(folder).catch(() => null);
        // The first file of an attempt, written once.
        const { mtimeMs } = await stat(launch === null ? folder : join(folder, "launch.json"));
        return { folder, replica: launch?.replica ?? "", at_ms: mtimeMs };
      }),
    );
    return folders;
  }

  /** Measures what memory each engine holds. */
  async measure(): Promise<void> {
    await Promise.all([...this.#ranks.values()].map((rank) => rank.measure()));
  }

  /** Makes every shim read its certificate again and take the revocations of now. */
  trust(): void {
    for (const rank of this.#ranks.values()) rank.trust();
  }

  /** Ends every rank and waits until it is gone. */
  async stopAll(reason: string): Promise<void> {
    const running = () => [...this.#ranks.values()].filter((rank) => rank.status.phase !== "exited");
    await Promise.all(running().map((rank) => rank.stop(reason)));
    while (running().length > 0) await Bun.sleep(50);
  }
}

/** What an attempt was to be; null when it never came that far. @throws OperatorError when the file is not what it should be */
async function readLaunch(folder: string): Promise<RankLaunch | null> {
  const file = join(folder, "launch.json");
  const text = await readIfThere(file);
  return text === null ? null : parseAs(v.pipe(v.string(), v.parseJson(), RankLaunch), text, file);
}
