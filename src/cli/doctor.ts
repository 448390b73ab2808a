import { hostname } from "node:os";
import { exitOf, runDoctor } from "../doctor/doctor.ts";
import { parseFabric } from "../hardware/fabric-declaration.ts";
import { REAL_IB_ROOT } from "../hardware/infiniband.ts";
import { agentConfigHere, loadAgentConfig } from "../os/config-file.ts";
import type { DoctorReport, Verdict } from "../protocol/doctor.ts";
import { OperatorError } from "../protocol/errors.ts";
import { command } from "./frame.ts";
import { documentText, printable } from "./output.ts";
import type { Io } from "./spec.ts";

const COLOURS: Readonly<Record<Verdict, number>> = { pass: 32, warn: 33, fail: 31, unknown: 35, skipped: 90 };

/** Lines for people: one per check, the remedy below it; what does not apply is only counted, unless `all`. */
function doctorLines(report: DoctorReport, { all, color }: { all: boolean; color: boolean }): string[] {
  const lines: string[] = [];
  const width = Math.max(...report.checks.map((check) => check.title.length));
  for (const { title, verdict, found, source, remedy } of report.checks) {
    if (verdict === "skipped" && !all) continue;
    const word = verdict.padEnd(7);
    const shown = color ? `\u001b[${COLOURS[verdict]}m${word}\u001b[0m` : word;
    lines.push(`${shown}  ${title.padEnd(width)}  ${printable(found)}${source === "" ? "" : `  [${printable(source)}]`}`);
    if (remedy !== "") lines.push(`${" ".repeat(9)}${" ".repeat(width)}  try: ${printable(remedy)}`);
  }
  const counts = Map.groupBy(report.checks, (check) => check.verdict);
  const words = (["pass", "warn", "fail", "unknown", "skipped"] as const).flatMap((verdict) => {
    const count = counts.get(verdict)?.length ?? 0;
    return count > 0 ? [`${count} ${verdict}`] : [];
  });
  return [...lines, `${report.node}: ${words.join(", ")}`];
}

export const doctorCommand = command({
  name: "doctor",
  about: "Checks whether this machine can be a node, and what is wrong with it",
  examples: [
    "llmgw doctor",
    "llmgw doctor --fabric ib-a --fabric ib-b:mlx5_2,mlx5_3 --server https://10.0.0.1:7443",
    "llmgw doctor --strict -o json",
  ],
  flags: {
    fabric: { type: "list", value: "NAME[:ADAPTER,...]", about: "an InfiniBand fabric and the adapters on it: ib-b:mlx5_2,mlx5_3:1" },
    "nvidia-smi": { type: "string", value: "PATH", about: "nvidia-smi, when it is in no usual place" },
    "ib-root": { type: "string", value: "DIR", about: `InfiniBand devices; ${REAL_IB_ROOT} when absent` },
    server: { type: "string", value: "URL", about: "the server to reach, https://host:port" },
    config: { type: "string", value: "FILE", about: "agent.yaml to take the rest from; /etc/llmgw/agent.yaml when it is there" },
    strict: { type: "boolean", about: "warnings count as failures" },
    all: { type: "boolean", about: "show the checks that do not apply here, too" },
    output: {
      type: "string",
      short: "o",
      value: "FORM",
      choices: ["table", "json", "yaml"],
      default: "table",
      about: "form of the answer",
    },
  },
  args: [],
  run: async ({ flags, io }) => {
    const config = flags.config === undefined ? await agentConfigHere() : await loadAgentConfig(flags.config, {}, io.cwd);
    const server = flags.server ?? config.servers?.[0] ?? null;
    if (server !== null && !URL.canParse(server))
      throw new OperatorError("E_USAGE", `--server ${server} is no address`, "it is no URL", "write https://host:port");
    const nvidia_smi = flags["nvidia-smi"] ?? config.nvidia_smi;
    const report = await runDoctor({
      ...(nvidia_smi !== undefined && { nvidia_smi }),
      ib_root: flags["ib-root"] ?? config.ib_root ?? REAL_IB_ROOT,
      fabrics: (flags.fabric.length > 0 ? flags.fabric : (config.fabrics ?? [])).map(parseFabric),
      server,
      state: config.state,
      tls: config.tls,
      node: config.node ?? hostname().split(".")[0] ?? "",
      note: (text) => io.err(text),
    });
    print(io, flags.output, report, flags.all);
    return exitOf(report, flags.strict);
  },
});

function print(io: Io, form: "table" | "json" | "yaml", report: DoctorReport, all: boolean): void {
  if (form === "table") io.out(doctorLines(report, { all, color: io.color }).join("\n"));
  else io.out(documentText(form, report));
}
