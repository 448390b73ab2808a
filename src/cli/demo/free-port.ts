import { createServer } from "node:net";
import { messageOf, OperatorError } from "../../protocol/errors.ts";

/**
 * Binds a TCP port of 127.0.0.1 for a moment and returns it; 0 takes any free one.
 * @throws OperatorError E_EXISTS when the port is taken, E_NOT_ALLOWED when it may not be bound
 */
export function freePort(wanted: number): Promise<number> {
  return new Promise((resolve, reject) => {
    const server = createServer();
    server.once("error", (error: NodeJS.ErrnoException) => {
      const what = `cannot listen on 127.0.0.1:${wanted}`;
      reject(
        error.code === "EADDRINUSE"
          ? new OperatorError("E_EXISTS", what, "another process listens there", "name another --port, or leave it out for a free one")
          : new OperatorError("E_NOT_ALLOWED", what, messageOf(error), "name a --port above 1023, or leave it out for a free one"),
      );
    });
    server.listen(wanted, "127.0.0.1", () => {
      const address = server.address();
      server.close(() => resolve(typeof address === "object" && address ? address.port : wanted));
    });
  });
}
