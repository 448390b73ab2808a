import { createHash } from "node:crypto";
import { mkdir } from "node:fs/promises";
import { join } from "node:path";
import * as v from "valibot";
import { DEFAULT_VERSIONS, llamacppBuilds, packagesRecipe, readListing, TAG_FILE, UV_VERSION, uvBuilds } from "../engines/releases.ts";
import type { Listing } from "../engines/releases.ts";
import { readIfThere, writeAtomic } from "../os/files.ts";
import type { Log } from "../os/log.ts";
import { pause } from "../os/wakeup.ts";
import type { ServerConfig } from "../protocol/config.ts";
import { Recipe, type Build, type WantedEngine } from "../protocol/engine-release.ts";
import { messageOf } from "../protocol/errors.ts";
import { INSTALLABLE_KINDS, type InstallableKind } from "../protocol/ids.ts";
import { RELEASE_AGAIN_FIRST_MS, RELEASE_AGAIN_MAX_MS, RELEASE_LISTING_BYTES, RELEASE_LISTING_MS } from "../protocol/limits.ts";
import { shownUrl } from "../weights/source.ts";

/** Where releases are listed when no mirror is named. */
const ORIGIN = "https://api.github.com/repos";
const PROJECTS = { "llama.cpp": "ggml-org/llama.cpp", uv: "astral-sh/uv" } as const;
type Project = keyof typeof PROJECTS;

const Kept = v.object({ recipe: Recipe });

interface EngineReleasesOptions {
  /** Where what was found out is kept: a version never means anything else. */
  readonly folder: string;
  readonly log: Log;
  readonly signal: AbortSignal;
  /** Nodes have to be told. */
  readonly changed: () => void;
}

/** Finds out, once for each version that is wanted, how nodes install it. What cannot be found out is asked for again. */
export class EngineReleases {
  readonly #options: EngineReleasesOptions;
  #engines: ServerConfig["engines"] = {};
  readonly #wanted = new Map<InstallableKind, WantedEngine>();
  readonly #work = new Map<InstallableKind, AbortController>();

  constructor(options: EngineReleasesOptions) {
    this.#options = options;
  }

