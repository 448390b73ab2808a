import { EngineList, type EngineView } from "../../protocol/admin-api.ts";
import { command } from "../frame.ts";
import { outputFlag, printable, printList, type Column } from "../output.ts";
import { reach, reachFlags } from "./reach.ts";

const COLUMNS: readonly Column<EngineView>[] = [
  { title: "NODE", cell: ({ node }) => node },
  { title: "ENGINE", cell: ({ engine }) => engine },
  { title: "IN USE", cell: ({ version }) => version || "none" },
  { title: "FROM", cell: ({ origin }) => (origin === "none" ? "" : origin) },
  { title: "WANTED", cell: ({ wanted }) => wanted },
  { title: "STATE", cell: ({ state }) => state },
  { title: "REASON", cell: ({ reason }) => reason },
  { title: "CAN", cell: ({ features }) => features.join(", "), wide: true },
  { title: "PATH", cell: ({ path }) => path, wide: true },
];

export const enginesCommand = command({
  name: "engines",
  about: "Lists the engines of each node: what it uses, and how far it is with what the server names",
  examples: ["llmgw ctl engines", "llmgw ctl engines -o wide"],
  flags: { ...reachFlags, output: outputFlag },
  args: [],
  run: async ({ flags, io }) => {
    const document = await (await reach(flags, io)).get("/admin/v1/engines", EngineList);
    printList(io, flags.output, document.items, {
      columns: COLUMNS,
      name: ({ node, engine }) => `${node}/${engine}`,
      document,
      empty: "no node has joined",
    });
    if (flags.output !== "table" && flags.output !== "wide") return;
    for (const { engine, version, reason } of document.wanted) if (reason !== "") io.err(printable(`${engine} ${version}: ${reason}`));
  },
});
