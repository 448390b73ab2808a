import { OperatorError } from "../protocol/errors.ts";
import { ONBOARD_CLOCK_MS, ONBOARD_SPACE_BYTES, ONBOARD_STATE_SPACE_BYTES } from "../protocol/limits.ts";
import type { NodeFacts, Room } from "./facts.ts";

/** Oldest glibc the binary runs with. */
const GLIBC = [2, 17] as const;
/** Architectures there are binaries for, as uname and as releases call them. */
const ARCHITECTURES: Readonly<Record<string, "amd64" | "arm64">> = { x86_64: "amd64", aarch64: "arm64" };

/** The release's name of a machine's architecture; null when there is no binary for it. */
export function architectureOf({ arch }: Pick<NodeFacts, "arch">): "amd64" | "arm64" | null {
  return ARCHITECTURES[arch] ?? null;
}

interface Wanted {
  readonly node: string;
  /** Bytes of the binary that is to be uploaded. */
  readonly binary_bytes: number;
  /** Time here when the facts were read. */
  readonly now_ms: number;
}

/** Why a machine cannot become this node as it is; null when it can. Nothing has been changed when this says no. */
export function refusalOf(facts: NodeFacts, wanted: Wanted): OperatorError | null {
  return identityRefusal(facts, wanted) ?? processorRefusal(facts) ?? systemRefusal(facts, wanted);
}

function refuse(what: string, why: string, remedy: string): OperatorError {
  return new OperatorError("E_NODE", what, why, remedy);
}

function identityRefusal({ hostname }: NodeFacts, { node }: Wanted): OperatorError | null {
  const short = hostname.split(".")[0]?.toLowerCase() ?? "";
  if (short === node) return null;
  return refuse(
    `the machine is called ${short}, not ${node}`,
    "a node's id is its host name, and this may be another machine than the one you mean",
    `check --addr, or on the machine: hostnamectl set-hostname ${node}`,
  );
}

function processorRefusal(facts: NodeFacts): OperatorError | null {
  const { arch, cpu_flags, cpu_model } = facts;
  if (architectureOf(facts) === null)
    return refuse(`there is no llmgw for ${arch}`, "it runs on x86_64 and aarch64", "use another machine");
  if (arch !== "x86_64" || cpu_flags.includes("sse4_2")) return null;
  return refuse(
    "the CPU lacks SSE4.2, without which llmgw does not start",
    `it is "${cpu_model}"; a virtual machine shows only what its CPU type allows`,
    "set the VM's CPU type to host (Proxmox: qm set VMID --cpu host), then stop and start the VM",
  );
}

function systemRefusal({ glibc, os, systemd, clock_s, room }: NodeFacts, { now_ms, binary_bytes }: Wanted): OperatorError | null {
  const [major = 0, minor = 0] = (glibc ?? "0.0").split(".").map(Number);
  if (major < GLIBC[0] || (major === GLIBC[0] && minor < GLIBC[1]))
    return refuse(
      `llmgw does not run on ${os || "this system"}`,
      glibc === null ? "it has no glibc" : `it has glibc ${glibc}, and ${GLIBC.join(".")} or newer is needed`,
      "use a newer system, such as Debian 12",
    );
  if (!systemd) return refuse("the machine does not run systemd", "the agent is a systemd service", "start llmgw agent there yourself");
  const ahead_ms = clock_s * 1_000 - now_ms;
  if (Math.abs(ahead_ms) > ONBOARD_CLOCK_MS)
    return refuse(
      `the machine's clock is ${span(Math.abs(ahead_ms))} ${ahead_ms > 0 ? "ahead" : "behind"}`,
      "certificates and logs go by the clock, here or there",
      "on the wrong machine: timedatectl set-ntp true, and wait until timedatectl says synchronized",
    );
  return (
    roomRefusal(room.bin, binary_bytes + ONBOARD_SPACE_BYTES, "/usr/local/bin") ??
    roomRefusal(room.etc, 1024 * 1024, "/etc/llmgw") ??
    roomRefusal(room.state, ONBOARD_STATE_SPACE_BYTES, "/var/lib/llmgw")
  );
}

function roomRefusal({ free_bytes, readonly }: Room, needed: number, place: string): OperatorError | null {
  if (readonly !== null)
    return refuse(`${place} cannot be written`, `${readonly} is read-only for us`, `mount -o remount,rw, or another image`);
  if (free_bytes >= needed) return null;
  const mib = (bytes: number) => `${Math.floor(bytes / 1024 / 1024)} MiB`;
  return new OperatorError(
    "E_NO_ROOM",
    `there is no room in ${place}`,
    `${mib(free_bytes)} are free, ${mib(needed)} are needed`,
    "free some, or give the machine a larger disk",
  );
}

function span(ms: number): string {
  const minutes = Math.round(ms / 60_000);
  return minutes < 120 ? `${minutes} min` : `${Math.round(minutes / 6) / 10} h`;
}
