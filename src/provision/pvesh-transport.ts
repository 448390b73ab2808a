import { hostname } from "node:os";
import { runProgram } from "../os/run-program.ts";
import { PVE_ANSWER_BYTES, PVESH_MS } from "../protocol/limits.ts";
import { AnswerLost, PveError, type PveMethod, type PveParameters, type PveTransport } from "./pve.ts";

const VERBS: Readonly<Record<PveMethod, string>> = { GET: "get", POST: "create", PUT: "set", DELETE: "delete" };

/** Proxmox's API on the host itself, as root, by its own command. What it begins has ended when it answers. */
export class PveshTransport implements PveTransport {
  readonly shown = "pvesh on this host";
  readonly local_node = hostname().split(".")[0] ?? "";

  async request(method: PveMethod, path: string, parameters: PveParameters): Promise<unknown> {
    const words = Object.entries(parameters).flatMap(([name, value]) => {
      if (value === undefined) return [];
      return [`--${name}`, typeof value === "boolean" ? (value ? "1" : "0") : String(value)];
    });
    const argv = ["pvesh", VERBS[method], path, ...words, "--output-format", "json"] as const;
    const ran = await runProgram([...argv], { env: process.env, cwd: "/", within_ms: PVESH_MS, max_bytes: PVE_ANSWER_BYTES });
    if (ran.late) throw new AnswerLost(`pvesh ${VERBS[method]} ${path}: no answer within ${PVESH_MS / 1_000} s`);
    if (ran.code !== 0) throw new PveError(0, reasonOf(ran.err || ran.out), path);
    return documentIn(ran.out);
  }
}

/** Its last words, without what it prints of its usage. */
function reasonOf(text: string): string {
  const lines = text
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "" && !line.startsWith("pvesh ") && !/^USAGE/i.test(line));
  const fields = lines.filter((line) => /^[a-z0-9-]+: /.test(line));
  return (fields.length > 0 ? fields.join("; ") : lines.at(-1)) ?? "pvesh failed without a word";
}

/** What it prints may begin with the log of a task; the document is the last of it. */
function documentIn(text: string): unknown {
  const whole = text.trim();
  for (const candidate of [whole, whole.split("\n").at(-1) ?? ""]) {
    try {
      return JSON.parse(candidate);
    } catch {
      // The next one.
    }
  }
  return whole === "" ? null : whole;
}
