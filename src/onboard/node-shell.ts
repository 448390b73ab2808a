import { createHash } from "node:crypto";
import { OperatorError } from "../protocol/errors.ts";
import type { Ran, Remote, RunOptions } from "./ssh.ts";

/** A machine on which we can do what root can. */
export interface NodeShell {
  /** Runs a program as root and gives what it says, whatever its code. */
  run(argv: readonly string[], options?: RunOptions): Promise<Ran>;
  /** Runs a POSIX shell script as root; its arguments are `$1` and so on. @throws OperatorError E_NODE when it fails */
  script(what: string, text: string, args?: readonly string[], options?: RunOptions): Promise<string>;
  /** Puts a whole file in its place or leaves what is there: written beside, compared, renamed. */
  write(path: string, content: string, mode: number): Promise<void>;
}

/** What sudo says, slowly, on a machine that cannot find its own name. */
const NAMELESS = /unable to resolve host/;

/**
 * The shell of a login: root's own, or that of a user who may become root without a password.
 * @throws OperatorError E_SSH when the user may not
 */
export async function nodeShell(remote: Remote, user: string, host: string, say: (text: string) => void): Promise<NodeShell> {
  const { out, err } = await remote.run(["id", "-u"]);
  const become = out.trim() === "0" ? [] : ["sudo", "-n", "--"];
  if (become.length > 0 && /^\d+$/.test(out.trim())) {
    const tried = await remote.run([...become, "true"]);
    if (tried.code !== 0) throw sudoRefused(user, host, tried);
    if (NAMELESS.test(tried.err)) say("sudo there looks for the machine's own name first, which makes it slow: put it into /etc/hosts");
  } else if (become.length > 0) {
    const said = `${out} ${err}`.trim().replaceAll(/\s+/g, " ").slice(0, 300);
    throw new OperatorError(
      "E_SSH",
      `${user}@${host} runs no commands`,
      `it says: ${said || "nothing"}`,
      "log in as another user with --ssh-user",
    );
  }
  const run = (argv: readonly string[], options?: RunOptions) =>
    remote.run([...become, "env", "LC_ALL=C", ...argv], { what: argv[0] ?? "", ...options });
  const script = async (what: string, text: string, args: readonly string[] = [], options: RunOptions = {}) => {
    const ran = await run(["sh", "-euc", text, "sh", ...args], { what, ...options });
    if (ran.code === 0) return ran.out;
    throw new OperatorError(
      "E_NODE",
      `${what} failed on the node`,
      lastWords(ran),
      "mend that, then onboard again: what is done stays done",
    );
  };
  return {
    run,
    script,
    write: async (path, content, mode) => {
      const digest = createHash("sha256").update(content).digest("hex");
      await script(`writing ${path}`, WRITE, [path, digest, mode.toString(8)], { input: content });
    },
  };
}

/** A connection that is lost ends the input early; what came is then not what the digest says, and nothing is replaced. */
const WRITE = `
umask 077
new="$(dirname "$1")/.llmgw-$$.new"
trap 'rm -f "$new"' EXIT
trap 'exit 1' HUP PIPE TERM
mkdir -p "$(dirname "$1")"
cat > "$new"
[ "$(sha256sum < "$new" | cut -c1-64)" = "$2" ] || { echo "what arrived is not what was sent" >&2; exit 1; }
chmod "$3" "$new"
mv -f "$new" "$1"
`;

/** What a failed program said last, on one line. */
export function lastWords({ code, out, err }: Ran): string {
  const lines = `${out}\n${err}`.trim().split("\n").slice(-3);
  return lines.join("; ").slice(0, 500) || `it ended with code ${code} and said nothing`;
}

function sudoRefused(user: string, host: string, ran: Ran): OperatorError {
  const what = ran.code === 127 ? `there is no sudo on ${host}` : `${user} may not become root on ${host} without a password`;
  const rule = `${user} ALL=(ALL) NOPASSWD: ALL`;
  return new OperatorError("E_SSH", what, lastWords(ran), `--ssh-user root, or put "${rule}" into /etc/sudoers.d/llmgw there`);
}
