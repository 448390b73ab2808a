import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { signalProcess, startTimeOf } from "../os/process.ts";
import { fetchUnix, isSilence } from "../os/unix-http.ts";
import { OperatorError, parseAs } from "../protocol/errors.ts";
import { GatewayStatus } from "../protocol/gateway-api.ts";
import { GATEWAY_ANSWER_MS, WAIT_POLL_MS } from "../protocol/limits.ts";
import { GATEWAY_SOCKET } from "./gateway.ts";

/** @returns null when no process serves there */
async function statusOf(socket: string): Promise<GatewayStatus | null> {
  try {
    const answer = await fetchUnix(socket, "/status", { signal: AbortSignal.timeout(GATEWAY_ANSWER_MS) });
    return parseAs(GatewayStatus, await answer.json(), "the gateway's answer");
  } catch (error) {
    if (error instanceof OperatorError) throw error;
    if (!isSilence(error)) return null;
    const what = `the gateway behind ${socket} does not answer`;
    throw new OperatorError("E_TIMEOUT", what, "it is there and stands still", `ss -lxp | grep ${socket} names its process`);
  }
}

/**
 * Tells the gateway whose sockets are in the folder `run` to end, and waits until it has: what is in flight ends first.
 * @param told is called once it was told, with the number of requests in flight
 * @returns its process id; null when none answers
 * @throws OperatorError E_TIMEOUT when it stands still
 */
export async function stopGateway(run: string, told: (in_flight: number) => void): Promise<number | null> {
  const status = await statusOf(join(run, GATEWAY_SOCKET));
  if (status === null) return null;
  const { pid, in_flight } = status;
  const started = startTimeOf(pid);
  if (!signalProcess(pid, "SIGTERM", "leader")) return null;
  told(in_flight);
  while (started !== null && startTimeOf(pid) === started) await sleep(WAIT_POLL_MS);
  return pid;
}
