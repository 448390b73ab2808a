import { connect, createServer, type Server, type Socket } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";

/** One rank of a simulated gang. */
export interface GangSettings {
  readonly rank: number;
  readonly ranks: number;
  readonly master_address: string;
  readonly master_port: number;
  /** All must have found each other within this time. */
  readonly rendezvous_ms: number;
}

/** A gang that has found itself. */
export interface Gang {
  /** Resolves with what was lost when a rank this one depends on is gone. */
  readonly lost: Promise<string>;
  close(): void;
}

const RETRY_MS = 100;
const WELCOME = "all are here\n";

/**
 * Meets the other ranks over TCP, as real engines do: rank 0 waits at the master's port until every other has called
 * with its number, and all hold their connection from then on.
 * @throws Error naming the ranks that did not come in time, or why the port cannot be had
 */
export function meet(settings: GangSettings, say: (line: string) => void): Promise<Gang> {
  return settings.rank === 0 ? receive(settings, say) : call(settings, say);
}

async function receive({ ranks, master_address, master_port, rendezvous_ms }: GangSettings, say: (line: string) => void): Promise<Gang> {
  const callers = new Map<number, Socket>();
  const { promise: lost, resolve: lose } = Promise.withResolvers<string>();
  const { promise: whole, resolve: complete } = Promise.withResolvers<"whole">();
  const server = createServer((socket) => {
    let said = "";
    socket.on("error", () => socket.destroy());
    socket.on("data", (data: Buffer) => {
      said += data.toString();
      const rank = Number(/^rank (\d+)\n/.exec(said)?.[1] ?? 0);
      if (rank < 1 || rank >= ranks || callers.has(rank)) return;
      callers.set(rank, socket);
      say(`rank ${rank} has joined, ${callers.size + 1} of ${ranks} are here`);
      socket.once("close", () => {
        callers.delete(rank);
        lose(`rank ${rank} is gone`);
      });
      if (callers.size === ranks - 1) complete("whole");
    });
  });
  await new Promise<void>((resolve, reject) => server.once("error", reject).listen(master_port, master_address, resolve));
  const over = new AbortController();
  const late = sleep(rendezvous_ms, "late" as const, { signal: over.signal });
  late.catch(() => {});
  const came = await Promise.race([whole, late]);
  over.abort();
  if (came === "late") {
    const missing = Array.from({ length: ranks - 1 }, (_, index) => index + 1).filter((rank) => !callers.has(rank));
    end(server, callers);
    throw new Error(`rendezvous: rank ${missing.join(", ")} did not join within ${rendezvous_ms / 1_000} s`);
  }
  for (const socket of callers.values()) socket.write(WELCOME);
  return { lost, close: () => end(server, callers) };
}

function end(server: Server, callers: ReadonlyMap<number, Socket>): void {
  server.close();
  for (const socket of callers.values()) socket.destroy();
}

async function call(settings: GangSettings, say: (line: string) => void): Promise<Gang> {
  const { rank, master_address, master_port, rendezvous_ms } = settings;
  const end_ms = performance.now() + rendezvous_ms;
  for (;;) {
    const socket = await dial(master_address, master_port);
    if (socket) {
      const { promise: lost, resolve: lose } = Promise.withResolvers<string>();
      const welcome = new Promise<boolean>((resolve) => {
        socket.once("data", () => resolve(true));
        socket.once("close", () => resolve(false));
      });
      socket.once("close", () => lose("rank 0 is gone"));
      socket.write(`rank ${rank}\n`);
      say(`called rank 0 at ${master_address}:${master_port}`);
      if (await welcome) return { lost, close: () => socket.destroy() };
    }
    if (performance.now() > end_ms)
      throw new Error(`rendezvous: rank 0 did not answer at ${master_address}:${master_port} within ${rendezvous_ms / 1_000} s`);
    await sleep(RETRY_MS);
  }
}

function dial(host: string, port: number): Promise<Socket | null> {
  return new Promise((resolve) => {
    const socket = connect(port, host);
    socket.once("connect", () => resolve(socket));
    socket.once("error", () => {
      socket.destroy();
      resolve(null);
    });
  });
}
