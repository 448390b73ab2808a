/**
 * Every bound of llmgw, named once. `docs/reference/limits.md` is generated from this file: one docstring
 * and one exported constant each, units last in the name (`_MS`, `_BYTES`, `_COUNT`).
 */

/** An agent reports at least this often. */
export const REPORT_INTERVAL_MS = 5_000;
/** A node that has not reported for this long is shown as suspect. */
export const NODE_SUSPECT_AFTER_MS = 20_000;
/** A node that has not reported for this long is lost (its grace time). */
export const NODE_LOST_AFTER_MS = 90_000;
/** A blocking query is answered after at most this long, changed or not. */
export const BLOCKING_QUERY_MS = 30_000;
/** Another machine with the same certificate is refused while the first reported within this time. */
export const DUPLICATE_NODE_WINDOW_MS = 30_000;

/** A starting engine must be ready within this time, extended while loading progresses. */
export const ENGINE_START_MS = 600_000;
/** A fetch that receives no byte for this long is stalled and tried again. */
export const FETCH_STALL_MS = 120_000;
/** Running requests get this long to end when their replica drains. */
export const DRAIN_REQUESTS_MS = 600_000;
/** First wait after a failed start; doubles each time. */
export const BACKOFF_FIRST_MS = 2_000;
/** Longest wait after failed starts. */
export const BACKOFF_MAX_MS = 300_000;
/** Failures are forgotten after a replica has been ready for this long. */
export const BACKOFF_FORGET_MS = 600_000;

/** A TLS handshake on any of our doors must end within this time. */
export const HANDSHAKE_MS = 10_000;
/** The headers of a request must have arrived within this time. */
export const HEADERS_MS = 10_000;
/** An idle kept-alive connection is closed after this time. Above the 75 s that common proxies keep. */
export const IDLE_CONNECTION_MS = 90_000;
/** A request body must have arrived within this time. */
export const BODY_MS = 60_000;
/** Largest body of an agent, admin or shim message. */
export const MESSAGE_BODY_BYTES = 8 * 1024 * 1024;
/** Largest body of a request through the gateway. */
export const REQUEST_BODY_BYTES = 32 * 1024 * 1024;
/** Most connections at once on the control listener. */
export const CONTROL_CONNECTIONS_COUNT = 20_000;

/** Engine log kept per attempt, in two files of half this size. */
export const RANK_LOG_BYTES = 8 * 1024 * 1024;
/** A shim's own log kept per attempt, in two files of half this size. */
export const SHIM_LOG_BYTES = 1024 * 1024;
/** Last lines of a dead engine's log that travel with its exit. */
export const EXIT_LOG_LINES_COUNT = 20;
/** Longest text of those lines together; each rank that has ended carries it in every report of its node. */
export const EXIT_LOG_BYTES = 8 * 1024;
/** Longest line of an engine's log that is kept whole. */
export const LOG_LINE_BYTES = 4_096;
/** Attempts whose folders a node keeps per replica, the first failure always among them. */
export const KEPT_ATTEMPTS_COUNT = 5;

/** Longest a unix socket path can be (sun_path of Linux, less its end). */
export const SOCKET_PATH_BYTES = 107;

/** A request waits this long for a replica that is starting before it gets 503. */
export const STARTING_WAIT_MS = 10_000;
/** Requests that may wait for a starting replica at once, per model. */
export const STARTING_WAITERS_COUNT = 256;
/** Most requests in flight in one gateway process. */
export const GATEWAY_IN_FLIGHT_COUNT = 8_192;

/** Longest path or URL of weights in the catalog. */
export const SOURCE_CHARACTERS_COUNT = 4_096;
/** Longest `args` of a catalog entry, written as JSON: they travel with every report of each of its ranks. */
export const MODEL_ARGS_BYTES = 16 * 1024;
/** Most replicas of one model. */
export const MODEL_REPLICAS_COUNT = 1_000;

/** Events kept in the store; the oldest go first. */
export const KEPT_EVENTS_COUNT = 10_000;
/** Events one answer of the admin API lists at most. */
export const LISTED_EVENTS_COUNT = 1_000;
/** A slow reader of a live log is cut off once it has fallen behind by this much. */
export const LOG_FOLLOW_BACKLOG_BYTES = 1024 * 1024;
/** Most lines one log answer holds. */
export const LOG_TAIL_LINES_COUNT = 10_000;

