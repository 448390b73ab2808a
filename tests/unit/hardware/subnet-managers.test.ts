// The answers of infiniband-diags (44.0), as printed on a real (simulated) fabric.
import { describe, expect, test } from "bun:test";
import { askManagers, parseSaquery, parseSminfo, parseSwitches } from "../../../src/hardware/subnet-managers.ts";
import type { RunTool, ToolAnswer } from "../../../src/hardware/tool.ts";
import { launchEnvironment } from "../../../src/hardware/launch-environment.ts";

const block = (lid: number, guid: string, priority: number, state: number) => `SMInfoRecord dump:
\t\tRID
\t\tLID...................${lid}
\t\tSMInfo dump:
\t\tGUID....................${guid}
\t\tSM_Key..................0x0
\t\tActCount................342
\t\tPriority................${priority}
\t\tSMState.................${state}
`;
const TWO = block(1, "0xa000000000002011", 14, 3) + block(12, "0xa000000000002013", 5, 2);
const SMINFO = "sminfo: sm lid 1 sm guid 0xa000000000002011, activity count 342 priority 14 state 3 SMINFO_MASTER\n";
const ok = (out: string): ToolAnswer => ({ code: 0, out, err: "" });
const bad = (code: number, err: string, out = ""): ToolAnswer => ({ code, out, err });
const missing: ToolAnswer = { failed: "missing", why: "there is no saquery in PATH" };

test("saquery SMIR names all managers", () => {
  expect(parseSaquery(TWO)).toEqual([
    { guid: "0xa000000000002011", state: "master", priority: 14 },
    { guid: "0xa000000000002013", state: "standby", priority: 5 },
  ]);
  expect(parseSaquery("")).toEqual([]);
  expect(parseSaquery(block(1, "0x0", 0, 0))).toEqual([]);
});

test("sminfo names the one in charge", () => {
  expect(parseSminfo(SMINFO)).toEqual({ guid: "0xa000000000002011", state: "master", priority: 14 });
  expect(parseSminfo("sminfo: iberror: failed: query")).toBe(null);
});

test("switches", () => {
  const first = 'vendid=0x0\nswitchguid=0xa000000000001000(a000000000001000)\nSwitch\t16 "S-a000000000001000"\n';
  const text = `${first}\nSwitch 16 "S-a000000000001001" # "sw"\n`;
  expect(parseSwitches(text)).toEqual(["0xa000000000001000", "0xa000000000001001"]);
});

describe("asking", () => {
  const cases: [string, ToolAnswer, ToolAnswer, string[] | string][] = [
    ["healthy", ok(TWO), ok(SMINFO), ["0xa000000000002011", "0xa000000000002013"]],
    ["saquery refused, sminfo answers", bad(110, "Query SA failed"), ok(SMINFO), ["0xa000000000002011"]],
    [
      "the manager died: unknown, not another fabric",
      bad(110, "Query SA failed: Connection timed out"),
      bad(255, "", "sminfo: iberror: failed: query"),
      "no answer",
    ],
    ["never a manager", bad(255, "No SM/SA found on port"), bad(255, "", "sminfo: iberror: failed: query"), "no answer"],
    ["no tools", missing, missing, "no tools"],
    ["not root", bad(255, "ibwarn: can't open UMAD port: Permission denied"), bad(255, "Permission denied"), "not allowed"],
    [
      "hangs",
      { failed: "no answer", why: "saquery did not return in 10 s" },
      { failed: "no answer", why: "sminfo did not return" },
      "no answer",
    ],
  ];
  for (const [name, saquery, sminfo, expected] of cases)
    test(name, async () => {
      const asked: string[] = [];
      const run: RunTool = async (argv) => {
        asked.push(argv.join(" "));
        return argv[0] === "saquery" ? saquery : sminfo;
      };
      const answer = await askManagers("mlx5_2", 1, run);
      const said: string | string[] = "managers" in answer ? answer.managers.map((manager) => manager.guid) : answer.unknown;
      expect(said).toEqual(expected);
      expect(asked[0]).toBe("saquery -C mlx5_2 -P 1 SMIR");
    });
});

describe("launch environment", () => {
  const eth = { interface: "eth0", address: "10.0.0.5", imex_failed: false };
  const sockets = { NCCL_SOCKET_IFNAME: "=eth0", GLOO_SOCKET_IFNAME: "eth0", TP_SOCKET_IFNAME: "eth0", VLLM_HOST_IP: "10.0.0.5" };
  const fabric = {
    NCCL_IB_HCA: "=mlx5_2:1,mlx5_3:1",
    NCCL_IGNORE_NET_MISMATCH: "0",
    UCX_NET_DEVICES: "mlx5_2:1,mlx5_3:1",
    NVSHMEM_HCA_LIST: "mlx5_2:1,mlx5_3:1",
    NVSHMEM_ENABLE_NIC_PE_MAPPING: "1",
    MOONCAKE_DEVICE: "mlx5_2,mlx5_3",
  };
  const ports = ["mlx5_2:1", "mlx5_3:1"];
  test("no fabric: sockets only", () => {
    expect(launchEnvironment({ ...eth, ports: [] })).toEqual(sockets);
  });
  test("two adapters", () => {
    expect(launchEnvironment({ ...eth, ports })).toEqual({ ...sockets, ...fabric });
  });
  test("two ports of one device", () => {
    expect(launchEnvironment({ ...eth, ports: ["mlx4_0:1", "mlx4_0:2"] })).toMatchObject({
      NCCL_IB_HCA: "=mlx4_0:1,mlx4_0:2",
      MOONCAKE_DEVICE: "mlx4_0",
    });
  });
  test("IMEX broken and InfiniBand used", () => {
    expect(launchEnvironment({ ...eth, ports, imex_failed: true })).toEqual({ ...sockets, ...fabric, NCCL_MNNVL_ENABLE: "0" });
    expect(launchEnvironment({ ...eth, ports: [], imex_failed: true })).toEqual(sockets);
  });
});
