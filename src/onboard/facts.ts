import * as v from "valibot";
import { OperatorError, parseAs } from "../protocol/errors.ts";
import { ONBOARD_SETTLED_MS } from "../protocol/limits.ts";
import { ENGINE_USER, NODE_PATHS } from "./node-paths.ts";

/** Which tool goes with which folder: Debian and Alpine, Fedora, SUSE, Arch. */
const TRUST_STORES: readonly (readonly [string, string])[] = [
  ["update-ca-trust", "/etc/pki/ca-trust/source/anchors"],
  ["update-ca-certificates", "/etc/pki/trust/anchors"],
  ["update-ca-trust", "/etc/ca-certificates/trust-source/anchors"],
  ["update-ca-certificates", "/usr/local/share/ca-certificates"],
];

/**
 * Looks at a machine and changes nothing; its argument is the node id. Prints `name value` lines between
 * two marks, by POSIX sh and what every distro has. The text of a file is one line of base64.
 */
export const FACTS_SCRIPT = `
say() { printf '%s %s\\n' "$1" "$2"; }
sum() { if [ -r "$2" ]; then say "$1" "$(sha256sum < "$2" | cut -d' ' -f1)"; fi; }
text() { if [ -r "$2" ]; then say "$1" "$(head -c 65536 < "$2" | base64 | tr -d '\\n')"; fi; }
above() { at=$1; while [ ! -d "$at" ]; do at=$(dirname "$at"); done; printf %s "$at"; }
room() { at=$(above "$2"); say "$1_free" "$(df -Pk "$at" | awk 'NR == 2 { print $4 }')"; [ -w "$at" ] || say "$1_readonly" "$at"; }
echo llmgw-facts-begin
say clock "$(date +%s)"
say hostname "$(uname -n)"
say arch "$(uname -m)"
say cpu "$(sed -n 's/^\\(flags\\|Features\\)[[:space:]]*: *//p' /proc/cpuinfo | head -n 1)"
say cpu_model "$(sed -n 's/^model name[[:space:]]*: *//p' /proc/cpuinfo | head -n 1)"
say libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
say os "$(. /etc/os-release 2>/dev/null; printf %s "$PRETTY_NAME")"
if [ -d /run/systemd/system ]; then say systemd yes; fi
room bin ${NODE_PATHS.binary.replace(/\/[^/]*$/, "")}
room etc /etc/llmgw
room state ${NODE_PATHS.state}
for tool in update-ca-certificates update-ca-trust; do command -v $tool >/dev/null 2>&1 && say trust_tool $tool; done
for at in ${TRUST_STORES.map(([, folder]) => folder).join(" ")}; do
  if [ -d "$at" ]; then say trust_folder "$at"; fi
  sum "trusted:$at" "$at/llmgw-ca.crt"
done
if getent passwd ${ENGINE_USER} >/dev/null 2>&1; then say engine_user yes; fi
sum binary ${NODE_PATHS.binary}
sum unit ${NODE_PATHS.unit}
sum ca ${NODE_PATHS.ca}
text cert ${NODE_PATHS.cert}
text config ${NODE_PATHS.config}
if [ -s ${NODE_PATHS.key} ]; then say key yes; fi
if [ -s ${NODE_PATHS.key} ] && [ -x ${NODE_PATHS.binary} ]; then
  say csr "$(timeout 10 ${NODE_PATHS.binary} keygen --node "$1" 2>/dev/null | base64 | tr -d '\n')"
fi
say active "$(systemctl is-active llmgw-agent 2>/dev/null)"
say enabled "$(systemctl is-enabled llmgw-agent 2>/dev/null)"
show() { systemctl show -p "$1" llmgw-agent 2>/dev/null | cut -d= -f2; }
if [ "$(show NeedDaemonReload)" = yes ]; then say unread yes; fi
say restarts "$(show NRestarts)"
say active_since_us "$(show ActiveEnterTimestampMonotonic)"
say uptime_s "$(cut -d. -f1 /proc/uptime)"
echo llmgw-facts-end
`;

const Yes = v.optional(v.literal("yes"));
const FreeKiB = v.pipe(v.string(), v.regex(/^\d+$/, "not a number of KiB"));
const Digest = v.optional(v.pipe(v.string(), v.regex(/^[0-9a-f]{64}$/, "not a sha256 digest")));
const Count = v.optional(v.pipe(v.string(), v.regex(/^\d+$/, "not a number"), v.transform(Number)), "0");
const OptionalText = v.optional(v.string(), "");

