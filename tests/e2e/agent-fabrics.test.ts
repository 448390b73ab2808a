// The agent of the compiled binary refuses fabrics that cannot be, before it does anything else.
import { expect, test } from "bun:test";
import { join } from "node:path";
import { binary } from "../../release/fresh.ts";
import { ibTree } from "../fixtures/hardware/ib-tree.ts";

async function agent(...fabrics: string[]): Promise<{ err: string; code: number }> {
  const tree = await ibTree([{ name: "mlx5_2" }, { name: "mlx5_3" }]);
  const nowhere = (name: string) => join(tree.root, name);
  const fixed = ["--server", "https://127.0.0.1:1", "--address", "127.0.0.1", "--node", "n1", "--ib-root", tree.root];
  const folders = ["--state", nowhere("s"), "--run", nowhere("r")];
  const tls = ["--tls-ca", nowhere("ca.crt"), "--tls-cert", nowhere("node.crt"), "--tls-key", nowhere("node.key")];
  const words = fabrics.flatMap((fabric) => ["--fabric", fabric]);
  try {
    const child = Bun.spawn([binary, "agent", ...fixed, ...folders, ...tls, ...words], { stdout: "pipe", stderr: "pipe" });
    const [err, code] = await Promise.all([child.stderr.text(), child.exited]);
    return { err, code };
  } finally {
    await tree.remove();
  }
}

test("an adapter under two fabrics: exit 2, naming both", async () => {
  const { err, code } = await agent("ib-a:mlx5_2", "ib-b:mlx5_2,mlx5_3");
  expect(err).toContain("mlx5_2:1 is under two fabrics: ib-a and ib-b");
  expect(err.trimEnd().split("\n").length).toBe(3);
  expect(code).toBe(2);
});

test("an adapter that is not here: exit 2, naming those that are", async () => {
  const { err, code } = await agent("ib-a:mlx5_9");
  expect(err).toContain("mlx5_2:1, mlx5_3:1");
  expect(code).toBe(2);
});
