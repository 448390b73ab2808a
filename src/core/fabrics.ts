import type { FabricPort, Inventory } from "../protocol/inventory.ts";
import { FABRIC_DISJOINT_ANSWERS_COUNT } from "../protocol/limits.ts";

/** What a port's last answers said of its fabric. */
export interface Seen {
  /** Port GUIDs of the subnet managers of the last answer that counted; empty = never answered. */
  readonly managers: readonly string[];
  /** GUIDs of the fabric's switches, as far as they were asked. */
  readonly switches: readonly string[];
  /** When that answer came; null = never. */
  readonly answered_ms: number | null;
  /** Whether the newest question was answered. */
  readonly answering: boolean;
  /** Answers in a row that share nothing with what is known. */
  readonly disjoint: number;
}

export const UNSEEN: Seen = { managers: [], switches: [], answered_ms: null, answering: false, disjoint: 0 };

/** One answer about a port; null managers = the question failed, which is unknown and never "another fabric". */
export interface Answer {
  readonly managers: readonly string[] | null;
  /** Null when not asked or not told. */
  readonly switches: readonly string[] | null;
}

const meet = (a: readonly string[], b: readonly string[]) => a.some((guid) => b.includes(guid));

/** Whether an answer shares nothing with what is known, so that the switches should be asked before it is believed. */
export function isDisjoint(known: Seen, managers: readonly string[]): boolean {
  return known.managers.length > 0 && !meet(known.managers, managers);
}

/**
 * What is known of a port after one more answer. A failed question keeps the last answer. An answer that shares no subnet manager with
 * the last one counts at once when the fabric has a switch in common (its managers were replaced), and else only when it is repeated.
 */
export function foldAnswer(known: Seen, answer: Answer, now_ms: number): Seen {
  const { managers } = answer;
  if (managers === null || managers.length === 0) return { ...known, answering: false };
  // Another set of managers may mean a fabric cut in two: switches known from before would still join its halves.
  const same = managers.length === known.managers.length && managers.every((guid) => known.managers.includes(guid));
  const switches = answer.switches ?? (same ? known.switches : []);
  const taken: Seen = { managers: managers.toSorted(), switches, answered_ms: now_ms, answering: true, disjoint: 0 };
  if (!isDisjoint(known, managers)) return taken;
  if (answer.switches !== null && meet(known.switches, answer.switches)) return taken;
  const disjoint = known.disjoint + 1;
  return disjoint >= FABRIC_DISJOINT_ANSWERS_COUNT ? taken : { ...known, answering: true, disjoint };
}

/** A declared port of one node. */
export interface NodePort extends FabricPort {
  readonly node: string;
}

/** Ports that are proved to be on one physical fabric, by a chain of shared subnet managers or switches. */
export function physicalFabrics(ports: readonly NodePort[]): NodePort[][] {
  const parent = new Map<string, string>();
  const find = (key: string): string => {
    const above = parent.get(key) ?? key;
    return above === key ? key : find(above);
  };
  const keysOf = (port: NodePort) => [...port.managers.map((guid) => `manager ${guid}`), ...port.switches.map((guid) => `switch ${guid}`)];
  const proved = ports.filter((port) => port.managers.length > 0);
  for (const port of proved) {
    const [first = "", ...others] = keysOf(port);
    for (const other of others) parent.set(find(other), find(first));
  }
  return [...Map.groupBy(proved, (port) => find(keysOf(port)[0] ?? "")).values()];
}

/** Nodes that may share a replica. */
export interface Island {
  /** The fabric's name, with `#1`, `#2` while one name stands for several physical fabrics. */
  readonly name: string;
  /** Every name it was declared by. */
  readonly declared: readonly string[];
  readonly nodes: readonly string[];
  /** Subnet managers seen; empty = none ever answered, so the declared name is believed: unproved. */
  readonly managers: readonly string[];
  readonly proved: boolean;
}

interface FabricWarning {
  readonly code: "fabric-split" | "fabric-two-names" | "fabric-wrong-cable" | "fabric-unproved";
  readonly subject: string;
  /** A declared name it is about. */
  readonly fabric: string;
  readonly text: string;
  readonly remedy: string;
}

/** Which island of a name a port was in: `ib-b` -> port GUID -> 1. It keeps `#1` and `#2` what they are. */
export type IslandNumbers = Readonly<Record<string, Readonly<Record<string, number>>>>;

