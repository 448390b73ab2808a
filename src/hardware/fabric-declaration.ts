import { OperatorError } from "../protocol/errors.ts";
import { ADAPTERS_PER_FABRIC_COUNT } from "../protocol/limits.ts";
import { portName } from "./infiniband.ts";
import type { IbPort } from "./infiniband.ts";

/** `ib-b`, `ib-b:mlx5_2,mlx5_3` or `ib-b:mlx5_2:1`: a fabric's name and the adapters that are on it. */
export interface FabricDeclaration {
  readonly name: string;
  /** Empty = choose. A null port is the device's only usable one. */
  readonly members: readonly { readonly device: string; readonly port: number | null }[];
}

const FABRIC_NAME = /^[a-z0-9]([a-z0-9._-]{0,30}[a-z0-9])?$/;
const DEVICE_NAME = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/;
const FORM = "write ib-b, ib-b:mlx5_2,mlx5_3 or ib-b:mlx5_2:1";

const wrong = (text: string, why: string, remedy: string) => new OperatorError("E_CONFIG", `cannot use the fabric "${text}"`, why, remedy);

/** Reads one `--fabric`. @throws OperatorError E_CONFIG */
export function parseFabric(text: string): FabricDeclaration {
  const [name = "", ...rest] = text.split(":");
  if (!FABRIC_NAME.test(name)) throw wrong(text, `"${name}" is no name: 1-32 of a-z 0-9 . _ -`, FORM);
  const words = rest.join(":");
  if (rest.length > 0 && words === "") throw wrong(text, "no adapter follows the colon", FORM);
  const members = (words === "" ? [] : words.split(",")).map((word) => {
    const [device = "", port, ...more] = word.trim().split(":");
    if (!DEVICE_NAME.test(device) || more.length > 0 || (port !== undefined && !/^\d{1,3}$/.test(port)))
      throw wrong(text, `"${word}" is no adapter`, FORM);
    return { device, port: port === undefined ? null : Number(port) };
  });
  return { name, members };
}

/** The port each fabric's name is given to, by `device:port`. */
export type FabricOfPort = ReadonlyMap<string, string>;

/**
 * Gives ports to fabrics as declared; where only a name is given, two usable adapters, those near GPUs and on different NUMA nodes first.
 * @param gpu_numa NUMA nodes with GPUs
 * @throws OperatorError E_CONFIG: an adapter under two fabrics, one that is not there, one that cannot carry a fabric
 */
export function assignFabrics(
  declared: readonly FabricDeclaration[],
  ports: readonly IbPort[],
  gpu_numa: readonly number[] = [],
): FabricOfPort {
  const of = new Map<string, string>();
  for (const { name, members } of mergeNames(declared))
    for (const member of members) {
      const port = resolve(name, member, ports);
      const other = of.get(portName(port));
      if (other !== undefined && other !== name) throw underTwo(portName(port), other, name);
      of.set(portName(port), name);
    }
  for (const { name, members } of mergeNames(declared)) {
    if (members.length > 0) continue;
    const free = ports.filter((port) => port.excluded === "" && !of.has(portName(port)));
    for (const port of choose(free, gpu_numa)) of.set(portName(port), name);
  }
  return of;
}

function underTwo(port: string, one: string, other: string): OperatorError {
  const why = `it is declared on ${one} and on ${other}, and one port is on one fabric`;
  return new OperatorError("E_CONFIG", `adapter ${port} is under two fabrics: ${one} and ${other}`, why, `take ${port} out of one of them`);
}

function mergeNames(declared: readonly FabricDeclaration[]): FabricDeclaration[] {
  return [...Map.groupBy(declared, (each) => each.name)].map(([name, same]) => ({ name, members: same.flatMap((each) => each.members) }));
}

function resolve(fabric: string, { device, port }: FabricDeclaration["members"][number], ports: readonly IbPort[]): IbPort {
  const named = port === null ? device : `${device}:${port}`;
  const text = `${fabric}:${named}`;
  const usable = ports.filter((each) => each.excluded === "");
  const there = usable.length > 0 ? `InfiniBand adapters here: ${usable.map(portName).join(", ")}` : "there is no InfiniBand adapter here";
  const same = ports.filter((each) => each.device === device);
  if (same.length === 0) {
    const owner = ports.find((each) => each.netdevs.includes(device));
    throw wrong(text, `${device} is not here`, owner ? `${device} is a network interface of ${owner.device}: name that` : there);
  }
  const found = port === null ? same.filter((each) => each.excluded === "") : same.filter((each) => each.port === port);
  const [first] = found;
  if (!first) {
    const why = port === null ? `${device}: ${same[0]?.excluded}` : `${device} has no port ${port}`;
    throw wrong(text, why, there);
  }
  if (first.excluded !== "") throw wrong(text, `${named}: ${first.excluded}`, there);
  if (found.length > 1)
    throw wrong(
      text,
      `${device} has ${found.length} ports, which may be on different fabrics`,
      `name one: ${found.map((each) => `${fabric}:${portName(each)}`).join(" or ")}`,
    );
  return first;
}

/** Two ports: linked ones first, then those near a GPU, then on NUMA nodes not yet taken. */
function choose(free: readonly IbPort[], gpu_numa: readonly number[]): IbPort[] {
  const chosen: IbPort[] = [];
  const cost = (port: IbPort) => [
    port.state === "ACTIVE" ? 0 : 1,
    port.numa === null || gpu_numa.length === 0 || gpu_numa.includes(port.numa) ? 0 : 1,
    chosen.some((other) => other.device === port.device) ? 1 : 0,
    chosen.some((other) => other.numa === port.numa) ? 1 : 0,
  ];
  const left = [...free];
  while (chosen.length < ADAPTERS_PER_FABRIC_COUNT && left.length > 0) {
    const costs = left.map((port) => Number(cost(port).join("")));
    const [port] = left.splice(costs.indexOf(Math.min(...costs)), 1);
    if (port) chosen.push(port);
  }
  return chosen;
}
