import { expect, test } from "bun:test";
import { uvTool } from "../../../src/agent/engine-install.ts";

const recipe = { how: "packages" as const, requirements: ["sglang==0.5.23"], uv: [] };

test("what uv is asked for: an environment of its own Python, then exactly these packages", () => {
  const words = uvTool("/e/uv/uv").steps("/e/sglang/0.5.23", { ...recipe, index: "https://mirror/simple/" });
  expect(words.map((argv) => argv.join(" "))).toEqual([
    "/e/uv/uv venv --python 3.12 --seed /e/sglang/0.5.23",
    "/e/uv/uv pip install --python /e/sglang/0.5.23/bin/python --prerelease=allow --index-url https://mirror/simple/ sglang==0.5.23",
  ]);
});

test("without a mirror uv looks where it does by itself", () => {
  const [, install = []] = uvTool("/uv").steps("/f", { ...recipe, index: null });
  expect(install).not.toContain("--index-url");
});