export interface Fabrics {
  readonly islands: readonly Island[];
  readonly warnings: readonly FabricWarning[];
  /** Nodes that get no gang on a declared name, because their own adapters under it are on different fabrics. */
  readonly torn: readonly { readonly node: string; readonly fabric: string }[];
  readonly numbers: IslandNumbers;
}

/**
 * The islands of a fleet, from the declared ports of all nodes.
 * @param before the numbers of the last time, so that islands keep their names
 */
export function islandsOf(ports: readonly NodePort[], before: IslandNumbers = {}): Fabrics {
  const declared = ports.filter((port) => port.fabric !== "");
  const physical = physicalFabrics(declared);
  const torn = tornNodes(physical);
  const isTorn = (port: NodePort) => torn.some((each) => each.node === port.node && each.fabric === port.fabric);
  const warnings: FabricWarning[] = torn.map(({ node, fabric }) => ({
    code: "fabric-wrong-cable",
    subject: `node/${node}`,
    fabric,
    text: `${node} calls adapters ${fabric} that are on different fabrics: it gets no replica of several nodes`,
    remedy: `recable them, or give each its own name with --fabric`,
  }));
  const islands: Island[] = [];
  // Numbers of a fabric that healed are kept, for the day it is cut again.
  const numbers: Record<string, Readonly<Record<string, number>>> = { ...before };
  for (const whole of inOrder(physical)) {
    const group = whole.filter((port) => !isTorn(port));
    if (group.length === 0) continue;
    const names = namesOf(group);
    const [name = ""] = names;
    const users = names.map((each) => `${each} (${nodesOf(group, each)})`).join(" and ");
    if (names.length > 1)
      warnings.push({
        code: "fabric-two-names",
        subject: `fabric/${name}`,
        fabric: name,
        text: `${users} see the same subnet managers: one fabric, taken as ${name}`,
        remedy: "use one name for it on every node",
      });
    islands.push(islandOf(name, names, group));
  }
  const split = new Set<string>();
  for (const [name, same] of Map.groupBy(islands, (island) => island.name)) {
    if (same.length < 2) continue;
    split.add(name);
    numbers[name] = numberIslands(same, declared, before[name] ?? {});
    const parts = same.map((island) => `{${island.nodes.join(", ")}}`).join(" and ");
    warnings.push({
      code: "fabric-split",
      subject: `fabric/${name}`,
      fabric: name,
      text: `${name} is ${same.length} fabrics: ${parts} see different subnet managers`,
      remedy: "give each its own name with --fabric, or join them by cable",
    });
  }
  const named = islands.map((island) => (split.has(island.name) ? renumber(island, declared, numbers) : island));
  const unproved = addUnproved(named, declared);
  return { islands: unproved.islands, warnings: [...warnings, ...unproved.warnings], torn, numbers };
}

const unique = (values: readonly string[]) => [...new Set(values)].toSorted();

/** The names of one physical fabric: the one most nodes use comes first. */
function namesOf(group: readonly NodePort[]): string[] {
  const users = Map.groupBy(group, (port) => port.fabric);
  const nodes = (name: string) => new Set(users.get(name)?.map((port) => port.node)).size;
  return [...users.keys()].toSorted((a, b) => nodes(b) - nodes(a) || (a < b ? -1 : 1));
}

const nodesOf = (group: readonly NodePort[], fabric: string) =>
  unique(group.filter((port) => port.fabric === fabric).map((port) => port.node)).join(", ");

/** Physical fabrics in an order that does not depend on the order of the ports. */
function inOrder(physical: readonly NodePort[][]): NodePort[][] {
  const first = (group: readonly NodePort[]) =>
    unique(group.map((port) => `${port.fabric} ${port.node} ${port.device}:${port.port}`))[0] ?? "";
  return physical.toSorted((a, b) => (first(a) < first(b) ? -1 : 1));
}

function islandOf(name: string, declared: readonly string[], ports: readonly NodePort[]): Island {
  const managers = unique(ports.flatMap((port) => port.managers));
  return { name, declared, nodes: unique(ports.map((port) => port.node)), managers, proved: true };
}

