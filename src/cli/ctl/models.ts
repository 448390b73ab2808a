import { ModelList, type ModelView } from "../../protocol/admin-api.ts";
import { command } from "../frame.ts";
import { outputFlag, printList } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

/** Who wants another number than the catalog. */
const scaledBy = ({ scaled_by, catalog_replicas }: ModelView) => (scaled_by === "" ? "" : `by ${scaled_by}, catalog ${catalog_replicas}`);

export const modelsCommand = command({
  name: "models",
  about: "Lists the models of the catalog",
  examples: ["llmgw ctl models"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get("/admin/v1/models", ModelList);
    printList(io, flags.output, document.items, {
      columns: [
        { title: "MODEL", cell: (model) => model.name },
        { title: "ENGINE", cell: (model) => model.engine },
        { title: "READY", cell: (model) => `${model.ready}/${model.wanted}`, right: true },
        { title: "NODES EACH", cell: (model) => model.nodes, wide: true, right: true },
        { title: "SCALED", cell: scaledBy, wide: true },
        { title: "GPUS EACH", cell: (model) => model.gpus, wide: true, right: true },
        { title: "SOURCE", cell: (model) => model.source, wide: true },
        { title: "REASON", cell: (model) => model.reason },
      ],
      name: (model) => model.name,
      document,
      empty: "the catalog names no model",
    });
  },
});
