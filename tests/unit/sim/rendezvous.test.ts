// Ranks of a simulated gang meet over real sockets.
import { expect, test } from "bun:test";
import { meet, type GangSettings } from "../../../src/sim/rendezvous.ts";
import { freePort } from "../shim/rank-for-tests.ts";

const gangOf = (ranks: number, rendezvous_ms = 5_000) => {
  const shared = { ranks, rendezvous_ms, master_address: "127.0.0.1", master_port: freePort() };
  return (rank: number): GangSettings => ({ rank, ...shared });
};
const quiet = () => {};

test("ranks meet in any order, and a worker's end is known to rank 0 and to no other", async () => {
  const rank = gangOf(3);
  const early = meet(rank(2), quiet);
  const master = meet(rank(0), quiet);
  const gangs = await Promise.all([master, meet(rank(1), quiet), early]);
  gangs[1].close();
  expect(await gangs[0].lost).toBe("rank 1 is gone");
  const others = await Promise.race([gangs[2].lost, Bun.sleep(200).then(() => "still there")]);
  expect(others).toBe("still there");
  gangs[0].close();
  expect(await gangs[2].lost).toBe("rank 0 is gone");
});

test("rank 0 names the ranks that did not come in time, and lets those go that did", async () => {
  const rank = gangOf(4, 400);
  const lonely = meet(rank(2), quiet);
  lonely.catch(() => {});
  expect(meet(rank(0), quiet)).rejects.toThrow("rank 1, 3 did not join");
  expect(lonely).rejects.toThrow("rank 0 did not answer");
});

test("a port that is taken is told at once", async () => {
  const rank = gangOf(2);
  const { master_port } = rank(0);
  const other = Bun.listen({ hostname: "127.0.0.1", port: master_port, socket: { data() {} } });
  expect(meet(rank(0), quiet)).rejects.toThrow();
  other.stop(true);
});

test("a stranger on the port counts for nobody", async () => {
  const rank = gangOf(2);
  const master = meet(rank(0), quiet);
  const stranger = await Bun.connect({ hostname: "127.0.0.1", port: rank(0).master_port, socket: { data() {} } });
  stranger.write("GET / HTTP/1.1\r\n\r\nrank 7\nrank 0\n");
  const worker = await meet(rank(1), quiet);
  (await master).close();
  expect(await worker.lost).toBe("rank 0 is gone");
  stranger.end();
});
