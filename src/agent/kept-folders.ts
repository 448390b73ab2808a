import { KEPT_ATTEMPTS_COUNT, KEPT_FOLDERS_COUNT } from "../protocol/limits.ts";

/** What an attempt left that nobody speaks of any more. */
export interface EndedFolder {
  readonly folder: string;
  /** Empty when it cannot be told. */
  readonly replica: string;
  readonly at_ms: number;
}

/**
 * Which folders of ended attempts go. They are kept for their logs: of each replica the first, which tells how its
 * trouble began, and the newest ones; of all together a bounded number, the newest.
 */
export function foldersToDrop(ended: readonly EndedFolder[], per_replica = KEPT_ATTEMPTS_COUNT, in_all = KEPT_FOLDERS_COUNT): string[] {
  const oldest_first = ended.toSorted((a, b) => a.at_ms - b.at_ms);
  const of_replica = Map.groupBy(oldest_first, (entry) => entry.replica);
  const dropped = new Set([...of_replica.values()].flatMap((entries) => entries.slice(1, 1 - per_replica)));
  const kept = oldest_first.filter((entry) => !dropped.has(entry));
  for (const entry of kept.slice(0, Math.max(0, kept.length - in_all))) dropped.add(entry);
  return oldest_first.filter((entry) => dropped.has(entry)).map((entry) => entry.folder);
}
