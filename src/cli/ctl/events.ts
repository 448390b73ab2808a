import { setTimeout as sleep } from "node:timers/promises";
import { EventList, type EventView } from "../../protocol/admin-api.ts";
import { EVENTS_FOLLOW_MS, LISTED_EVENTS_COUNT } from "../../protocol/limits.ts";
import type { AdminClient } from "../admin-client.ts";
import { command } from "../frame.ts";
import { documentText, outputFlag, printable, printList, type OutputForm } from "../output.ts";
import type { Io } from "../spec.ts";
import { reach, reachFlags } from "./reach.ts";

const time = (at_ms: number) => new Date(at_ms).toISOString().replace(/\.\d+Z$/, "Z");

const line = (event: EventView) =>
  printable(`${time(event.at_ms)}  ${event.level.padEnd(5)}  ${event.kind}  ${event.subject}  ${event.text}`);

/** One event on its own line or lines, for a list without end. */
function eventText(form: OutputForm, event: EventView): string {
  if (form === "json") return JSON.stringify(event);
  if (form === "yaml") return `---\n${documentText(form, event)}`;
  return form === "name" ? String(event.id) : line(event);
}

async function follow(client: AdminClient, form: OutputForm, after: number | undefined, limit: number, io: Io): Promise<never> {
  let newest = after;
  for (;;) {
    const { items } = await client.get(query(newest, newest === undefined ? limit : LISTED_EVENTS_COUNT), EventList);
    for (const event of items) io.out(eventText(form, event));
    newest = items.at(-1)?.id ?? newest ?? 0;
    if (items.length < LISTED_EVENTS_COUNT) await sleep(EVENTS_FOLLOW_MS);
  }
}

const query = (after: number | undefined, limit: number) =>
  `/admin/v1/events?${after === undefined ? "" : `after=${after}&`}limit=${limit}`;

export const eventsCommand = command({
  name: "events",
  about: "Lists what happened, newest last",
  examples: ["llmgw ctl events", "llmgw ctl events --follow", "llmgw ctl events --after 120 -o json"],
  flags: {
    ...reachFlags,
    after: { type: "number", value: "ID", about: "only events newer than this one", min: 0 },
    limit: { type: "number", value: "N", about: "how many at most", default: 100, min: 1, max: LISTED_EVENTS_COUNT },
    follow: { type: "boolean", short: "f", about: "go on with new ones as they happen; JSON is then one event a line" },
    output: outputFlag,
  },
  args: [],
  run: async ({ flags, io }) => {
    const client = await reach(flags, io);
    if (flags.follow) return follow(client, flags.output, flags.after, flags.limit, io);
    const document = await client.get(query(flags.after, flags.limit), EventList);
    printList(io, flags.output, document.items, {
      columns: [
        { title: "ID", cell: (event) => event.id, right: true },
        { title: "TIME", cell: (event) => time(event.at_ms) },
        { title: "LEVEL", cell: (event) => event.level },
        { title: "KIND", cell: (event) => event.kind },
        { title: "SUBJECT", cell: (event) => event.subject },
        { title: "TEXT", cell: (event) => event.text },
      ],
      name: (event) => String(event.id),
      document,
      empty: "nothing happened since",
    });
  },
});
