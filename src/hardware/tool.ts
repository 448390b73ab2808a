/** What a program printed, or why it gave no answer. */
export type ToolAnswer =
  | { readonly code: number; readonly out: string; readonly err: string }
  | {
      readonly failed: "missing" | "not runnable" | "no answer";
      readonly why: string;
      /** Settles when a child that gave no answer has ended after all. */
      readonly gone?: Promise<unknown>;
    };

/** Runs one of the machine's own tools. Tests and doctor's simulations put another in its place. */
export type RunTool = (argv: readonly [string, ...string[]], deadline_ms: number) => Promise<ToolAnswer>;

/**
 * Runs a tool with a deadline. Programs named without a folder are looked for in PATH and the system's own folders. A child that cannot
 * even be killed (a driver in trouble leaves it in state D) is left behind: its end is not waited for.
 */
export const runTool: RunTool = async (argv, deadline_ms) => {
  const [program, ...args] = argv;
  const path = program.includes("/") ? program : Bun.which(program, { PATH: `${process.env["PATH"] ?? ""}:/usr/sbin:/sbin:/usr/bin` });
  if (path === null) return { failed: "missing", why: `there is no ${program} in PATH` };
  let child;
  try {
    child = Bun.spawn([path, ...args], { stdin: "ignore", stdout: "pipe", stderr: "pipe", env: { ...process.env, LC_ALL: "C" } });
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    return { failed: why.includes("ENOENT") ? "missing" : "not runnable", why: `${path}: ${why}` };
  }
  const { promise: late, resolve } = Promise.withResolvers<null>();
  const timer = setTimeout(() => resolve(null), deadline_ms);
  const answer = Promise.all([child.stdout.text(), child.stderr.text(), child.exited]);
  const first = await Promise.race([answer, late]);
  clearTimeout(timer);
  if (first === null) {
    child.kill("SIGKILL");
    child.unref();
    const gone = answer.catch(() => undefined);
    return { failed: "no answer", why: `${path} did not return in ${deadline_ms / 1_000} s`, gone };
  }
  const [out, err, code] = first;
  return { code, out, err };
};
