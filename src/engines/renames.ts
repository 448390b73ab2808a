import type { EngineKind } from "../protocol/ids.ts";

/**
 * Flags that engines renamed or dropped and what to use now, as their own release notes and error texts say.
 * Only for the remedy in a message: whether a flag is there is read from the engine's own help.
 */
const RENAMED: Readonly<Partial<Record<EngineKind, Readonly<Record<string, string>>>>> = {
  llamacpp: {
    "--mmap": "removed in 0.7.0: use --load-mode mmap",
    "--no-mmap": "removed in 0.7.0: use --load-mode none",
    "--mlock": "removed in 0.7.0: use --load-mode mlock",
    "--direct-io": "removed in 0.7.0: use --load-mode dio",
    "--load-mode": "this build is older than 0.7.0: use --mmap, --no-mmap or --mlock",
    "--draft-max": "renamed: use --spec-draft-n-max",
    "--draft-min": "renamed: use --spec-draft-n-min",
    "--no-ui": "this build is older than May 2026, and calls it --no-webui: install a newer one",
    "--webui": "renamed: use --ui",
    "--no-webui": "renamed: use --no-ui",
    "--system-prompt-file": "removed: send a system message",
    "--grp-attn-n": "removed: use --rope-scaling and --rope-scale",
  },
  vllm: {
    "--task": "removed in 0.13: use --runner and --convert",
    "--disable-log-requests": "removed in 0.12: leave it out, requests are not logged unless --enable-log-requests is given",
    "--enable-reasoning": "removed in 0.10: --reasoning-parser alone is enough",
    "--swap-space": "removed: leave it out",
    "--guided-decoding-backend": "removed: use --structured-outputs-config",
    "--use-v2-block-manager": "removed: leave it out",
    "--num-scheduler-steps": "removed: leave it out",
    "--device": "removed: the platform is found by itself",
    "--shutdown-timeout": "this version is older than 0.18: install a newer one",
    "--nnodes": "this version is older than 0.12 and knows several nodes by Ray alone: install a newer one",
  },
  sglang: {
    "--tp": "an abbreviation that may become ambiguous: use --tp-size",
    "--pp": "ambiguous: use --pp-size",
    "--dp": "an abbreviation that may become ambiguous: use --dp-size",
    "--enable-expert-distribution-metrics": "removed",
    "--prefill-round-robin-balance": "removed",
    "--collect-tokens-histogram": "removed",
  },
};

/** What to use in the place of a flag that an engine renamed or dropped; undefined when nothing is known of it. */
export function renamed(kind: EngineKind, name: string): string | undefined {
  return RENAMED[kind]?.[name];
}
