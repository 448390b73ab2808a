import type { IncomingMessage, ServerResponse } from "node:http";
import * as v from "valibot";
import { makeLog } from "../../../src/os/log.ts";
import type { Identity } from "../../../src/pki/identity.ts";
import { listenMutualTls } from "../../../src/pki/listener.ts";
import { Trust } from "../../../src/pki/trust.ts";
import { JoinRequest, PollRequest, Report, ResultMessage } from "../../../src/protocol/agent-api.ts";
import type { NodeRequest, RankStatus } from "../../../src/protocol/agent-api.ts";
import { OperatorError } from "../../../src/protocol/errors.ts";
import type { ErrorCode } from "../../../src/protocol/errors.ts";
import { comparePlanVersions } from "../../../src/protocol/plan.ts";
import type { NodePlan, PlanVersion, RankLaunch, Revocation } from "../../../src/protocol/plan.ts";
import { PROTOCOL } from "../../../src/protocol/protocol.ts";
import { until } from "../shim/rank-for-tests.ts";

/** A control plane that hands out what a test tells it to, and keeps what it is told. */
export interface TestServer {
  readonly url: string;
  readonly joins: JoinRequest[];
  readonly reports: Report[];
  readonly results: Map<string, ResultMessage["result"]>;
  /** Errors the next joins get, in order. */
  readonly refusals: ErrorCode[];
  /** A new plan with these ranks. */
  plan(ranks: readonly RankLaunch[], version?: PlanVersion): PlanVersion;
  revoke(revocations: Revocation[]): void;
  request(request: NodeRequest): Promise<ResultMessage["result"]>;
  /** Forgets its session, as a server that was started again. */
  forget(): void;
  /** Waits until the newest word of the node about an attempt fits. */
  sees(attempt: string, what: string, fits: (status: RankStatus) => boolean): Promise<RankStatus>;
  /** Says the plan again under a new version, and waits for what the node reports after it has heard. */
  fresh(): Promise<Report>;
  close(): Promise<void>;
}

export async function testServer(identity: Identity, port = 0): Promise<TestServer> {
  const joins: JoinRequest[] = [];
  const reports: Report[] = [];
  const results: TestServer["results"] = new Map();
  const refusals: ErrorCode[] = [];
  const waiting = new Set<() => void>();
  let session = "";
  let plan: NodePlan | null = null;
  let revocations: Revocation[] = [];
  let requests: NodeRequest[] = [];
  let changes = 0;
  let told = "[]";
  const changed = () => {
    changes += 1;
    for (const wake of waiting) wake();
  };

  async function poll({ have }: PollRequest, response: ServerResponse): Promise<unknown> {
    const seen = changes;
    const isNew = () => plan !== null && comparePlanVersions(plan.version, have) !== 0;
    if (!isNew() && requests.length === 0 && JSON.stringify(revocations) === told) {
      await new Promise<void>((resolve) => {
        const done = () => {
          if (changes === seen && !response.destroyed) return;
          waiting.delete(done);
          resolve();
        };
        waiting.add(done);
        response.once("close", done);
      });
    }
    const answer = { plan: isNew() ? plan : null, requests, revocations };
    requests = [];
    told = JSON.stringify(revocations);
    return answer;
  }

  async function answer(request: IncomingMessage, response: ServerResponse): Promise<unknown> {
    const body: unknown = JSON.parse(await new Response(request as unknown as ReadableStream).text());
    const [, , , call, id = ""] = (request.url ?? "").split("/");
    if (call === "join") {
      const refusal = refusals.shift();
      if (refusal) throw new OperatorError(refusal, "not now", "the test says so", "wait");
      joins.push(v.parse(JoinRequest, body));
      session = `session-${joins.length}`;
      return { protocol: PROTOCOL, session, version: "test", clock_ms: Date.now() };
    }
    if ((body as { session?: string }).session !== session) throw new OperatorError("E_STALE_SESSION", "join again", "it is old", "join");
    if (call === "poll") return poll(v.parse(PollRequest, body), response);
    if (call === "report") {
      reports.push(v.parse(Report, body));
      return { clock_ms: Date.now() };
    }
    results.set(id, v.parse(ResultMessage, body).result);
    return {};
  }

  const listener = await listenMutualTls({
    host: "127.0.0.1",
    port,
    identity,
    trust: new Trust(identity.ca),
    roles: ["node"],
    log: makeLog({ level: "error", format: "text" }),
    now: Date.now,
    handle: async (request, response) => {
      try {
        response.end(JSON.stringify(await answer(request, response)));
      } catch (error) {
        if (!(error instanceof OperatorError)) throw error;
        response.writeHead(error.status).end(JSON.stringify(error.toWire()));
      }
    },
  });
  const newest = () => reports.at(-1)?.ranks ?? [];
  return {
    url: `https://127.0.0.1:${listener.port}`,
    joins,
    reports,
    results,
    refusals,
    plan: (ranks, version) => {
      const next = version ?? { epoch: 1, generation: (plan?.version.generation ?? 0) + 1 };
      plan = { version: next, node: "a", ranks: [...ranks] };
      changed();
      return next;
    },
    revoke: (list) => {
      revocations = list;
      changed();
    },
    request: (request) => {
      requests.push(request);
      changed();
      return until("an answer", () => results.get(request.id) ?? null);
    },
    forget: () => {
      session = "";
      changed();
    },
    sees: (attempt, what, fits) =>
      until(what, () => newest().find((status) => status.attempt === attempt && fits(status)) ?? null).catch((error: Error) => {
        throw new Error(`${error.message}; the node says ${JSON.stringify(newest())}`);
      }),
    fresh: async () => {
      const { epoch, generation } = plan?.version ?? { epoch: 1, generation: 0 };
      const version = { epoch, generation: generation + 1 };
      plan = { version, node: "a", ranks: plan?.ranks ?? [] };
      changed();
      return until("a report", () => reports.find(({ seen }) => comparePlanVersions(seen, version) === 0) ?? null);
    },
    close: () => listener.close(),
  };
}
