/** What one rank of a gang must know to use its fabric and nothing else. */
interface LaunchNetwork {
  /** `mlx5_2:1`, the node's own names of its ports on the gang's fabric; empty = no fabric. */
  readonly ports: readonly string[];
  /** Network interface that reaches the other ranks: `eth0`. */
  readonly interface: string;
  /** This node's own address on it. */
  readonly address: string;
  /** The NVLink domain's IMEX service was checked and found broken. */
  readonly imex_failed: boolean;
}

/**
 * The environment of one rank. All of it differs from node to node, because names of adapters and interfaces do.
 * `NCCL_IB_GID_INDEX` is left alone: NCCL finds it, and a fixed one goes wrong when an interface comes or goes.
 */
export function launchEnvironment({ ports, interface: network, address, imex_failed }: LaunchNetwork): Record<string, string> {
  const env: Record<string, string> = {
    // With "=" the name is exact: eth1 is not eth10.
    NCCL_SOCKET_IFNAME: `=${network}`,
    GLOO_SOCKET_IFNAME: network,
    TP_SOCKET_IFNAME: network,
    VLLM_HOST_IP: address,
  };
  if (ports.length === 0) return env;
  const devices = [...new Set(ports.map((port) => port.split(":")[0] ?? port))].join(",");
  return {
    ...env,
    NCCL_IB_HCA: `=${ports.join(",")}`,
    // Since NCCL 2.30 unequal counts of adapters are passed over in silence, and then hang.
    NCCL_IGNORE_NET_MISMATCH: "0",
    // NIXL goes through UCX, which else takes every device.
    UCX_NET_DEVICES: ports.join(","),
    NVSHMEM_HCA_LIST: ports.join(","),
    NVSHMEM_ENABLE_NIC_PE_MAPPING: "1",
    MOONCAKE_DEVICE: devices,
    ...(imex_failed && { NCCL_MNNVL_ENABLE: "0" }),
  };
}
