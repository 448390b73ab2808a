// ssh to machines that hang up or lie. A real sshd is met by tests/system/ssh.test.ts.
import { expect, test } from "bun:test";
import { createServer, type AddressInfo, type Server, type Socket } from "node:net";
import type { Credential } from "../../../src/onboard/keys.ts";
import { connect, type SshTarget } from "../../../src/onboard/ssh.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";

async function listen(answer: (socket: Socket) => void): Promise<{ server: Server; port: number }> {
  const server = createServer((socket) => {
    socket.on("error", () => {});
    answer(socket);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { server, port: (server.address() as AddressInfo).port };
}

const LIARS: readonly [string, (socket: Socket) => void][] = [
  ["hangs up at once", (socket) => socket.end()],
  ["hangs up after its banner", (socket) => socket.end("SSH-2.0-OpenSSH_9.2\r\n")],
  ["resets", (socket) => socket.resetAndDestroy()],
  ["speaks HTTP", (socket) => socket.end("HTTP/1.1 400 Bad Request\r\n\r\n")],
];

test.each(LIARS)("a machine that %s is waited for, and then given up", async (_name, answer) => {
  const { server, port: at } = await listen(answer);
  try {
    const credentials: Credential[] = [{ shown: "none", method: (username) => ({ type: "none", username }) }];
    const to: SshTarget = { host: "127.0.0.1", port: at, user: "root", credentials, known_hosts: ["/nonexistent/known_hosts"] };
    const error = await connect(to, 2_500, () => {}).catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(OperatorError);
    expect(error).toMatchObject({ code: "E_TIMEOUT" });
  } finally {
    server.close();
  }
});
