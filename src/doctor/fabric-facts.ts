import type { ManagerAnswer, SubnetManager } from "../hardware/subnet-managers.ts";

/** A port whose subnet managers answered. */
interface Known {
  /** `mlx5_2:1`. */
  readonly port: string;
  readonly guids: readonly string[];
  readonly answer: { readonly managers: readonly SubnetManager[]; readonly source: string };
}

/** The ports of which subnet managers are known. A failed question says nothing. */
export function managersOf(answers: ReadonlyMap<string, ManagerAnswer>): Known[] {
  return [...answers].flatMap(([port, answer]) =>
    "managers" in answer ? [{ port, answer, guids: answer.managers.map((each) => each.guid).toSorted() }] : [],
  );
}

/** Whether two ports are on different fabrics: both answered, and they share no subnet manager. */
export function isDistinct(one: Known, other: Known): boolean {
  return !one.guids.some((guid) => other.guids.includes(guid));
}
