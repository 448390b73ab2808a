import type { Check } from "./check.ts";
import { FABRIC_CHECKS } from "./fabric-checks.ts";
import { GPU_CHECKS } from "./gpu-checks.ts";
import { HOST_CHECKS } from "./host-checks.ts";
import { NVLINK_CHECKS } from "./nvlink-checks.ts";
import { RDMA_CHECKS } from "./rdma-checks.ts";
import { SERVER_CHECKS } from "./server-checks.ts";

/** Every check, in the order in which they are told. */
export const CHECKS: readonly Check[] = [
  ...HOST_CHECKS,
  ...SERVER_CHECKS,
  ...GPU_CHECKS,
  ...NVLINK_CHECKS,
  ...FABRIC_CHECKS,
  ...RDMA_CHECKS,
];
