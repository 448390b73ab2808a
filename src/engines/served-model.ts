import * as v from "valibot";
import type { Probe } from "./engine.ts";

const Models = v.pipe(v.string(), v.parseJson(), v.object({ data: v.array(v.object({ id: v.string() })) }));

/** The last question of every engine: does it serve the model under the name that requests will use? */
export const SERVES_MODEL: Probe = {
  path: "/v1/models",
  judge: (status, body, model) => {
    if (status !== 200) return "loading";
    const models = v.safeParse(Models, body);
    if (!models.success) return { failed: "its /v1/models cannot be read" };
    const names = models.output.data.map(({ id }) => id);
    return names.includes(model) ? "ready" : { failed: `it serves ${names.join(", ") || "no model"}, and not ${model}` };
  },
};
