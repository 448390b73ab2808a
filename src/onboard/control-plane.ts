import { randomBytes } from "node:crypto";
import type { GenericSchema, InferOutput } from "valibot";
import { circumstancesNow, issueForMoment } from "../pki/ca-folder.ts";
import { makeDialer } from "../pki/dial.ts";
import { makeIdentity } from "../pki/identity.ts";
import { EventList, NodeList, StatusView, type EventView, type NodeView } from "../protocol/admin-api.ts";
import { messageOf, OperatorError, parseAs } from "../protocol/errors.ts";
import { ADMIN_ANSWER_MS, ONBOARD_VIEWER_MS } from "../protocol/limits.ts";

const DAY_MS = 86_400_000;
const EVENTS_COUNT = 200;

/** What onboarding asks of the servers. */
export interface ControlPlane {
  /** The server's clock. @throws OperatorError when no server answers, or none trusts this authority */
  clock(): Promise<number>;
  node(id: string): Promise<NodeView | null>;
  /** What happened to a node since then, oldest first. */
  events(id: string, since_ms: number): Promise<EventView[]>;
}

/** Asks the servers with a viewer's certificate that is made now and ends in ten minutes. */
export async function askServers(servers: readonly string[], ca_folder: string): Promise<ControlPlane> {
  // A name of its own: a later certificate of one name supersedes the earlier, and two onboardings may run at once.
  const name = `onboard-${randomBytes(4).toString("hex")}`;
  const subject = { name, role: "viewer", ips: [], dns: [], days: ONBOARD_VIEWER_MS / DAY_MS } as const;
  const pem = await issueForMoment(ca_folder, subject, circumstancesNow());
  const names = { ca: `${ca_folder}/ca.crt`, cert: "the viewer's certificate", key: "the viewer's key" };
  const dialer = makeDialer(makeIdentity(pem, names));
  const get = async <S extends GenericSchema>(path: string, schema: S): Promise<InferOutput<S>> => {
    const faults: OperatorError[] = [];
    for (const server of servers) {
      try {
        const url = `${server.replace(/\/$/, "")}${path}`;
        const response = await dialer.request(url, { signal: AbortSignal.timeout(ADMIN_ANSWER_MS), expect: { role: "server" } });
        if (!response.ok) throw new OperatorError("E_UNREACHABLE", `${server} answered ${response.status}`, path, "see the server's log");
        return parseAs(schema, await response.json(), `the answer of ${server}`);
      } catch (error) {
        faults.push(error instanceof OperatorError ? error : silent(server, error));
      }
    }
    throw faults[0] ?? new OperatorError("E_USAGE", "no server was named", "--server is missing", "--server https://ADDRESS:7443");
  };
  return {
    clock: async () => (await get("/admin/v1/status", StatusView)).now_ms,
    node: async (id) => (await get("/admin/v1/nodes", NodeList)).items.find((node) => node.id === id) ?? null,
    events: async (id, since_ms) => {
      const { items } = await get(`/admin/v1/events?limit=${EVENTS_COUNT}`, EventList);
      return items.filter(({ subject: about, at_ms }) => about === `node/${id}` && at_ms >= since_ms);
    },
  };
}

function silent(server: string, error: unknown): OperatorError {
  return new OperatorError("E_UNREACHABLE", `${server} did not answer`, messageOf(error), "systemctl status llmgw-server on that host");
}
