import type { LogLevel } from "../protocol/config.ts";

/** What a log line may carry besides its text. Never keys, tokens or prompts. */
type LogFields = Readonly<Record<string, string | number | boolean | null | undefined>>;

/** One event a line on stderr; `component` says which part of llmgw speaks. */
export interface Log {
  error(text: string, fields?: LogFields): void;
  warn(text: string, fields?: LogFields): void;
  info(text: string, fields?: LogFields): void;
  debug(text: string, fields?: LogFields): void;
  /** The same log, speaking as another component or with more fields on each line. */
  with(fields: LogFields): Log;
}

const LEVELS: readonly LogLevel[] = ["error", "warn", "info", "debug"];

/** Values with blanks, quotes or control characters are quoted as JSON, so that a line stays one line. */
function textValue(value: string | number | boolean | null): string {
  const text = String(value);
  return /^[^\s"=\\\p{C}]+$/u.test(text) ? text : JSON.stringify(text);
}

function render(format: "text" | "json", level: LogLevel, text: string, fields: LogFields, now: Date): string {
  const present = Object.entries(fields).filter((entry): entry is [string, string | number | boolean | null] => entry[1] !== undefined);
  if (format === "json") return JSON.stringify({ time: now.toISOString(), level, text, ...Object.fromEntries(present) });
  const tail = present.map(([name, value]) => ` ${name}=${textValue(value)}`).join("");
  return `${now.toISOString()} ${level.padEnd(5)} ${/\p{C}/u.test(text) ? JSON.stringify(text) : text}${tail}`;
}

interface LogOptions {
  readonly level: LogLevel;
  readonly format: "text" | "json";
  /** Where lines go; stderr when absent. */
  readonly write?: (line: string) => void;
}

/** Makes a log. */
export function makeLog(options: LogOptions, fields: LogFields = {}): Log {
  const write = options.write ?? ((line: string) => void process.stderr.write(`${line}\n`));
  const threshold = LEVELS.indexOf(options.level);
  const say =
    (level: LogLevel) =>
    (text: string, more: LogFields = {}) => {
      if (LEVELS.indexOf(level) <= threshold) write(render(options.format, level, text, { ...fields, ...more }, new Date()));
    };
  return {
    error: say("error"),
    warn: say("warn"),
    info: say("info"),
    debug: say("debug"),
    with: (more) => makeLog(options, { ...fields, ...more }),
  };
}