/** Largest file with a secret, a certificate or ssh keys that is read for a new machine. */
export const SMALL_FILE_BYTES = 1024 * 1024;
/** Largest configuration or catalog file that is read. */
export const CONFIG_FILE_BYTES = 4 * 1024 * 1024;
/** Times the aliases (`*name`) of one YAML file may be expanded. */
export const YAML_ALIASES_COUNT = 100;
/** `llmgw ctl` waits this long for the first bytes of an answer. */
export const ADMIN_ANSWER_MS = 30_000;
/** `llmgw ctl events --follow` asks for new events this often. */
export const EVENTS_FOLLOW_MS = 1_000;
/** `llmgw ctl wait` looks this often. */
export const WAIT_POLL_MS = 500;
/** `llmgw ctl drain` goes on waiting for a server that does not answer for this long. */
export const SERVER_AWAY_MS = 300_000;
/** Everything of a demo must be ready within this time. */
export const DEMO_READY_MS = 180_000;
/** The demo looks this often whether it is ready. */
export const DEMO_POLL_MS = 50;
/** The demo's own question must be answered within this time. */
export const DEMO_ANSWER_MS = 60_000;
/** A second request to end a demo counts as impatience only this long after the first. */
export const DEMO_HURRY_MS = 1_000;
/** A process of a demo gets this long to end before it is killed. */
export const DEMO_STOP_MS = 5_000;

/** An engine that is told to stop gets this long for answers that are nearly made, where it can be told. */
export const ENGINE_SHUTDOWN_MS = 5_000;
/** A ready engine with requests in flight that makes no token and no step for this long is stuck: its rank fails. */
export const ENGINE_STUCK_MS = 60_000;
/** While requests are in flight a shim looks this often whether its engine gets on with them. */
export const VITALS_INTERVAL_MS = 5_000;
/** A rank without GPUs whose engine used at least this share of one core is at work, whatever its metrics say. */
export const ENGINE_WORKS_SHARE = 0.2;
/** An engine must print its help within this time: some import all of torch first. */
export const ENGINE_HELP_MS = 180_000;
/** A node must have checked an engine within this time: its version, its help, and a trial. */
export const ENGINE_CHECK_MS = 270_000;
/** Largest help text of an engine that is read. */
export const ENGINE_HELP_BYTES = 4 * 1024 * 1024;
/** Wait between two questions whether an engine is ready. */
export const PROBE_INTERVAL_MS = 100;
/** One question whether an engine is ready must be answered within this time. */
export const PROBE_MS = 20_000;
/** A ready engine whose queue of new connections is full must take a request's connection within this time. */
export const ENGINE_CONNECT_MS = 5_000;
/** Pause before an engine that took no connection is tried again. */
export const ENGINE_CONNECT_PAUSE_MS = 20;
/** A loading engine that took in this much more (read, or in memory) is making progress. */
export const LOADING_STEP_BYTES = 64 * 1024 * 1024;
/** A shim looks this often at what its loading engine has taken in. */
export const LOADING_POLL_MS = 1_000;
/** A process with an owner looks this often whether the owner is there. */
export const OWNER_POLL_MS = 500;
/** A shim whose rank has ended still answers its agent for this long. */
export const SHIM_FAREWELL_MS = 500;
/** What is left of a rank may take this long to die of SIGKILL. */
export const RANK_SWEEP_MS = 10_000;
/** What an engine printed is waited for so long after its end: what it left running may hold its output open. */
export const ENGINE_OUTPUT_MS = 500;
/** The same of a program that was run for an answer. */
export const PROGRAM_OUTPUT_MS = 1_000;

