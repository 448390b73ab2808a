/**
 * The samples of some metrics in a Prometheus text, as they are: another text once any of them has moved.
 * @param names without labels; of a histogram its `_count` or `_sum`
 * @returns null when none of them is there
 */
export function samplesOf(metrics: string, names: readonly string[]): string | null {
  const wanted = new Set(names);
  const lines = metrics.split("\n").filter((line) => wanted.has(line.split(/[{\s]/, 1)[0] ?? ""));
  return lines.length === 0 ? null : lines.join("\n");
}
