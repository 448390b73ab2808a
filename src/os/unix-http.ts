import { chmod, rm } from "node:fs/promises";
import { connect } from "node:net";
import { OperatorError, messageOf } from "../protocol/errors.ts";
import { SOCKET_PATH_BYTES } from "../protocol/limits.ts";

export interface UnixServer {
  /** Stops listening and ends what is open. */
  close(): Promise<void>;
}

/**
 * Serves HTTP on a unix socket that only this user can open (mode 0600; keep it in a private folder too).
 * A socket file nobody listens on is replaced; no other is.
 * @throws OperatorError E_EXISTS when another process serves there, E_FILE when the path is too long
 */
export async function serveUnix(path: string, handler: (request: Request) => Response | Promise<Response>): Promise<UnixServer> {
  if (Buffer.byteLength(path) > SOCKET_PATH_BYTES) {
    throw new OperatorError(
      "E_FILE",
      `cannot listen on ${path}`,
      `a socket path holds at most ${SOCKET_PATH_BYTES} bytes`,
      "set a shorter `run` folder",
    );
  }
  if (await isServed(path)) {
    throw new OperatorError("E_EXISTS", `cannot listen on ${path}`, "another process serves there", "stop it, or set another `run` folder");
  }
  await rm(path, { force: true });
  const server = Bun.serve({
    unix: path,
    // Held answers would be cut after 10 s; our own callers bring their own deadlines. The types of Bun 1.4.5 do
    // not know that it obeys idleTimeout on unix sockets, and its `server.timeout(request, 0)` does not (tried).
    ...({ idleTimeout: 0 } as object),
    fetch: handler,
    error: (error) => new Response(messageOf(error), { status: 500 }),
  });
  await chmod(path, 0o600);
  return {
    close: async () => {
      await server.stop(true);
      await rm(path, { force: true });
    },
  };
}

/** Whether a process listens there, also one that stands still just now: what it serves is not taken from it. */
function isServed(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect(path);
    const is = (served: boolean) => {
      socket.destroy();
      resolve(served);
    };
    socket.once("connect", () => is(true));
    socket.once("error", ({ code }: NodeJS.ErrnoException) => is(code !== "ENOENT" && code !== "ECONNREFUSED" && code !== "ENOTSOCK"));
  });
}

/** Whether a question was taken and its time ran out: whoever it was for is there, and does not get on. */
export const isSilence = (error: unknown): boolean => error instanceof Error && error.name === "TimeoutError";

/** Asks a program that serves HTTP on a unix socket. Rejects as `fetch` does when nothing answers. */
export function fetchUnix(path: string, target: string, init: RequestInit = {}): Promise<Response> {
  return fetch(`http://localhost${target}`, { ...init, unix: path, decompress: false } as RequestInit);
}
