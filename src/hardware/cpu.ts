/** Features that decide which engine builds run and how fast; others are not reported. */
const KNOWN_FEATURES = ["sse4_2", "avx", "avx2", "avx512f", "fma", "f16c", "bmi2", "asimd", "sve", "i8mm"];

interface Cpu {
  readonly model: string;
  readonly features: readonly string[];
}

/** Reads /proc/cpuinfo (proc(5)): `model name` and `flags` on x64; on arm64 `Features`, and mostly no name. */
export function parseCpuinfo(text: string): Cpu {
  const value = (key: string) => new RegExp(`^${key}\\s*:\\s*(.*)$`, "m").exec(text)?.[1]?.trim();
  const present = new Set((value("flags") ?? value("Features") ?? "").split(/\s+/));
  return { model: value("model name") ?? value("Model") ?? "unknown", features: KNOWN_FEATURES.filter((feature) => present.has(feature)) };
}

/** Reads /proc/meminfo; bytes. */
export function parseMeminfo(text: string): { total: number; available: number } {
  const kib = (key: string) => Number(new RegExp(`^${key}:\\s+(\\d+) kB$`, "m").exec(text)?.[1] ?? 0) * 1_024;
  return { total: kib("MemTotal"), available: kib("MemAvailable") };
}