/** nvidia-smi must answer within this time: without persistence it first wakes every GPU. */
export const NVIDIA_SMI_MS = 30_000;
/** An engine must print its version within this time. */
export const ENGINE_VERSION_MS = 30_000;
/** Tries of one download before the attempt that wants it fails. */
export const FETCH_TRIES_COUNT = 5;
/** A try that brings a download this much further does not count among its tries. */
export const FETCH_GROWTH_BYTES = 1024 * 1024;
/** Progress of a download is told this often at most. */
export const FETCH_PROGRESS_MS = 1_000;
/** First wait of an agent before it tries to reach a server again; doubles each time, with jitter. */
export const RECONNECT_FIRST_MS = 500;
/** Longest wait of an agent before it tries to reach a server again. */
export const RECONNECT_MAX_MS = 15_000;
/** Changes on a node are gathered for this long before they are reported. */
export const REPORT_GATHER_MS = 100;
/** A node reads its hardware again after this long. */
export const INVENTORY_INTERVAL_MS = 30_000;
/** A shim must have opened its control socket within this time. */
export const SHIM_START_MS = 15_000;
/** A list of the files of an engine's release must have come within this time. */
export const RELEASE_LISTING_MS = 30_000;
/** Longest list of the files of an engine's release. */
export const RELEASE_LISTING_BYTES = 8 * 1024 * 1024;
/** First wait before a release is looked up again; it doubles up to the longest. */
export const RELEASE_AGAIN_FIRST_MS = 30_000;
/** Longest wait before a release is looked up again. */
export const RELEASE_AGAIN_MAX_MS = 3_600_000;
/** First wait before an engine that could not be installed is tried again; it doubles up to the longest. */
export const INSTALL_AGAIN_FIRST_MS = 10_000;
/** Longest wait before an engine that could not be installed is tried again. */
export const INSTALL_AGAIN_MAX_MS = 1_800_000;
/** Python packages of an engine must be installed within this time. */
export const PACKAGES_INSTALL_MS = 7_200_000;
/** Disk that the packages of vLLM or SGLang need, with what they unpack to. */
export const PACKAGES_ROOM_BYTES = 15 * 1024 * 1024 * 1024;
/** Times its size that an archive of an engine needs of the disk, with what it unpacks to. */
export const ARCHIVE_ROOM_TIMES = 4;
/** Unpacking an archive of an engine, or looking into it, takes no longer. */
export const ARCHIVE_UNPACK_MS = 1_800_000;
/** An archive of an engine has no more files; those of llama.cpp have about a hundred. */
export const ARCHIVE_ENTRIES_COUNT = 20_000;
/** Of the list of an archive's files so much is read. */
export const ARCHIVE_LISTING_BYTES = 8 * 1024 * 1024;
/** Programs that an earlier try to install an engine left end within this time. */
export const INSTALL_SWEEP_MS = 10_000;
/** An engine named by path that failed its proof is proved again after this long, or once its file is another. */
export const ENGINE_PROVE_AGAIN_MS = 300_000;
/** An engine's program must have said which accelerators it sees within this time. */
export const ENGINE_DEVICES_MS = 120_000;
/** An agent joins without waiting longer than this for what its engines say of themselves. */
export const ENGINES_FIRST_LOOK_MS = 5_000;
/** Proxmox must answer a call within this time. */
export const PVE_ANSWER_MS = 30_000;
/** Longest answer of Proxmox that is read. */
export const PVE_ANSWER_BYTES = 16 * 1024 * 1024;
/** Times a question to Proxmox is asked before it counts as unanswered. */
export const PVE_GET_TRIES_COUNT = 3;
/** A question to Proxmox is asked again after this long. */
export const PVE_RETRY_MS = 1_000;
/** `pvesh` must have ended within this time: it ends when what it began has. */
export const PVESH_MS = 1_800_000;
/** A task of Proxmox is looked at again after this long. */
export const PVE_TASK_POLL_MS = 500;
/** Times in a row that Proxmox may fail to tell how a task is, while its proxy starts anew, before nobody waits for the task. */
export const PVE_TASK_FAULTS_COUNT = 20;
/** Longest reason of Proxmox that is shown, in letters. */
export const PVE_REASON_COUNT = 600;
/** Times a call is tried again while another task of Proxmox holds its lock. */
export const PVE_LOCK_TRIES_COUNT = 5;
/** Something at a new machine's address must answer within this time to count as there. */
export const PVE_ADDRESS_PROBE_MS = 700;
/** systemd must have started a service, or answered otherwise, within this time. */
export const SYSTEMD_ANSWER_MS = 30_000;
/** A shim that is to stop and has not answered for this long is killed with all of its rank. */
export const SHIM_SILENT_MS = 20_000;
/** A shim must answer its agent within this time, beyond the wait it was asked for. */
export const SHIM_ANSWER_MS = 10_000;
/** A shim that lives and answers nobody for this long is frozen: it is killed with all of its rank. */
export const SHIM_FROZEN_MS = 60_000;
/** Folders of ended attempts a node keeps at most, for their logs; the oldest go. */
export const KEPT_FOLDERS_COUNT = 100;

