import { mkdir, readdir, rm } from "node:fs/promises";
import { join } from "node:path";
import { makePassableFolder, makePrivateFolder, readIfThere } from "../os/files.ts";
import { OperatorError, messageOf, parseAs } from "../protocol/errors.ts";
import type { RankStatus } from "../protocol/agent-api.ts";
import { AttemptId } from "../protocol/ids.ts";
import { KEPT_ATTEMPTS_COUNT, SOCKET_PATH_BYTES } from "../protocol/limits.ts";
import { RankLaunch } from "../protocol/plan.ts";
import type { Revocation } from "../protocol/plan.ts";
import * as v from "valibot";
import type { Action } from "./converge.ts";
import { Rank, socketsOf } from "./rank.ts";
import type { RankContext } from "./rank.ts";

/** All attempts of one node, running and lately ended. */
export class Ranks {
  readonly #context: RankContext;
  readonly #ranks = new Map<AttemptId, Rank>();

  constructor(context: RankContext) {
    this.#context = context;
  }

  /** Makes the folders and finds again what an earlier agent started: a healthy rank is followed on, never touched. */
  async open(): Promise<void> {
    const { ranks_folder, socket_folder, engine_user, log } = this.#context;
    const longest = Buffer.byteLength(socketsOf(socket_folder, "0".repeat(16)).engine);
    if (longest > SOCKET_PATH_BYTES) {
      const why = `socket paths in ${socket_folder} would have ${longest} bytes, ${SOCKET_PATH_BYTES} is the most`;
      throw new OperatorError("E_CONFIG", "the run folder's path is too long", why, "set a shorter `run` in agent.yaml");
    }
    await mkdir(ranks_folder, { recursive: true, mode: 0o711 });
    if (engine_user === null) await makePrivateFolder(socket_folder);
    else await makePassableFolder(socket_folder);
    const entries = await readdir(ranks_folder);
    await Promise.all(
      entries.filter((entry) => v.is(AttemptId, entry)).map((attempt) => this.#adopt(attempt, join(ranks_folder, attempt))),
    );
    const running = this.statuses().filter((status) => status.phase !== "exited").length;
    if (running > 0) log.info("found running ranks again", { ranks: running });
  }

  async #adopt(attempt: AttemptId, folder: string): Promise<void> {
    const text = await readIfThere(join(folder, "launch.json"));
    if (text === null) return;
    let launch: RankLaunch;
    try {
      launch = parseAs(RankLaunch, JSON.parse(text), join(folder, "launch.json"));
    } catch (error) {
      this.#context.log.warn("cannot read an attempt's folder", { attempt, why: messageOf(error) });
      return;
    }
    const rank = new Rank(launch, this.#context);
    this.#ranks.set(attempt, rank);
    try {
      const status = await rank.shim.status(0);
      if (status.attempt !== attempt) throw new Error("another attempt answers");
      void rank.follow();
    } catch {
      await rank.bury("it was not running when the agent came back");
      await rank.clear(false);
    }
  }

  statuses(): RankStatus[] {
    return [...this.#ranks.values()].map((rank) => rank.status);
  }

  /** The folder of an attempt, for its log; null when it is not known here. */
  folderOf(attempt: AttemptId): string | null {
    return this.#ranks.get(attempt)?.folder ?? null;
  }

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
      case "forget": {
        const rank = this.#ranks.get(action.attempt);
        this.#ranks.delete(action.attempt);
        await rank?.clear(false);
        await this.#prune(rank);
        return;
      }
    }
  }

  /** Folders of a replica's ended attempts are kept for their logs, the first and the newest ones; the rest goes. */
  async #prune(forgotten: Rank | undefined): Promise<void> {
    if (!forgotten) return;
    const { ranks_folder } = this.#context;
    const same: { folder: string; at_ms: number }[] = [];
    for (const attempt of await readdir(ranks_folder)) {
      if (this.#ranks.has(attempt)) continue;
      const folder = join(ranks_folder, attempt);
      const launch = v.safeParse(v.pipe(v.string(), v.parseJson(), RankLaunch), await readIfThere(join(folder, "launch.json")));
      if (!launch.success || launch.output.replica !== forgotten.launch.replica) continue;
      same.push({ folder, at_ms: (await Bun.file(join(folder, "launch.json")).stat()).mtimeMs });
    }
    same.sort((a, b) => a.at_ms - b.at_ms);
    for (const { folder } of same.slice(1, 1 - KEPT_ATTEMPTS_COUNT)) await rm(folder, { recursive: true, force: true });
  }

  /** Hands new revocations and a renewed certificate on to every shim. */
  async trust(revocations: readonly Revocation[]): Promise<void> {
    await Promise.all(
      [...this.#ranks.values()]
        .filter((rank) => rank.status.phase === "starting" || rank.status.phase === "ready")
        .map((rank) =>
          rank.shim
            .trust(revocations)
            .catch((error: unknown) => this.#context.log.warn("a shim did not take new trust", { why: messageOf(error) })),
        ),
    );
  }

  /** Ends every rank and waits until it is gone. */
  async stopAll(reason: string): Promise<void> {
    const running = () => [...this.#ranks.values()].filter((rank) => rank.status.phase !== "exited");
    await Promise.all(running().map((rank) => rank.stop(reason)));
    while (running().length > 0) await Bun.sleep(50);
  }
}
