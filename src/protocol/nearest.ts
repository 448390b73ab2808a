/** Edits between two words: insert, delete, replace, or swap of neighbours. */
function distance(a: string, b: string): number {
  const rows: number[][] = [Array.from({ length: b.length + 1 }, (_, column) => column)];
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const same = a[i - 1] === b[j - 1];
      let best = Math.min(at(rows, i - 1, j) + 1, at([row], 0, j - 1) + 1, at(rows, i - 1, j - 1) + (same ? 0 : 1));
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) best = Math.min(best, at(rows, i - 2, j - 2) + 1);
      row.push(best);
    }
    rows.push(row);
  }
  return at(rows, a.length, b.length);
}

function at(rows: readonly number[][], i: number, j: number): number {
  return rows[i]?.[j] ?? Number.POSITIVE_INFINITY;
}

/** The name someone most likely meant, or null when none is close. */
export function nearest(word: string, names: Iterable<string>): string | null {
  if (word.length > 80) return null;
  let best: { name: string; edits: number } | null = null;
  for (const name of names) {
    const starts = word.length >= 2 && name.startsWith(word);
    const edits = starts ? 1 : distance(word.toLowerCase(), name.toLowerCase());
    const allowed = starts ? 1 : Math.max(1, Math.floor(Math.max(word.length, name.length) / 3));
    if (edits <= allowed && (best === null || edits < best.edits)) best = { name, edits };
  }
  return best?.name ?? null;
}
