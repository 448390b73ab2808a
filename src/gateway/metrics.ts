/** A small Prometheus registry: counters, gauges and histograms with a bounded number of label sets each. */

type Labels = Readonly<Record<string, string>>;

/** Label sets one metric may have; what comes beyond is counted under `other`. */
const LABEL_SETS_COUNT = 1_000;

function labelText(labels: Labels): string {
  const escaped = (value: string) => value.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n");
  const parts = Object.entries(labels).map(([name, value]) => `${name}="${escaped(value)}"`);
  return parts.length === 0 ? "" : `{${parts.join(",")}}`;
}

const withLabel = (key: string, name: string, value: string): string =>
  key === "" ? `{${name}="${value}"}` : `${key.slice(0, -1)},${name}="${value}"}`;

abstract class Metric {
  readonly name: string;
  readonly help: string;
  readonly kind: "counter" | "gauge" | "histogram";
  constructor(kind: Metric["kind"], name: string, help: string) {
    this.kind = kind;
    this.name = name;
    this.help = help;
  }
  abstract lines(): string[];
  render(): string {
    return [`# HELP ${this.name} ${this.help}`, `# TYPE ${this.name} ${this.kind}`, ...this.lines(), ""].join("\n");
  }
}

function keyIn(values: ReadonlyMap<string, unknown>, labels: Labels): string {
  const key = labelText(labels);
  if (values.has(key) || values.size < LABEL_SETS_COUNT) return key;
  return labelText(Object.fromEntries(Object.keys(labels).map((name) => [name, "other"])));
}

export class Counter extends Metric {
  readonly #values = new Map<string, number>();
  constructor(name: string, help: string) {
    super("counter", name, help);
  }
  add(labels: Labels, amount = 1): void {
    const key = keyIn(this.#values, labels);
    this.#values.set(key, (this.#values.get(key) ?? 0) + amount);
  }
  lines(): string[] {
    return [...this.#values].map(([key, value]) => `${this.name}${key} ${value}`);
  }
}

/** A value that is read when it is asked for. */
export class Gauge extends Metric {
  readonly #read: () => readonly (readonly [Labels, number])[];
  constructor(name: string, help: string, read: () => readonly (readonly [Labels, number])[]) {
    super("gauge", name, help);
    this.#read = read;
  }
  lines(): string[] {
    return this.#read().map(([labels, value]) => `${this.name}${labelText(labels)} ${value}`);
  }
}

export class Histogram extends Metric {
  readonly #bounds: readonly number[];
  readonly #values = new Map<string, { buckets: number[]; sum: number; count: number }>();
  /** @param bounds upper bounds of the buckets, rising; +Inf is added */
  constructor(name: string, help: string, bounds: readonly number[]) {
    super("histogram", name, help);
    this.#bounds = bounds;
  }
  observe(labels: Labels, value: number): void {
    const key = keyIn(this.#values, labels);
    const entry = this.#values.get(key) ?? { buckets: this.#bounds.map(() => 0), sum: 0, count: 0 };
    this.#bounds.forEach((bound, index) => {
      if (value <= bound) entry.buckets[index] = (entry.buckets[index] ?? 0) + 1;
    });
    entry.sum += value;
    entry.count += 1;
    this.#values.set(key, entry);
  }
  lines(): string[] {
    return [...this.#values].flatMap(([key, { buckets, sum, count }]) => [
      ...this.#bounds.map((bound, index) => `${this.name}_bucket${withLabel(key, "le", String(bound))} ${buckets[index]}`),
      `${this.name}_bucket${withLabel(key, "le", "+Inf")} ${count}`,
      `${this.name}_sum${key} ${sum}`,
      `${this.name}_count${key} ${count}`,
    ]);
  }
}

/** The page a scraper gets. */
export function renderMetrics(metrics: readonly Metric[]): string {
  return metrics.map((metric) => metric.render()).join("");
}
