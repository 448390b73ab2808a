import * as v from "valibot";
import { EngineVersion } from "./engine-release.ts";
import { NodeId, type InstallableKind } from "./ids.ts";

/** `host:port`, IPv6 in brackets. */
const HostPort = v.pipe(v.string(), v.regex(/^(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}$/, "write host:port"));
export const LogLevel = v.picklist(["error", "warn", "info", "debug"]);
export type LogLevel = v.InferOutput<typeof LogLevel>;
const Log = v.strictObject({ level: v.optional(LogLevel, "info"), format: v.optional(v.picklist(["text", "json"]), "text") });
const Path = v.pipe(v.string(), v.minLength(1, "a path is needed"));
/** A version of an engine, or "" for none. */
const Version = v.union([v.literal(""), EngineVersion]);
const KeyPair = { cert: Path, key: Path };

/** `server.yaml`. Relative paths are relative to the file. */
export const ServerConfig = v.strictObject({
  /** Addresses of the control listener (agents, ctl) and of the gateway (users). */
  listen: v.optional(
    v.strictObject({ control: v.optional(HostPort, "0.0.0.0:7443"), gateway: v.optional(HostPort, "127.0.0.1:8080") }),
    {},
  ),
  /** The server's own identity and the authority it trusts. */
  tls: v.optional(v.strictObject({ ca: Path, ...KeyPair }), { ca: "tls/ca.crt", cert: "tls/server.crt", key: "tls/server.key" }),
  /** Where the store and the gateway's last snapshot live. */
  state: v.optional(Path, "/var/lib/llmgw/server"),
  /** Where unix sockets live. */
  run: v.optional(Path, "/run/llmgw/server"),
  /** The file that names the models to serve. */
  catalog: v.optional(Path, "catalog.yaml"),
  /**
   * Engine versions the nodes install; "" = leave this engine alone. Absent: those of this release of llmgw for llama.cpp and
   * vLLM, none for SGLang. `mirror` replaces where they come from, for sites without internet.
   */
  engines: v.optional(
    v.strictObject({
      llamacpp: v.optional(Version),
      vllm: v.optional(Version),
      sglang: v.optional(Version),
      mirror: v.optional(v.pipe(v.string(), v.regex(/^https?:\/\/\S+$/, "a mirror is an http(s) URL"))),
    }),
    {},
  ),
  gateway: v.optional(
    v.strictObject({
      /** `none` is accepted only on loopback. */
      auth: v.optional(v.picklist(["keys", "none"]), "keys"),
      /** What the gateway shows to users. Needed off loopback unless `insecure_http` is true. */
      tls: v.optional(v.strictObject(KeyPair)),
      insecure_http: v.optional(v.boolean(), false),
      /** The gateway's client identity at the shims' doors. */
      identity: v.optional(v.strictObject(KeyPair), { cert: "tls/gateway.crt", key: "tls/gateway.key" }),
      /** `child`: the server starts the gateway process; `unit`: something else (systemd) does. */
      process: v.optional(v.picklist(["child", "unit"]), "child"),
    }),
    {},
  ),
  /** How much is logged to stderr, and in which form. */
  log: v.optional(Log, {}),
});
export type ServerConfig = v.InferOutput<typeof ServerConfig>;