const Lines = v.object({
  clock: v.pipe(v.string(), v.regex(/^\d+$/, "not a time")),
  hostname: v.string(),
  arch: v.string(),
  cpu: OptionalText,
  cpu_model: OptionalText,
  libc: OptionalText,
  os: OptionalText,
  systemd: Yes,
  bin_free: FreeKiB,
  bin_readonly: v.optional(v.string()),
  etc_free: FreeKiB,
  etc_readonly: v.optional(v.string()),
  state_free: FreeKiB,
  state_readonly: v.optional(v.string()),
  engine_user: Yes,
  binary: Digest,
  unit: Digest,
  ca: Digest,
  cert: v.optional(v.string()),
  config: v.optional(v.string()),
  key: Yes,
  csr: v.optional(v.string()),
  active: OptionalText,
  enabled: OptionalText,
  unread: Yes,
  restarts: Count,
  active_since_us: Count,
  uptime_s: Count,
});

/** Free bytes of a folder's file system; `readonly` names the folder when nothing can be written there. */
export interface Room {
  readonly free_bytes: number;
  readonly readonly: string | null;
}

/** How the machine's own list of authorities is kept. */
interface TrustStore {
  readonly tool: string;
  /** The file our authority goes into. */
  readonly file: string;
  /** Digest of the file that is there; null when there is none. */
  readonly digest: string | null;
}

/** A machine as it is now. Digests are sha256 in hex; what is not there is null or "". */
export interface NodeFacts {
  readonly clock_s: number;
  readonly hostname: string;
  /** As uname has it: x86_64, aarch64. */
  readonly arch: string;
  readonly cpu_flags: readonly string[];
  readonly cpu_model: string;
  /** Version of glibc; null for another C library. */
  readonly glibc: string | null;
  readonly os: string;
  readonly systemd: boolean;
  readonly room: { readonly bin: Room; readonly etc: Room; readonly state: Room };
  readonly trust: TrustStore | null;
  readonly engine_user: boolean;
  readonly binary: string | null;
  readonly unit: string | null;
  readonly ca: string | null;
  readonly cert: string | null;
  readonly config: string | null;
  readonly key: boolean;
  /** A certificate request with the key that is there; null when it or the program is missing. */
  readonly csr: string | null;
  readonly active: string;
  readonly enabled: string;
  /** The agent's unit, or a drop-in of it, is another than systemd knows. */
  readonly unread: boolean;
  /** systemd had to start the agent again, and not long ago: it may only look as if it ran. */
  readonly restless: boolean;
}

/**
 * Reads what {@link FACTS_SCRIPT} printed.
 * @throws OperatorError E_SSH when it did not run (a login that only prints a notice), E_BAD_REQUEST
 */
export function parseFacts(output: string): NodeFacts {
  const begin = output.indexOf("llmgw-facts-begin\n");
  const end = output.indexOf("\nllmgw-facts-end");
  if (begin < 0 || end < begin)
    throw new OperatorError(
      "E_SSH",
      "the login runs no commands",
      `it says: ${output.trim().replaceAll(/\s+/g, " ").slice(0, 300) || "nothing"}`,
      "log in as another user with --ssh-user",
    );
  const pairs = output
    .slice(begin, end)
    .split("\n")
    .slice(1)
    .map((line) => [line.slice(0, line.indexOf(" ")), line.slice(line.indexOf(" ") + 1).trim()] as const);
  const all = (name: string) => pairs.filter(([key]) => key === name).map(([, value]) => value);
  const said = parseAs(Lines, Object.fromEntries(pairs.filter(([, value]) => value !== "")), "what the machine says of itself");
  const folders = all("trust_folder");
  const store = TRUST_STORES.find(([tool, folder]) => all("trust_tool").includes(tool) && folders.includes(folder));
  const room = (free: string, readonly: string | undefined) => ({ free_bytes: Number(free) * 1_024, readonly: readonly ?? null });
  const decode = (text: string | undefined) => (text === undefined ? null : Buffer.from(text, "base64").toString("utf8"));
  return {
    clock_s: Number(said.clock),
    hostname: said.hostname,
    arch: said.arch,
    cpu_flags: said.cpu.split(" ").filter((flag) => flag !== ""),
    cpu_model: said.cpu_model,
    glibc: /^glibc (\d+\.\d+)/.exec(said.libc)?.[1] ?? null,
    os: said.os,
    systemd: said.systemd === "yes",
    room: {
      bin: room(said.bin_free, said.bin_readonly),
      etc: room(said.etc_free, said.etc_readonly),
      state: room(said.state_free, said.state_readonly),
    },
    trust: store ? { tool: store[0], file: `${store[1]}/llmgw-ca.crt`, digest: all(`trusted:${store[1]}`)[0] ?? null } : null,
    engine_user: said.engine_user === "yes",
    binary: said.binary ?? null,
    unit: said.unit ?? null,
    ca: said.ca ?? null,
    cert: decode(said.cert),
    config: decode(said.config),
    key: said.key === "yes",
    csr: decode(said.csr),
    active: said.active,
    enabled: said.enabled,
    unread: said.unread === "yes",
    restless: said.restarts > 0 && (said.uptime_s - said.active_since_us / 1e6) * 1_000 < ONBOARD_SETTLED_MS,
  };
}
