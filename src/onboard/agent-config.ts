import { isMap, parseDocument } from "yaml";
import * as v from "valibot";
import { AgentConfig } from "../protocol/config.ts";
import { OperatorError } from "../protocol/errors.ts";
import { NODE_PATHS } from "./node-paths.ts";

/** Keys of agent.yaml that onboarding sets; undefined ones are left as they are. */
export type AgentKeys = Partial<Omit<v.InferInput<typeof AgentConfig>, "tls" | "log">>;

/**
 * The agent.yaml a node should have: what is wanted laid over what is there, whose other keys and comments stay.
 * @param existing the file that is there; null when there is none
 * @returns the text to write; null when the file says all of it already
 * @throws OperatorError E_CONFIG when the file that is there is no agent.yaml
 */
export function agentConfigOf(existing: string | null, wanted: AgentKeys): string | null {
  const document = parseDocument(existing ?? "");
  const broken = (why: string) =>
    new OperatorError(
      "E_CONFIG",
      `${NODE_PATHS.config} on the node cannot be read`,
      why,
      "correct it there, or move it away and onboard again",
    );
  if (document.errors[0]) throw broken(document.errors[0].message.split("\n")[0] ?? "not YAML");
  if (document.contents !== null && !isMap(document.contents)) throw broken("it is not a list of keys");
  let changed = existing === null;
  for (const [key, value] of Object.entries(wanted)) {
    if (value === undefined) continue;
    const present: unknown = document.toJS()?.[key];
    if (Bun.deepEquals(present, value)) continue;
    document.set(key, document.createNode(value));
    changed = true;
  }
  const result = v.safeParse(AgentConfig, document.toJS());
  if (!result.success) throw broken(`${v.getDotPath(result.issues[0]) ?? "the file"}: ${result.issues[0].message}`);
  if (!changed) return null;
  const note = "# llmgw agent; written by llmgw onboard, which keeps what you change here.\n";
  return `${existing === null ? note : ""}${String(document)}`;
}
