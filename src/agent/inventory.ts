import { discoverHardware } from "../hardware/discover.ts";
import { userOf } from "../os/user.ts";
import type { AgentConfig } from "../protocol/config.ts";
import type { FabricPort, Inventory } from "../protocol/inventory.ts";

/** The user engines run as: only root can choose, and only one there is. Null = engines run as the agent does. */
export async function engineUserOf({ engine_user }: AgentConfig): Promise<string | null> {
  return process.getuid?.() === 0 && (await userOf(engine_user)) !== null ? engine_user : null;
}

/**
 * What the machine is and has now; which engines it has is another's affair.
 * @param ports InfiniBand ports as they were last seen
 */
export async function readInventory(config: AgentConfig, ports: readonly FabricPort[]): Promise<Inventory> {
  const { nvidia_smi, state, engine_user } = config;
  const hardware = await discoverHardware({ state, ...(nvidia_smi !== undefined && { nvidia_smi }) });
  const missing = process.getuid?.() === 0 && (await engineUserOf(config)) === null;
  const text = `engines run as root: there is no user ${engine_user}`;
  const warnings = missing ? [{ code: "engine-user-missing", text }] : [];
  return { ...hardware, engines: [], ports: [...ports], warnings: [...hardware.warnings, ...warnings] };
}