/** An answer of known length up to this is read whole before it is passed on, so that a broken one is a clean error. */
export const BUFFERED_ANSWER_BYTES = 8 * 1024 * 1024;
/** A connection of the gateway to a door, with its handshake, must stand within this time. */
export const UPSTREAM_CONNECT_MS = 5_000;
/** The gateway keeps an unused connection to a door for this long; less than a door does. */
export const UPSTREAM_IDLE_MS = 60_000;
/** Unused connections the gateway keeps per door. */
export const UPSTREAM_IDLE_COUNT = 512;
/** A silent connection to a door is probed after this time, so that a machine that vanished is noticed. */
export const UPSTREAM_PROBE_MS = 15_000;
/** Bytes of an answer the gateway holds for a client that reads slower than its engine speaks. */
export const UPSTREAM_BUFFER_BYTES = 256 * 1024;
/** Largest head (status and headers) of an engine's answer. */
export const ANSWER_HEAD_BYTES = 64 * 1024;

/** A node takes a placed rank up within this time, or the rank is placed anew. */
export const TAKE_UP_MS = 60_000;
/** The server waits this much longer than a node's own deadlines before it gives an attempt up. */
export const DEADLINE_MARGIN_MS = 30_000;
/** A draining replica stays at least this long, so that the gateway has taken it out of its routes. */
export const DRAIN_SETTLE_MS = 3_000;
/** A ready engine's memory shows in its node's readings after this time. */
export const RESIDENT_AFTER_MS = 15_000;
/** System memory set aside for an engine beside its weights, when the catalog does not say. */
export const ENGINE_MEMORY_OVERHEAD_BYTES = 256 * 1024 * 1024;
/** GPU memory set aside on each GPU for the driver's own part of a llama.cpp process. */
export const GPU_CONTEXT_BYTES = 512 * 1024 * 1024;
/** Memory set aside on each GPU for what vLLM and SGLang hold beside weights and cache. */
export const GPU_ENGINE_BYTES = 3 * 1024 * 1024 * 1024;
/** Context counted for weights that do not say what they were made for. */
export const UNKNOWN_CONTEXT_TOKENS = 4_096;
/** The most of a GGUF file that is read for its header. */
export const GGUF_HEAD_BYTES = 64 * 1024 * 1024;
/** The first read of a GGUF file for its header; each further one is four times as long. */
export const GGUF_FIRST_READ_BYTES = 1024 * 1024;
/** Most entries of a GGUF header that are read: real ones have some hundred. */
export const GGUF_ENTRIES_COUNT = 10_000;
/** Most layers a model is believed to have. */
export const MODEL_LAYERS_COUNT = 10_000;
/** Longest name of an architecture that weights are believed to give. */
export const ARCHITECTURE_NAME_CHARACTERS_COUNT = 100;
/** A look at weights on a node's disk that takes longer is not waited for: its file system hangs. */
export const WEIGHTS_LOOK_MS = 10_000;
/** Longest `config.json` or index of a model folder that is read. */
export const MODEL_CONFIG_BYTES = 16 * 1024 * 1024;
/** Time in which a header must have come from a source. */
export const WEIGHTS_HEAD_MS = 15_000;
/** Wait before a header that could not be read is asked for again. */
export const WEIGHTS_HEAD_AGAIN_MS = 60_000;
/** A GPU with more than this share of its memory in use by others is not free. */
export const GPU_FOREIGN_USE_SHARE = 0.1;

/** The server looks at its fleet at least this often. */
export const RECONCILE_INTERVAL_MS = 1_000;
/** The server asks its gateway for its state this often. */
export const GATEWAY_STATUS_INTERVAL_MS = 1_000;
/** An answer of the gateway's control socket must come within this time. */
export const GATEWAY_ANSWER_MS = 3_000;
/** A gateway process that lives and answers nothing for this long is frozen: it is killed, and another started. */
export const GATEWAY_FROZEN_MS = 60_000;
/** First wait before a gateway process that died is started again; doubles to BACKOFF_MAX_MS. */
export const GATEWAY_RESTART_MS = 1_000;
/** A question to a node through its agent must be answered within this time. */
export const NODE_REQUEST_MS = 15_000;

/** A question to a port's subnet managers or switches must be answered within this time. */
export const IB_QUERY_MS = 10_000;
/** Answers in a row that share nothing with what is known of a port before they are believed. */
export const FABRIC_DISJOINT_ANSWERS_COUNT = 3;
/** Adapters a node gives to a fabric that is declared by name alone. */
export const ADAPTERS_PER_FABRIC_COUNT = 2;

