// build.ts puts the real values in their place; a run from the sources says "dev".
declare const LLMGW_VERSION: string | undefined;
declare const LLMGW_COMMIT: string | undefined;

/** The version of this llmgw: `0.1.0`. */
export const VERSION: string = typeof LLMGW_VERSION === "string" ? LLMGW_VERSION : "dev";
/** The commit it was built from, or "unknown". */
export const COMMIT: string = typeof LLMGW_COMMIT === "string" ? LLMGW_COMMIT : "unknown";
