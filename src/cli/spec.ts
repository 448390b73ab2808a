import type { CommandDef } from "citty";

export interface FlagSpec {
  readonly type: "string" | "number" | "boolean" | "list";
  /** What the value is, in capitals, for help: `FILE`. */
  readonly value?: string;
  readonly about: string;
  readonly default?: string | number | boolean;
  /** One letter: `-o`. */
  readonly short?: string;
  readonly required?: boolean;
  readonly hidden?: boolean;
  /** The only values a string or list flag takes. */
  readonly choices?: readonly string[];
  /** A number flag takes whole numbers only, unless this is set. */
  readonly fraction?: boolean;
  /** Least and greatest value of a number flag. */
  readonly min?: number;
  readonly max?: number;
}

export interface ArgSpec {
  readonly name: string;
  readonly about: string;
  readonly optional?: boolean;
  /** Takes all that follow; only the last argument may. */
  readonly rest?: boolean;
  /** The only values it takes. */
  readonly choices?: readonly string[];
}

export type FlagSpecs = Readonly<Record<string, FlagSpec>>;

type Given<F extends FlagSpec, T> = F extends { default: string | number | boolean } | { required: true } ? T : T | undefined;
type FlagValue<F extends FlagSpec> = F["type"] extends "list"
  ? string[]
  : F["type"] extends "boolean"
    ? boolean
    : F["type"] extends "number"
      ? Given<F, number>
      : F extends { choices: readonly (infer C extends string)[] }
        ? Given<F, C>
        : Given<F, string>;
export type FlagValues<F extends FlagSpecs> = {
  readonly [K in keyof F]: FlagValue<F[K]>;
};
type ArgWord<A extends ArgSpec> = A extends { choices: readonly (infer C extends string)[] } ? C : string;
type ArgValues<A extends readonly ArgSpec[]> = {
  readonly [K in A[number] as K["name"]]: K extends { rest: true }
    ? ArgWord<K>[]
    : K extends { optional: true }
      ? ArgWord<K> | undefined
      : ArgWord<K>;
};

/** What a command may touch of the process it runs in. */
export interface Io {
  /** Writes data to stdout; a line end is added where none is. */
  out(text: string): void;
  /** Writes all that is not data (progress, notes) to stderr; a line end is added where none is. */
  err(text: string): void;
  /** Whether stdout is a terminal. */
  readonly isTerminal: boolean;
  /** Whether stderr is a terminal: progress may redraw. */
  readonly isErrTerminal: boolean;
  /** Whether colour may be used on stdout. */
  readonly color: boolean;
  readonly env: Readonly<Record<string, string | undefined>>;
  readonly cwd: string;
}

export interface Invocation<F extends FlagSpecs = FlagSpecs, A extends readonly ArgSpec[] = readonly ArgSpec[]> {
  readonly flags: FlagValues<F>;
  readonly args: ArgValues<A>;
  readonly io: Io;
}

interface Described {
  readonly name: string;
  /** One line, no full stop. */
  readonly about: string;
  readonly hidden?: boolean;
}

export interface CommandSpec<F extends FlagSpecs, A extends readonly ArgSpec[]> extends Described {
  readonly examples: readonly string[];
  readonly flags: F;
  readonly args: A;
  /** Does it and says the exit code; nothing means 0. */
  readonly run: (invocation: Invocation<F, A>) => Promise<number | void>;
}

/** A command as the tree holds it: its specification, and the citty command that runs it. */
export interface Command extends Described {
  readonly kind: "command";
  readonly examples: readonly string[];
  readonly flags: FlagSpecs;
  readonly args: readonly ArgSpec[];
  readonly citty: CommandDef;
}

export interface Group extends Described {
  readonly kind: "group";
  readonly examples: readonly string[];
  readonly commands: () => readonly Entry[];
}

/** A command whose module is loaded only when it is asked for. */
export interface Lazy {
  readonly kind: "lazy";
  readonly name: string;
  readonly load: () => Promise<Command | Group>;
}

export type Entry = Command | Group | Lazy;

/** Flags every command takes. */
export const GLOBAL_FLAGS = {
  help: { type: "boolean", short: "h", about: "show this help" },
  debug: { type: "boolean", about: "show the stack trace of an error" },
  "no-color": {
    type: "boolean",
    about: "write no colour (NO_COLOR does the same)",
  },
} as const satisfies FlagSpecs;
