import { createServer } from "node:net";
import { networkInterfaces } from "node:os";
import { launchEnvironment } from "../hardware/launch-environment.ts";
import type { GangLaunch, RankLaunch } from "../protocol/plan.ts";

/** The network interface that has an address, or null when none has. */
function interfaceOf(address: string, interfaces: ReturnType<typeof networkInterfaces> = networkInterfaces()): string | null {
  const found = Object.entries(interfaces).find(([, addresses]) => addresses?.some((each) => each.address === address));
  // Linux answers on all of 127.0.0.0/8 by the one loopback interface, which lists 127.0.0.1 alone.
  return found?.[0] ?? (address.startsWith("127.") ? "lo" : null);
}

/** What an engine's communication library must be told so that a rank of a gang uses its fabric and nothing else. */
export function gangEnvironment({ door, gang }: RankLaunch): Record<string, string> {
  if (!gang) return {};
  const network = interfaceOf(door.address);
  if (network === null) throw new Error(`no network interface of this machine has the address ${door.address}`);
  return launchEnvironment({ ports: gang.adapters, interface: network, address: door.address, imex_failed: gang.imex_failed });
}

/** The first of a gang's leased ports that somebody else has, or null when all are free. */
export async function takenPort(address: string, { first, count }: GangLaunch["ports"]): Promise<number | null> {
  for (let port = first; port < first + count; port++) if (!(await isFree(address, port))) return port;
  return null;
}

/** Whether nobody listens on a port of one of this machine's addresses. */
export function isFree(address: string, port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer()
      .once("error", () => resolve(false))
      .listen(port, address, () => server.close(() => resolve(true)));
  });
}
