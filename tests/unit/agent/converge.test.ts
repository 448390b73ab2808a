import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { converge, type Action, type Observed } from "../../../src/agent/converge.ts";
import type { RankLaunch } from "../../../src/protocol/plan.ts";
import { rankLaunch } from "../../fixtures/launch.ts";

const launch = (n: number): RankLaunch => rankLaunch({ attempt: n.toString(16).padStart(16, "0") });
const seen = (n: number, phase: Observed["phase"]): Observed => ({ attempt: launch(n).attempt, phase });

describe("converge", () => {
  test.each<[string, RankLaunch[], Observed[], Action["kind"][]]>([
    ["starts what is new", [launch(1)], [], ["start"]],
    ["leaves what runs", [launch(1)], [seen(1, "ready")], []],
    ["leaves what has ended until the plan drops it", [launch(1)], [seen(1, "exited")], []],
    ["stops what the plan has not", [], [seen(1, "ready")], ["stop"]],
    ["stops a fetch too", [], [seen(1, "fetching")], ["stop"]],
    ["does not stop twice", [], [seen(1, "stopping")], []],
    ["forgets what has ended", [], [seen(1, "exited")], ["forget"]],
    ["stops before it starts", [launch(2)], [seen(1, "ready")], ["stop", "start"]],
  ])("%s", (_what, planned, observed, kinds) => {
    expect(converge(planned, observed).map((action) => action.kind)).toEqual(kinds);
  });

  test("whatever the plan and whatever runs: a planned rank that runs is never touched", () => {
    const phases = fc.constantFrom<Observed["phase"]>("fetching", "starting", "ready", "stopping", "exited");
    const numbers = fc.uniqueArray(fc.nat(20));
    fc.assert(
      fc.property(numbers, numbers, fc.array(phases, { minLength: 21, maxLength: 21 }), (planned, there, how) => {
        const actions = converge(
          planned.map(launch),
          there.map((n) => seen(n, how[n] ?? "ready")),
        );
        for (const action of actions) {
          const attempt = action.kind === "start" ? action.launch.attempt : action.attempt;
          const n = Number.parseInt(attempt, 16);
          if (action.kind === "start") expect(there).not.toContain(n);
          else expect(planned).not.toContain(n);
        }
        const started = actions.filter((action) => action.kind === "start").length;
        expect(started).toBe(planned.filter((n) => !there.includes(n)).length);
      }),
    );
  });
});