  /** Versions the nodes are to have. */
  get wanted(): readonly WantedEngine[] {
    return [...this.#wanted.values()];
  }

  /**
   * Takes what the configuration names now, and finds out what is new in it; ends with the signal.
   * @returns whether anything is
   */
  follow(engines: ServerConfig["engines"]): boolean {
    const before = JSON.stringify(this.#engines);
    const moved = engines.mirror !== this.#engines.mirror;
    this.#engines = engines;
    for (const kind of INSTALLABLE_KINDS) {
      const version = engines[kind] ?? DEFAULT_VERSIONS[kind];
      if (!moved && (this.#wanted.get(kind)?.version ?? "") === version) continue;
      this.#work.get(kind)?.abort();
      this.#wanted.delete(kind);
      if (version === "") continue;
      const work = new AbortController();
      this.#work.set(kind, work);
      this.#wanted.set(kind, { kind, version, recipe: null, reason: "being looked up" });
      void this.#resolve(kind, version, AbortSignal.any([work.signal, this.#options.signal]));
    }
    const isNew = JSON.stringify(engines) !== before;
    if (isNew) this.#options.changed();
    return isNew;
  }

  async #resolve(kind: InstallableKind, version: string, signal: AbortSignal): Promise<void> {
    const { folder, log, changed } = this.#options;
    const { mirror } = this.#engines;
    const tell = (recipe: Recipe | null, reason: string) => {
      if (signal.aborted) return;
      this.#wanted.set(kind, { kind, version, recipe, reason });
      changed();
    };
    const place = mirror === undefined ? "" : `-${createHash("sha256").update(mirror).digest("hex").slice(0, 12)}`;
    const file = join(folder, `${kind}-${version}${place}.json`);
    const kept = v.safeParse(v.pipe(v.string(), v.parseJson(), Kept), await readIfThere(file).catch(() => null));
    if (kept.success) return tell(kept.output.recipe, "");
    for (let wait_ms = RELEASE_AGAIN_FIRST_MS; !signal.aborted; wait_ms = Math.min(2 * wait_ms, RELEASE_AGAIN_MAX_MS)) {
      try {
        const recipe = await this.#recipeOf(kind, version);
        tell(recipe, "");
        await mkdir(folder, { recursive: true });
        await writeAtomic(file, JSON.stringify({ recipe }), 0o600);
        return;
      } catch (error) {
        if (signal.aborted) return;
        const why = messageOf(error);
        log.warn("cannot find out how a version of an engine is installed", { engine: kind, version, why });
        tell(null, `cannot find out how it is installed: ${why}`);
      }
      await pause(wait_ms, signal);
    }
  }

  async #recipeOf(kind: InstallableKind, version: string): Promise<Recipe> {
    if (kind === "llamacpp") return { how: "archives", builds: this.#mirrored("llama.cpp", llamacppBuilds(await this.#llamacpp(version))) };
    const { mirror } = this.#engines;
    // Without `uv` Python's own tools do: slower, but no reason to have no engine.
    const uv = await this.#listing("uv", UV_VERSION)
      .then((listing) => this.#mirrored("uv", uvBuilds(listing)))
      .catch(() => []);
    return packagesRecipe(kind, version, mirror === undefined ? null : `${base(mirror)}/simple/`, uv);
  }

  /** A `vX.Y.Z` of llama.cpp holds nothing but the name of the build it stands for. */
  async #llamacpp(version: string): Promise<Listing> {
    const listing = await this.#listing("llama.cpp", version);
    const pointer = listing.assets.find(({ name }) => name === TAG_FILE);
    if (!pointer) return listing;
    const { mirror } = this.#engines;
    const url = mirror === undefined ? pointer.browser_download_url : `${base(mirror)}/llama.cpp/${version}/${TAG_FILE}`;
    const tag = (await this.#ask(url)).trim();
    if (!/^b\d+$/.test(tag)) throw new Error(`${TAG_FILE} of ${version} names no build`);
    return this.#listing("llama.cpp", tag);
  }

  async #listing(project: Project, tag: string): Promise<Listing> {
    const { mirror } = this.#engines;
    const url = mirror === undefined ? `${ORIGIN}/${PROJECTS[project]}/releases/tags/${tag}` : `${base(mirror)}/${project}/${tag}.json`;
    const text = await this.#ask(url);
    try {
      return readListing(JSON.parse(text), tag);
    } catch (error) {
      throw new Error(`${shownUrl(url)} answered with no list of that release: ${messageOf(error)}`, { cause: error });
    }
  }

  /** With a mirror its files are taken, and the digests of the listing it has. */
  #mirrored(project: Project, builds: readonly Build[]): Build[] {
    const { mirror } = this.#engines;
    if (mirror === undefined) return [...builds];
    return builds.map((build) => {
      const files = build.files.map((file) => ({ ...file, url: `${base(mirror)}/${project}/${tagOf(file.url)}/${file.name}` }));
      return { ...build, files };
    });
  }

  async #ask(url: string): Promise<string> {
    const signal = AbortSignal.any([this.#options.signal, AbortSignal.timeout(RELEASE_LISTING_MS)]);
    const failed = (error: unknown): never => {
      throw new Error(`${shownUrl(url)}: ${messageOf(error)}`, { cause: error });
    };
    const headers = { accept: "application/vnd.github+json, */*", "user-agent": "llmgw" };
    const response = await fetch(url, { signal, headers }).catch(failed);
    if (!response.ok) throw new Error(`${shownUrl(url)} answered ${refusalOf(response)}`);
    return readText(response, RELEASE_LISTING_BYTES).catch(failed);
  }
}

const base = (mirror: string): string => mirror.replace(/\/+$/, "");
/** `https://host/project/releases/download/TAG/FILE`. */
const tagOf = (url: string): string => decodeURIComponent(new URL(url).pathname.split("/").at(-2) ?? "");

/** What a host says instead of an answer; for a limit of questions until when it lasts. */
function refusalOf({ status, headers }: Response): string {
  if (status === 404) return "404: it knows no such version";
  const reset_s = Number(headers.get("x-ratelimit-reset"));
  const limited = headers.get("x-ratelimit-remaining") === "0" && Number.isFinite(reset_s);
  if (!limited) return `${status}`;
  return `${status}: too many questions from this address, until ${new Date(reset_s * 1_000).toISOString()}`;
}

async function readText(response: Response, limit: number): Promise<string> {
  const decoder = new TextDecoder();
  let text = "";
  for await (const chunk of response.body ?? []) {
    text += decoder.decode(chunk, { stream: true });
    if (text.length > limit) throw new Error(`the answer is longer than ${limit} bytes`);
  }
  return text;
}
