import { FabricList, type FabricView } from "../../protocol/admin-api.ts";
import { command } from "../frame.ts";
import { outputFlag, printable, printList, type Column } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

const COLUMNS: readonly Column<FabricView>[] = [
  { title: "FABRIC", cell: (fabric) => fabric.name },
  { title: "NODES", cell: (fabric) => fabric.nodes.length, right: true },
  { title: "PROVED", cell: (fabric) => (fabric.proved ? "yes" : "no: no subnet manager answers") },
  { title: "DECLARED AS", cell: (fabric) => fabric.declared.join(", ") },
  { title: "ON IT", cell: (fabric) => fabric.nodes.join(", ") },
  { title: "SUBNET MANAGERS", cell: (fabric) => fabric.managers.join(", "), wide: true },
];

export const fabricsCommand = command({
  name: "fabrics",
  about: "Lists the InfiniBand fabrics and the nodes on each",
  examples: ["llmgw ctl fabrics", "llmgw ctl fabrics -o wide"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get("/admin/v1/fabrics", FabricList);
    printList(io, flags.output, document.items, {
      columns: COLUMNS,
      name: (fabric) => fabric.name,
      document,
      empty: "no node declares a fabric: llmgw agent --fabric NAME",
    });
    if (flags.output !== "table" && flags.output !== "wide") return;
    const warnings = document.items.flatMap((fabric) =>
      fabric.warnings.map(({ subject, text, remedy }) => `${subject}: ${text} (try: ${remedy})`),
    );
    for (const warning of new Set(warnings)) io.err(printable(warning));
  },
});
