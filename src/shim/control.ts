import { parseAs } from "../protocol/errors.ts";
import { ShimTrust, StopRequest, type ShimSpec } from "../protocol/shim-api.ts";
import type { RankLog } from "./rank-log.ts";
import type { RankState } from "./rank-state.ts";

/** What an agent can ask of a rank. */
interface ControlledRank {
  readonly spec: ShimSpec;
  readonly state: RankState;
  readonly log: RankLog;
  /** Begins to end the rank; returns at once. */
  stop(reason: string): void;
  /** Reads the certificate again and takes the revocations. Rejects when there is none to read. */
  trust(trust: ShimTrust): Promise<void>;
}

/** Answers on a shim's control socket, as `protocol/shim-api.ts` has it. */
export function controlOf(rank: ControlledRank): (request: Request) => Promise<Response> {
  return async (request) => {
    const url = new URL(request.url);
    switch (`${request.method} ${url.pathname}`) {
      case "GET /status":
        return Response.json(await rank.state.next(Number(url.searchParams.get("after") ?? 0)));
      case "GET /spec":
        return Response.json(rank.spec);
      case "POST /stop":
        rank.stop(parseAs(StopRequest, await request.json(), "the stop request").reason);
        return Response.json({});
      case "POST /trust":
        await rank.trust(parseAs(ShimTrust, await request.json(), "the trust message"));
        return Response.json({});
      case "GET /log": {
        const lines = rank.log.tail(Number(url.searchParams.get("lines") ?? 100));
        return new Response(lines.map((line) => `${line}\n`).join(""));
      }
      default:
        return new Response("no such path", { status: 404 });
    }
  };
}
