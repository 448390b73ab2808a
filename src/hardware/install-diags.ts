import { INSTALL_MS } from "../protocol/limits.ts";
import { REAL_IB_ROOT } from "./infiniband.ts";
import { runTool } from "./tool.ts";
import type { RunTool, ToolAnswer } from "./tool.ts";

const DIAGS_PACKAGE = "infiniband-diags";
/** A subnet manager on a compute node would take part in the fabric's election. */
const NEVER = /^(lib)?opensm/;

type PackageManager = "apt" | "dnf";

/** What a package manager says it would do. */
interface Simulation {
  readonly installs: readonly string[];
  readonly removes: readonly string[];
  readonly downgrades: readonly string[];
}

/** Reads `apt-get -s install` or `dnf --assumeno install`. */
export function parseSimulation(manager: PackageManager, output: string): Simulation {
  if (manager === "apt") {
    const names = (word: string) => [...output.matchAll(new RegExp(`^${word} (\\S+)`, "gm"))].map(([, name = ""]) => name);
    const downgraded = /The following packages will be DOWNGRADED:\n((?: {2}.*\n)+)/.exec(output)?.[1] ?? "";
    return {
      installs: names("Inst"),
      removes: [...new Set([...names("Remv"), ...names("Purg")])],
      downgrades: downgraded.split(/\s+/).filter(Boolean),
    };
  }
  const section = (title: string) => {
    const text = new RegExp(`^${title}.*:\\n((?: .*\\n)+)`, "m").exec(`${output}\n`)?.[1] ?? "";
    return text.split("\n").flatMap((line) => /^ (\S+)/.exec(line)?.[1] ?? []);
  };
  return {
    installs: [...section("Installing"), ...section("Upgrading")],
    removes: section("Removing"),
    downgrades: section("Downgrading"),
  };
}

/** Why the installation is not to be done; null when it may. */
export function refuseInstall({ installs, removes, downgrades }: Simulation): string | null {
  if (removes.length > 0) return `it would remove ${removes.join(", ")}`;
  if (downgrades.length > 0) return `it would downgrade ${downgrades.join(", ")}`;
  const manager = installs.find((name) => NEVER.test(name));
  if (manager !== undefined) return `it would bring ${manager}, a subnet manager`;
  return installs.includes(DIAGS_PACKAGE) ? null : `the package manager offers no ${DIAGS_PACKAGE}`;
}

type InstallOutcome = { readonly done: string } | { readonly not: string };

/**
 * Makes sure that subnet managers can be asked: installs infiniband-diags where it is missing, and loads ib_umad. Only as root and only
 * on the machine's own InfiniBand; simulated first; nothing is ever removed or downgraded.
 */
export async function installDiags(options: { ib_root: string; is_root: boolean; run?: RunTool }): Promise<InstallOutcome> {
  const run = options.run ?? runTool;
  if (options.ib_root !== REAL_IB_ROOT) return { not: "the InfiniBand root is not the kernel's" };
  if (!options.is_root) return { not: "only root can install packages" };
  const loaded = await run(["modprobe", "ib_umad"], INSTALL_MS);
  const module = succeeded(loaded) ? "" : "; ib_umad cannot be loaded";
  if (!("failed" in (await run(["saquery", "--version"], INSTALL_MS)))) return { done: `the tools are there${module}` };
  const manager = await packageManager(run);
  if (manager === null) return { not: "neither apt-get nor dnf is here" };
  const simulated = await run(
    manager === "apt"
      ? ["apt-get", "-s", "--no-install-recommends", "install", DIAGS_PACKAGE]
      : ["dnf", "--assumeno", "install", DIAGS_PACKAGE],
    INSTALL_MS,
  );
  if ("failed" in simulated) return { not: simulated.why };
  const refused = refuseInstall(parseSimulation(manager, simulated.out));
  if (refused !== null) return { not: refused };
  const installed = await run(
    manager === "apt"
      ? ["apt-get", "-q", "-y", "--no-remove", "--no-install-recommends", "install", DIAGS_PACKAGE]
      : ["dnf", "-q", "-y", "install", DIAGS_PACKAGE],
    INSTALL_MS,
  );
  return succeeded(installed) ? { done: `installed ${DIAGS_PACKAGE}${module}` } : { not: `${manager} failed: ${lastLine(installed)}` };
}

async function packageManager(run: RunTool): Promise<PackageManager | null> {
  if (!("failed" in (await run(["apt-get", "--version"], INSTALL_MS)))) return "apt";
  return "failed" in (await run(["dnf", "--version"], INSTALL_MS)) ? null : "dnf";
}

const succeeded = (answer: ToolAnswer) => "code" in answer && answer.code === 0;
const lastLine = (answer: ToolAnswer) => ("failed" in answer ? answer.why : (answer.err.trim().split("\n").at(-1) ?? ""));
