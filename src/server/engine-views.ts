import type { EngineList, EngineView, StatusView } from "../protocol/admin-api.ts";
import type { WantedEngine } from "../protocol/engine-release.ts";
import { ENGINE_KINDS } from "../protocol/ids.ts";
import type { NodeView } from "../protocol/admin-api.ts";

/** Engines as the admin API shows them. Pure. */
export function engineList(nodes: readonly NodeView[], wanted: readonly WantedEngine[]): EngineList {
  return {
    items: nodes.flatMap((node) => ENGINE_KINDS.flatMap((engine) => viewOf(node, engine, wanted))),
    wanted: wanted.map(({ kind, version, reason }) => ({ engine: kind, version, reason })),
  };
}

function viewOf({ id, inventory }: NodeView, engine: EngineView["engine"], wanted: readonly WantedEngine[]): EngineView[] {
  const offer = inventory.engines.find(({ kind }) => kind === engine);
  const install = (inventory.installs ?? []).find(({ kind }) => kind === engine);
  const named = wanted.find(({ kind }) => kind === engine);
  if (!offer && !install && !named) return [];
  // A node of an older llmgw, or one that has not heard yet.
  const state = named === undefined ? "" : install?.version === named.version ? install.phase : "waiting";
  const reasons = [install?.phase === "installed" ? "" : (install?.detail ?? ""), offer?.reason ?? "", offer?.note ?? ""];
  return [
    {
      node: id,
      engine,
      version: offer?.offered ? offer.version : "",
      origin: offer?.offered ? offer.origin : "none",
      path: offer?.path ?? "",
      features: [...(offer?.features ?? [])],
      wanted: named?.version ?? "",
      state,
      reason: [...new Set(reasons.filter((text) => text !== ""))].join("; "),
      next_try_ms: install?.next_try_ms ?? null,
    },
  ];
}

type Warnings = StatusView["warnings"];

/** What an operator should know of engines that are not as they were asked for. */
export function engineWarnings(nodes: readonly NodeView[], wanted: readonly WantedEngine[]): Warnings {
  const unresolved = wanted.filter(({ recipe, reason }) => recipe === null && reason.startsWith("cannot"));
  const lookups: Warnings = unresolved.map(({ kind, version, reason }) => ({
    code: "engine-unresolved",
    subject: "server",
    text: `${kind} ${version}: ${reason}`,
    remedy: `check the version and the network, or name a mirror, or \`${kind}: ""\`, under engines in server.yaml`,
  }));
  const installs: Warnings = engineList(nodes, wanted).items.flatMap(({ node, engine, state, wanted: version, version: used, reason }) => {
    if (state !== "failed") return [];
    const stays = used === "" ? "" : `; ${used} stays in use`;
    const text = `${engine} ${version} is not used: ${reason}`;
    return [
      {
        code: "engine-install-failed",
        subject: `node/${node}`,
        text: text.includes("stays in use") ? text : text + stays,
        remedy: "llmgw ctl engines",
      },
    ];
  });
  return [...lookups, ...installs];
}
