// Whatever is written on a command line or in a file: an answer or an OperatorError, nothing else.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { parse } from "../../src/cli/parse.ts";
import type { FlagSpecs } from "../../src/cli/spec.ts";
import { checkYaml, parseYaml } from "../../src/os/yaml.ts";
import { Catalog } from "../../src/protocol/catalog.ts";
import { AgentConfig, ServerConfig } from "../../src/protocol/config.ts";
import { OperatorError } from "../../src/protocol/errors.ts";
import { nearest } from "../../src/protocol/nearest.ts";

const FLAGS: FlagSpecs = {
  name: { type: "string", short: "n", about: "" },
  tries: { type: "number", min: 0, max: 99, about: "" },
  label: { type: "list", about: "" },
  wait: { type: "boolean", default: true, about: "" },
};
const ARGS = [
  { name: "FIRST", about: "" },
  { name: "REST", about: "", optional: true, rest: true },
];
const plain = fc.string({ minLength: 1 }).filter((word) => !word.startsWith("-"));

test("a line written from values is read as those values", () => {
  const line = fc.record({
    name: fc.option(fc.string(), { nil: undefined }),
    tries: fc.option(fc.integer({ min: 0, max: 99 }), { nil: undefined }),
    label: fc.array(fc.string(), { maxLength: 3 }),
    wait: fc.boolean(),
    words: fc.array(plain, { minLength: 1, maxLength: 4 }),
  });
  fc.assert(
    fc.property(line, ({ name, tries, label, wait, words }) => {
      const flags = [
        ...(name === undefined ? [] : [`--name=${name}`]),
        ...(tries === undefined ? [] : ["--tries", String(tries)]),
        ...label.map((value) => `--label=${value}`),
        wait ? "--wait" : "--no-wait",
      ];
      const [first, ...rest] = words;
      const expected = { flags: { name, tries, label, wait }, args: { FIRST: first, REST: rest } };
      expect(parse("llmgw x", FLAGS, ARGS, [...flags, ...words])).toEqual(expected);
      expect(parse("llmgw x", FLAGS, ARGS, [...words, ...flags])).toEqual(expected);
      expect(parse("llmgw x", FLAGS, ARGS, [...flags, "--", ...words])).toEqual(expected);
    }),
  );
});

test("any words are read or refused as usage", () => {
  const pieces = fc.oneof(
    fc.string(),
    fc.constantFrom("--", "-", "-n", "--name", "--tries", "--no-wait", "--wait=no", "--__proto__", "-1"),
  );
  fc.assert(
    fc.property(fc.array(pieces, { maxLength: 6 }), (words) => {
      try {
        const { flags } = parse("llmgw x", FLAGS, ARGS, words);
        expect(Object.keys(flags).toSorted((a, b) => a.localeCompare(b))).toEqual(["label", "name", "tries", "wait"]);
      } catch (error) {
        expect(error).toBeInstanceOf(OperatorError);
        expect((error as OperatorError).code).toBe("E_USAGE");
      }
    }),
  );
});

test("any text is a configuration or has a fault with a place in it", () => {
  const words = fc.constantFrom(
    "models",
    "listen",
    "tls",
    ":",
    " ",
    "\n",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "&a",
    "*a",
    "'",
    "|",
    "---",
    "1",
    "\t",
    "? ",
    "<<",
    "!!x",
  );
  const text = fc.oneof(
    fc.string(),
    fc.array(words, { maxLength: 30 }).map((parts) => parts.join("")),
    fc.json(),
  );
  fc.assert(
    fc.property(text, fc.constantFrom(ServerConfig, AgentConfig, Catalog), (content, schema) => {
      const { faults } = checkYaml(content, schema);
      const lines = content.split("\n").length;
      for (const { line, column, what } of faults ?? []) {
        expect(line).toBeWithin(1, lines + 1);
        expect(column).toBeGreaterThan(0);
        expect(what).not.toBe("");
      }
      if (faults) expect(() => parseYaml(content, "f", schema, "it")).toThrow(OperatorError);
    }),
    { numRuns: 1_000 },
  );
});

test("the nearest name is one of the names, and itself when it is there", () => {
  fc.assert(
    fc.property(fc.string(), fc.array(fc.string({ minLength: 1 })), (word, names) => {
      const found = nearest(word, names);
      if (found !== null) expect(names).toContain(found);
      if (names.includes(word)) expect(found).toBe(word);
    }),
  );
});