/** One check of doctor must end within this time. */
export const CHECK_MS = 90_000;
/** Doctor asks this long for a subnet manager that does not answer: a failover takes up to a minute. */
export const MANAGER_WAIT_MS = 65_000;
/** Wait of doctor between two questions to a subnet manager that does not answer. */
export const MANAGER_RETRY_MS = 3_000;
/** A tool of the machine that doctor asks must answer within this time. */
export const DOCTOR_TOOL_MS = 10_000;
/** A node examines itself as doctor does after this long, and reports what it found. */
export const DOCTOR_INTERVAL_MS = 600_000;
/** One step of installing infiniband-diags must end within this time. */
export const INSTALL_MS = 300_000;
/** Doctor tries this long to reach the server. */
export const DOCTOR_REACH_MS = 5_000;

/** A server that has just started places nothing for at most this long while nodes come back or join. */
export const GATHER_MS = 5_000;
/** Nodes that join within this time of each other are counted together before anything is placed. */
export const GATHER_QUIET_MS = 1_000;

/** Ports in a row each rank of a gang is leased for its engine's own links. */
export const GANG_PORTS_COUNT = 16;
/** All ranks of a gang must have found each other within this time. */
export const RENDEZVOUS_MS = 300_000;

/** The system must say within this time who a user is. */
export const USER_LOOKUP_MS = 10_000;
/** An ssh connection to a new node must be logged in within this time, in one try. */
export const SSH_READY_MS = 20_000;
/** Wait between two tries while a machine does not speak ssh yet. */
export const SSH_RETRY_MS = 1_500;
/** Wait between two tries after a refused login; quicker ones make sshd block the address. */
export const SSH_LOGIN_RETRY_MS = 5_000;
/** A machine that was seen booting may refuse our key for this long: its keys arrive after its ssh. */
export const SSH_LOGIN_BOOTING_MS = 60_000;
/** A machine that spoke ssh at once may refuse our key for this long before that is final. */
export const SSH_LOGIN_FINAL_MS = 8_000;
/** A silent ssh connection is asked for a sign of life after this long; the third without one ends it. */
export const SSH_KEEPALIVE_MS = 5_000;
/** A command on a new node must end within this time. */
export const SSH_COMMAND_MS = 60_000;
/** A command that goes over much of a new node's disk, such as the tool for its list of authorities, must end within this time. */
export const SSH_SLOW_COMMAND_MS = 300_000;
/** An upload of which nothing more is taken for this long has stalled. */
export const SSH_STALL_MS = 30_000;
/** Output of a command on a new node that is kept; the rest is dropped. */
export const SSH_OUTPUT_BYTES = 4 * 1024 * 1024;
/** An onboarding starts over this often after its connection was lost; what was done stays done. */
export const ONBOARD_RECONNECTS_COUNT = 3;
/** A node's clock may differ this much from the authority's machine. */
export const ONBOARD_CLOCK_MS = 300_000;
/** From this difference of clocks on, onboarding says so. */
export const ONBOARD_CLOCK_WARN_MS = 5_000;
/** Free space a node needs where its binary goes, besides the binary itself. */
export const ONBOARD_SPACE_BYTES = 64 * 1024 * 1024;
/** Free space a node needs in its state directory. */
export const ONBOARD_STATE_SPACE_BYTES = 1024 * 1024 * 1024;
/** A started agent must be listed by the server within this time. */
export const ONBOARD_JOIN_MS = 60_000;
/** An agent that ended this often since it was started is not waited for. */
export const ONBOARD_RESTARTS_COUNT = 3;
/** An agent that systemd had to start again, and that has run for less than this, is not taken for one that runs. */
export const ONBOARD_SETTLED_MS = 30_000;
/** A node's certificate is called near its end this long before. */
export const CERTIFICATE_WARN_MS = 2_592_000_000;
/** What runs on a node that is removed by force has this long to end. */
export const REMOVE_STOP_MS = 60_000;
/** How often the server is asked for a node that should join. */
export const ONBOARD_JOIN_POLL_MS = 300;
/** How long the viewer certificate is valid with which onboarding asks the server. */
export const ONBOARD_VIEWER_MS = 600_000;

/** At least this many nodes vanishing together freeze the planner: nothing of theirs is replaced. */
export const FREEZE_NODES_COUNT = 3;
/** More than this share of all nodes must vanish together for a freeze. */
export const FREEZE_SHARE = 0.3;
/** Nodes that fall silent within this time of each other vanish together. */
export const FREEZE_WINDOW_MS = 60_000;
/** A gateway tries the door of every replica it has not heard from for this long. */
export const DOOR_CHECK_INTERVAL_MS = 5_000;
