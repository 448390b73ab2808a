import type { GatewayStatus } from "../protocol/gateway-api.ts";
import { COMMIT, VERSION } from "../protocol/version.ts";
import { Counter, Gauge, Histogram, renderMetrics } from "./metrics.ts";
import type { Loads } from "./loads.ts";
import type { Routes } from "./snapshot.ts";
import type { Usage } from "./usage.ts";

const SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300];

/** In flight per replica: an old attempt may end its requests beside the new one, and a series may stand there once only. */
function summed(list: GatewayStatus["loads"]): [replica: string, in_flight: number][] {
  const sums = new Map<string, number>();
  for (const { replica, in_flight } of list) sums.set(replica, (sums.get(replica) ?? 0) + in_flight);
  return [...sums];
}

/** Every metric of the gateway. */
export class GatewayMetrics {
  readonly requests = new Counter("llmgw_gateway_requests_total", "Requests answered, by model and status (499: the client left).");
  readonly upstream_failures = new Counter("llmgw_gateway_upstream_failures_total", "Requests a replica failed, by model.");
  readonly retries = new Counter("llmgw_gateway_retries_total", "Requests tried again on another replica, by model.");
  readonly tokens = new Counter("llmgw_gateway_tokens_total", "Tokens as the engines counted them, by model and kind.");
  readonly first_byte = new Histogram("llmgw_gateway_first_byte_seconds", "Time to the first byte of an answer, by model.", SECONDS);
  readonly duration = new Histogram("llmgw_gateway_duration_seconds", "Time to the end of an answer, by model.", SECONDS);
  readonly #gauges: readonly Gauge[];

  constructor(routes: Routes, loads: Loads) {
    this.#gauges = [
      new Gauge("llmgw_gateway_in_flight", "Requests at each replica now.", () =>
        summed(loads.list()).map(([replica, count]) => [{ replica }, count]),
      ),
      new Gauge("llmgw_gateway_model_in_flight", "Requests at replicas now, by model.", () =>
        routes.models.map(({ model, targets }) => [{ model }, targets.reduce((sum, target) => sum + loads.stateOf(target).in_flight, 0)]),
      ),
      new Gauge("llmgw_gateway_targets", "Replicas that take requests, by model.", () =>
        routes.models.map(({ model, targets }) => [{ model }, targets.filter((target) => target.state === "ready").length]),
      ),
      new Gauge("llmgw_gateway_resident_bytes", "Memory of the gateway process.", () => [[{}, process.memoryUsage.rss()]]),
      new Gauge("llmgw_build_info", "What runs here; always 1.", () => [[{ version: VERSION, commit: COMMIT }, 1]]),
    ];
  }

  countTokens(model: string, { prompt_tokens, completion_tokens }: Usage): void {
    this.tokens.add({ model, kind: "prompt" }, prompt_tokens);
    this.tokens.add({ model, kind: "completion" }, completion_tokens);
  }

  render(): string {
    return renderMetrics([
      this.requests,
      this.upstream_failures,
      this.retries,
      this.tokens,
      this.first_byte,
      this.duration,
      ...this.#gauges,
    ]);
  }
}