/** Nodes whose ports under one name are on different physical fabrics. */
function tornNodes(physical: readonly NodePort[][]): { node: string; fabric: string }[] {
  const found = new Map<string, { node: string; fabric: string; on: Set<number> }>();
  for (const [at, group] of physical.entries()) {
    for (const { node, fabric } of group) {
      const entry = found.get(`${node} ${fabric}`) ?? { node, fabric, on: new Set() };
      found.set(`${node} ${fabric}`, entry);
      entry.on.add(at);
    }
  }
  return [...found.values()].filter((entry) => entry.on.size > 1).map(({ node, fabric }) => ({ node, fabric }));
}

const portKey = (port: NodePort) => port.guid ?? `${port.node} ${port.device}:${port.port}`;

/** Gives each island of one name a number: the one most of its ports had before, else the least that is free. */
function numberIslands(
  same: readonly Island[],
  declared: readonly NodePort[],
  before: Readonly<Record<string, number>>,
): Record<string, number> {
  const taken = new Set<number>();
  const numbers: Record<string, number> = {};
  const portsOf = (island: Island) => declared.filter((port) => port.managers.some((guid) => island.managers.includes(guid)));
  const votes = same.map((island) => {
    const counts = Map.groupBy(
      portsOf(island).flatMap((port) => before[portKey(port)] ?? []),
      (number) => number,
    );
    const [best] = [...counts].toSorted(([a, x], [b, y]) => y.length - x.length || a - b);
    return { island, best: best?.[0] ?? null, weight: best?.[1].length ?? 0 };
  });
  for (const { island, best } of votes.toSorted((a, b) => b.weight - a.weight)) {
    let number = best !== null && !taken.has(best) ? best : 1;
    while (
      taken.has(number) ||
      (number !== best && votes.some((vote) => vote.best === number && vote.island !== island && !taken.has(number)))
    )
      number++;
    taken.add(number);
    for (const port of portsOf(island)) numbers[portKey(port)] = number;
  }
  return numbers;
}

function renumber(island: Island, declared: readonly NodePort[], numbers: IslandNumbers): Island {
  const of = numbers[island.name];
  if (of === undefined) return island;
  const port = declared.find((each) => each.managers.some((guid) => island.managers.includes(guid)));
  const number = port ? of[portKey(port)] : undefined;
  return number === undefined ? island : { ...island, name: `${island.name}#${number}` };
}

/** Nodes no manager ever answered: they count by the declared name where that stands for one fabric, and alone where it does not. */
function addUnproved(islands: readonly Island[], declared: readonly NodePort[]): { islands: Island[]; warnings: FabricWarning[] } {
  const result = [...islands];
  const warnings: FabricWarning[] = [];
  const answered = new Set(declared.filter((port) => port.managers.length > 0).map((port) => `${port.node} ${port.fabric}`));
  const silent = declared.filter((port) => !answered.has(`${port.node} ${port.fabric}`));
  for (const [name, ports] of Map.groupBy(silent, (port) => port.fabric)) {
    const nodes = unique(ports.map((port) => port.node));
    const at = result.findIndex((island) => island.declared.includes(name) && !island.name.includes("#"));
    const there = result[at];
    if (there) result[at] = { ...there, nodes: unique([...there.nodes, ...nodes]) };
    else if (result.some((island) => island.declared.includes(name)))
      for (const node of nodes) result.push({ name: `${name}@${node}`, declared: [name], nodes: [node], managers: [], proved: false });
    else result.push({ name, declared: [name], nodes, managers: [], proved: false });
    warnings.push({
      code: "fabric-unproved",
      subject: `fabric/${name}`,
      fabric: name,
      text: `no subnet manager has answered ${nodes.join(", ")} on ${name}: the name alone is believed`,
      remedy: "run llmgw doctor there; start the subnet manager",
    });
  }
  return { islands: result, warnings };
}

/**
 * Why a node may not be part of a gang, by its own examination; null when nothing speaks against it. A silent subnet manager alone does
 * not: traffic goes on through a failover.
 */
export function fabricFault({ doctor }: Pick<Inventory, "doctor">): string | null {
  const failed = doctor?.checks.find(({ id, verdict }) => verdict === "fail" && (id === "ib.declared" || id.startsWith("ib.fabric")));
  return failed ? `${failed.title}: ${failed.found}` : null;
}

/** Whether a node's examination found the service broken that shares memory over NVLink between machines. */
export function hasImexFault({ doctor }: Pick<Inventory, "doctor">): boolean {
  return doctor?.checks.some(({ id, verdict }) => verdict === "fail" && id.startsWith("imex.")) ?? false;
}
