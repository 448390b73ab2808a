import { runDoctor } from "../doctor/doctor.ts";
import { parseFabric } from "../hardware/fabric-declaration.ts";
import { FabricWatch } from "../hardware/fabric-watch.ts";
import { gpuNumaNodes } from "../hardware/gpus.ts";
import { REAL_IB_ROOT } from "../hardware/infiniband.ts";
import { installDiags } from "../hardware/install-diags.ts";
import type { Log } from "../os/log.ts";
import type { AgentConfig } from "../protocol/config.ts";
import type { Inventory } from "../protocol/inventory.ts";

/** Gives this node's ports to its fabrics. @throws OperatorError E_CONFIG: an adapter under two fabrics, or one that cannot be */
export async function openFabrics({ fabrics = [], ib_root }: AgentConfig): Promise<FabricWatch> {
  return FabricWatch.open({ fabrics: fabrics.map(parseFabric), gpu_numa: await gpuNumaNodes(), ...(ib_root !== undefined && { ib_root }) });
}

/** What doctor finds on this machine now. Where fabrics are declared, the tools that tell them apart are installed first. */
export async function examine(config: AgentConfig, node: string, log: Log): Promise<NonNullable<Inventory["doctor"]>> {
  const { fabrics = [], ib_root = REAL_IB_ROOT, nvidia_smi, state, tls } = config;
  const silent = { saquery: Bun.which("saquery"), sminfo: Bun.which("sminfo") };
  if (fabrics.length > 0 && silent.saquery === null && silent.sminfo === null) {
    const outcome = await installDiags({ ib_root, is_root: process.getuid?.() === 0 });
    if ("not" in outcome) log.warn("infiniband-diags is missing and is not installed", { why: outcome.not });
    else log.info("subnet managers can be asked", { how: outcome.done });
  }
  const report = await runDoctor({
    ...(nvidia_smi !== undefined && { nvidia_smi }),
    ib_root,
    fabrics: fabrics.map(parseFabric),
    server: null,
    state,
    tls,
    node,
    note: (text) => log.info(text),
  });
  return { at_ms: Date.now(), checks: report.checks.filter((check) => check.verdict !== "skipped") };
}
