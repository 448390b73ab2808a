import text from "../../release/systemd/llmgw-agent.service" with { type: "text" };

/** The agent's unit as releases and packages have it. */
export const AGENT_UNIT_TEXT: string = text;
