import { expect, test } from "bun:test";
import { environmentText } from "../../../src/os/systemd.ts";

test("an environment file: quoted, and without what it cannot tell", () => {
  const env = { PATH: "/bin:/usr/bin", "BASH_FUNC_x%%": "() { :; }", TWO: "a\nb", GONE: undefined, SIGNS: 'a "b" $c `d` \\e', EMPTY: "" };
  expect(environmentText(env)).toBe(`PATH="/bin:/usr/bin"\nSIGNS="a \\"b\\" \\$c \\\`d\\\` \\\\e"\nEMPTY=""\n`);
});
