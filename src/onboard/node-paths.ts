/** Where llmgw lies on a node. The unit, the packages and the documents name the same places. */
export const NODE_PATHS = {
  binary: "/usr/local/bin/llmgw",
  config: "/etc/llmgw/agent.yaml",
  ca: "/etc/llmgw/tls/ca.crt",
  cert: "/etc/llmgw/tls/node.crt",
  key: "/etc/llmgw/tls/node.key",
  unit: "/etc/systemd/system/llmgw-agent.service",
  state: "/var/lib/llmgw",
} as const;

export const AGENT_UNIT = "llmgw-agent.service";
/** User the engines run as. */
export const ENGINE_USER = "llmgw-engine";
