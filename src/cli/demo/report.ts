import { NodeList, ReplicaList } from "../../protocol/admin-api.ts";
import { ownProgram } from "../../os/program.ts";
import type { AdminClient } from "../admin-client.ts";
import type { DemoFolder } from "./folder.ts";
import { curlLine, type Question } from "./question.ts";
import { table } from "../output.ts";

/** Nodes and replicas, as two short tables. */
async function clusterState(client: AdminClient): Promise<string[]> {
  const [nodes, replicas] = await Promise.all([client.get("/admin/v1/nodes", NodeList), client.get("/admin/v1/replicas", ReplicaList)]);
  const offered = nodes.items.map(({ id, state, address, inventory }) => {
    const engines = inventory.engines.filter((engine) => engine.offered).map(({ kind }) => kind);
    return { id, state, address, engines: engines.join(", ") };
  });
  const node_lines = table(
    [
      { title: "NODE", cell: (node) => node.id },
      { title: "STATE", cell: (node) => node.state },
      { title: "ADDRESS", cell: (node) => node.address },
      { title: "ENGINES", cell: (node) => node.engines },
    ],
    offered,
  );
  const replica_lines = table(
    [
      { title: "REPLICA", cell: (replica) => replica.id },
      { title: "STATE", cell: (replica) => replica.state },
      { title: "NODES", cell: (replica) => replica.ranks.map(({ node }) => node).join(" ") },
    ],
    replicas.items,
  );
  return [...node_lines, "", ...replica_lines];
}

/** What a running demo prints: where it is, how to use it, how it stands, and one answer as proof. */
export async function demoReport(client: AdminClient, folder: DemoFolder, question: Question, answer: string): Promise<string> {
  return [
    `endpoint  ${question.endpoint}/v1`,
    `key       ${question.key}`,
    `model     ${question.model}`,
    `ctl       LLMGW_CONFIG=${folder.ctl_config} ${ownProgram().join(" ")} ctl nodes`,
    `logs      ${folder.logs}`,
    "",
    ...(await clusterState(client)),
    "",
    `question  ${question.text}`,
    `answer    ${answer.trim().replaceAll(/\s+/g, " ")}`,
    "",
    "ask it yourself:",
    curlLine(question),
  ].join("\n");
}
