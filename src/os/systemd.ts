import { existsSync } from "node:fs";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { SYSTEMD_ANSWER_MS } from "../protocol/limits.ts";
import { writeAtomic } from "./files.ts";
import { runProgram, type Ran } from "./run-program.ts";

/** Whether this machine runs under systemd and this process may have it run services. */
export function hasSystemd(): boolean {
  return process.getuid?.() === 0 && existsSync("/run/systemd/system") && Bun.which("systemd-run") !== null;
}

/** A service that lives as long as its first process. */
interface TransientService {
  /** Without `.service`. */
  readonly name: string;
  readonly slice: string;
  readonly description: string;
  readonly argv: readonly [string, ...string[]];
  /** Where its environment is written for systemd to read; made anew, for nobody else to read. */
  readonly environment_file: string;
  /** Its output is put behind what is there. */
  readonly log_file: string;
  /** More of systemd's settings, `Name=value`. */
  readonly properties: readonly string[];
}

const run = (...argv: [string, ...string[]]): Promise<Ran> =>
  runProgram(argv, { env: process.env, cwd: "/", within_ms: SYSTEMD_ANSWER_MS, max_bytes: 64_000 });

/**
 * Has systemd run a program as a service of its own.
 * @returns the process id of its first process, once it runs
 * @throws OperatorError E_SYSTEMD with systemd's own words
 */
export async function startService(service: TransientService, env: NodeJS.ProcessEnv): Promise<number> {
  const { name, slice, description, argv, environment_file, log_file, properties } = service;
  await writeAtomic(environment_file, environmentText(env), 0o600);
  const settings = [
    `EnvironmentFile=${environment_file}`,
    `StandardOutput=append:${log_file}`,
    `StandardError=append:${log_file}`,
    ...properties,
  ].flatMap((setting) => ["--property", setting]);
  const about = ["--quiet", "--collect", "--service-type=exec", `--unit=${name}`, `--slice=${slice}`, `--description=${description}`];
  // systemd would put variables in for a `$`.
  const words = argv.map((word) => word.replaceAll("$", "$$$$"));
  await must("systemd-run", ...about, ...settings, "--", ...words);
  const { out } = await must("systemctl", "show", "--property=MainPID", "--value", `${name}.service`);
  const pid = Number(out.trim());
  if (pid > 0) return pid;
  throw cannot(`${name}.service ended at once`, `see ${log_file}`);
}

/** Kills what is left of a service; nothing when there is none. Never rejects. */
export async function killService(name: string): Promise<void> {
  await run("systemctl", "kill", "--signal=SIGKILL", `${name}.service`).catch(() => {});
}

async function must(...argv: [string, ...string[]]): Promise<Ran> {
  let ran;
  try {
    ran = await run(...argv);
  } catch (error) {
    throw cannot(messageOf(error), `see whether ${argv[0]} works, or set custody: session in agent.yaml`);
  }
  if (ran.code === 0) return ran;
  const words = ran.late ? `it did not answer within ${SYSTEMD_ANSWER_MS / 1_000} s` : ran.err.trim().split("\n").at(-1);
  throw cannot(`${argv[0]}: ${words || `it ended with code ${ran.code}`}`, "see systemctl status, or set custody: session in agent.yaml");
}

const cannot = (why: string, remedy: string) => new OperatorError("E_SYSTEMD", "systemd does not run a service", why, remedy);

/** An environment file (systemd.exec(5)): values between quotation marks; those of several lines cannot be told. */
export function environmentText(env: NodeJS.ProcessEnv): string {
  const lines = Object.entries(env).flatMap(([name, value]) => {
    if (value === undefined || value.includes("\n") || !/^[A-Za-z_][A-Za-z0-9_]*$/.test(name)) return [];
    return [`${name}="${value.replaceAll(/[\\"$`]/g, (sign) => `\\${sign}`)}"`];
  });
  return `${lines.join("\n")}\n`;
}