/** `agent.yaml`. Every key is also a flag of `llmgw agent`, with `-` for `_`. */
export const AgentConfig = v.strictObject({
  /** Node id; the host name without domain when absent. */
  node: v.optional(NodeId),
  /** Where the control plane is: `https://host:port`. */
  servers: v.pipe(
    v.array(v.pipe(v.string(), v.regex(/^https:\/\//, "a server is https://host:port"))),
    v.minLength(1, "name at least one server"),
  ),
  /** The address the shims' doors bind to and other machines reach this node at. */
  address: v.pipe(v.string(), v.ip("an IP address is needed")),
  /** The node's own identity and the authority it trusts. */
  tls: v.optional(v.strictObject({ ca: Path, ...KeyPair }), { ca: "tls/ca.crt", cert: "tls/node.crt", key: "tls/node.key" }),
  /** Where weights, engines and the logs of ranks live. */
  state: v.optional(Path, "/var/lib/llmgw"),
  /** Where unix sockets live. */
  run: v.optional(Path, "/run/llmgw"),
  /** The program that lists GPUs; looked for in the PATH when absent. */
  nvidia_smi: v.optional(Path),
  /** InfiniBand fabrics this node is on, with their adapters: `ib-b`, `ib-b:mlx5_2,mlx5_3` or `ib-b:mlx5_2:1`. */
  fabrics: v.optional(v.array(v.string())),
  /** The folder that lists InfiniBand devices; /sys/class/infiniband when absent. */
  ib_root: v.optional(Path),
  /** A llama-server to use instead of an installed one. */
  llamacpp_bin: v.optional(Path),
  /** A `vllm` program to use instead of an installed one. */
  vllm_bin: v.optional(Path),
  /** The Python that has SGLang, to use instead of an installed one. */
  sglang_python: v.optional(Path),
  /**
   * Where engines live apart from the agent: each in a `systemd` service of its own, or in a `session`; `auto` takes the first
   * for a root agent under systemd.
   */
  custody: v.optional(v.picklist(["auto", "systemd", "session"]), "auto"),
  /** User the engines run as when the agent is root. */
  engine_user: v.optional(v.string(), "llmgw-engine"),
  /** How much is logged to stderr, and in which form. */
  log: v.optional(Log, {}),
});
export type AgentConfig = v.InferOutput<typeof AgentConfig>;

/** The key of `agent.yaml` that names an engine's program. */
export const ENGINE_PATH_KEYS = {
  llamacpp: "llamacpp_bin",
  vllm: "vllm_bin",
  sglang: "sglang_python",
} as const satisfies Record<InstallableKind, keyof AgentConfig>;

const Whole = (least: number, most: number) => v.pipe(v.number(), v.integer(), v.minValue(least), v.maxValue(most));
const Duration = v.pipe(v.string(), v.regex(/^\d+(ms|s|m|h)?$/, "write a time such as 90s or 5m"));

/** Proxmox's words for a processor: a type, and single features of it. */
const PROCESSOR = /^[A-Za-z0-9][A-Za-z0-9._-]*(,flags=[+-][a-z0-9._-]+(;[+-][a-z0-9._-]+)*)?$/;
const isImageUrl = (text: string) => /^https?:\/\/[^\s/?#@]+\/[^\s]+$/.test(text) && URL.canParse(text);
const isVolume = (text: string) => /^[A-Za-z][A-Za-z0-9._-]*:[A-Za-z0-9][A-Za-z0-9._/+=-]*$/.test(text);
/** Slots a machine has for PCI devices. Source: Proxmox's own qemu-server. */
const PCI_SLOTS_COUNT = 16;

/** What a machine is made of, and where; each key is also a flag (`-` for `_`) and a variable (`LLMGW_` and capitals). */
export const ProvisionFile = v.strictObject({
  /** Number of the machine; the last part of its address when absent. */
  vmid: v.optional(Whole(100, 999_999_999)),
  /** Processor cores; 8 when absent. */
  cores: v.optional(Whole(1, 512)),
  /** Memory in MiB; 32768 when absent. */
  memory: v.optional(Whole(512, 16_777_216)),
  /** Disk in GiB; 60 when absent. */
  disk: v.optional(Whole(8, 65_536)),
  /** Processor type; host when absent, and others cost much. */
  cpu: v.optional(v.pipe(v.string(), v.regex(PROCESSOR, "a processor type, as host or x86-64-v3"))),
  /** Way out of its network; the bridge's when absent. */
  gateway: v.optional(v.pipe(v.string(), v.ipv4("an IPv4 address is needed"))),
  /** Bridge it is on; the one in its network when absent. */
  bridge: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9_]{0,14}$/, "a bridge's name, as vmbr0"))),
  /** VLAN it is in. */
  vlan: v.optional(Whole(1, 4_094)),
  /** MTU of its network card; the bridge's when absent. */
  mtu: v.optional(Whole(576, 65_520)),
  /** Where its disk is kept; the one with most room when absent. */
  storage: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9._-]*$/, "a storage's name, as local-lvm"))),
  /** Cloud image, a URL or a volume; Debian 13's when absent. */
  image: v.optional(
    v.pipe(
      v.string(),
      v.check((text) => isImageUrl(text) || isVolume(text), "a URL without a password in it, or a volume as local:import/debian.qcow2"),
    ),
  ),
  /** Digest of an image at a URL. */
  image_checksum: v.optional(v.pipe(v.string(), v.regex(/^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$/, "write sha256:HEX or sha512:HEX"))),
  /** File with more public keys that may log in. */
  ssh_keys: v.optional(Path),
  /** User the keys are for; root when absent. */
  user: v.optional(v.pipe(v.string(), v.regex(/^[a-z_][a-z0-9_-]{0,31}$/, "a user's name, as root"))),
  /** Mapped PCI devices it gets. */
  hostpci: v.optional(
    v.pipe(
      v.array(v.pipe(v.string(), v.regex(/^[A-Za-z][A-Za-z0-9_-]*$/, "a PCI mapping's name"))),
      v.maxLength(PCI_SLOTS_COUNT, `a machine has ${PCI_SLOTS_COUNT} slots for PCI devices`),
      v.check((names) => new Set(names).size === names.length, "a device can be given once"),
    ),
  ),
  /** Proxmox; the host's own pvesh when absent and this is one. */
  pve_host: v.optional(Path),
  /** Node of the cluster that runs it. */
  pve_node: v.optional(v.pipe(v.string(), v.regex(/^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$/, "a Proxmox node's short name"))),
  /** File with an API token, USER@REALM!NAME=UUID. */
  pve_token_file: v.optional(Path),
  /** User to log in as, with `pve_password_file`. */
  pve_user: v.optional(v.pipe(v.string(), v.regex(/^[^@\s]+@[^@\s]+$/, "write USER@REALM"))),
  /** File with that user's password. */
  pve_password_file: v.optional(Path),
  /** Authority of Proxmox's certificate; the system's when absent. */
  pve_ca: v.optional(Path),
  /** Fingerprint of Proxmox's certificate, instead of an authority. */
  pve_fingerprint: v.optional(
    v.pipe(v.string(), v.regex(/^([0-9A-Fa-f]{2}:){31}[0-9A-Fa-f]{2}$/, "write a SHA-256 fingerprint, AA:BB:...")),
  ),
  /** How long making the machine may take; 10m when absent. */
  timeout: v.optional(Duration),
});
export type ProvisionFile = v.InferOutput<typeof ProvisionFile>;
