// The server's store on a file system that fills up: needs root to mount one.
import { expect, test } from "bun:test";
import { rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { Fleet } from "../e2e/fleet.ts";

const mount = async (...words: string[]) => {
  const child = Bun.spawn(words, { stdin: "ignore", stdout: "ignore", stderr: "pipe" });
  const [why, code] = await Promise.all([child.stderr.text(), child.exited]);
  if (code !== 0) throw new Error(`${words.join(" ")}: ${why}`);
};

// A skip says so: it needs root, for the mount.
test.skipIf(process.getuid?.() !== 0)(
  "a full disk under the server: what runs goes on and is said, and freed space is used again",
  async () => {
    let state = "";
    const prepare = async (folder: string) => {
      state = join(folder, "state");
      await mount("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", state);
    };
    const fleet = await Fleet.start({ nodes: 1, models: [{ name: "m", engine: "sim", replicas: 1 }], prepare });
    try {
      await fleet.ready("m");
      const key = await fleet.key();
      const [engine] = await fleet.enginePids("m");
      await writeFile(join(state, "filler"), Buffer.alloc(8 * 1024 * 1024)).catch(() => {});
      const refused = await fleet.must("ctl", "key", "create", "late").then(() => "", String);
      expect(refused).toContain("the store cannot be written");
      const ask = () => fetch(`${fleet.gateway}/v1/models`, { headers: { authorization: `Bearer ${key}` } });
      expect((await ask()).status).toBe(200);
      process.kill(engine as number, "SIGKILL");
      await fleet.waitFor("the warning", async () => (await fleet.status()).warnings.some(({ code }) => code === "decisions-fail"));
      expect(await fleet.log("server")).not.toContain("at async");
      // Full to the last byte, it cannot be opened again either; nobody is to throw it away for that.
      await writeFile(join(state, "rest"), Buffer.alloc(8 * 1024 * 1024)).catch(() => {});
      await fleet.signal("server", "SIGKILL");
      fleet.startServer();
      await fleet.waitFor("the reason", async () => (await fleet.log("server")).includes("the disk is full"));
      expect(await fleet.log("server")).not.toContain("move it away");
      expect((await ask()).status).toBe(200);
      await Promise.all(["filler", "rest"].map((name) => rm(join(state, name))));
      fleet.startServer();
      await fleet.waitFor("a new engine", async () => {
        const [next] = await fleet.enginePids("m");
        return next !== undefined && next !== engine;
      });
      await fleet.ready("m");
      await fleet.must("ctl", "key", "create", "later");
      expect((await fleet.status()).warnings.some(({ code }) => code === "decisions-fail")).toBe(false);
    } finally {
      await mount("umount", "-l", state);
      await fleet.stop();
    }
  },
  120_000,
);
