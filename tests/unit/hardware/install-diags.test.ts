// infiniband-diags is installed only where nothing else would change.
import { describe, expect, test } from "bun:test";
import { REAL_IB_ROOT } from "../../../src/hardware/infiniband.ts";
import { installDiags, parseSimulation, refuseInstall } from "../../../src/hardware/install-diags.ts";
import type { RunTool, ToolAnswer } from "../../../src/hardware/tool.ts";

const APT = `Reading package lists...
The following NEW packages will be installed:
  infiniband-diags libibmad5 libibnetdisc5 libibumad3
Inst libibumad3 (44.0-2 Debian:12/stable [amd64])
Inst libibmad5 (44.0-2 Debian:12/stable [amd64])
Inst infiniband-diags (44.0-2 Debian:12/stable [amd64])
Conf infiniband-diags (44.0-2 Debian:12/stable [amd64])
`;
const DNF = `Dependencies resolved.
================================================================
 Package            Arch    Version      Repository     Size
================================================================
Installing:
 infiniband-diags   x86_64  48.0-1.el9   baseos        330 k
Installing dependencies:
 libibumad          x86_64  48.0-1.el9   baseos         27 k

Transaction Summary
================================================================
Install  2 Packages
Operation aborted.
`;
const REMOVING = `${DNF.replace("\nTransaction", "Removing:\n mlnx-ofa-tools     x86_64  5.8  @System  1 M\n\nTransaction")}`;

describe("simulated", () => {
  const cases: [string, "apt" | "dnf", string, RegExp | null][] = [
    ["apt, harmless", "apt", APT, null],
    ["apt would remove", "apt", `${APT}Remv ibverbs-providers [44.0]\n`, /remove ibverbs-providers/],
    ["apt would downgrade", "apt", `The following packages will be DOWNGRADED:\n  libibumad3\n${APT}`, /downgrade libibumad3/],
    ["apt would bring opensm", "apt", `${APT}Inst opensm (3.3.23)\n`, /opensm/],
    ["apt knows no such package", "apt", "E: Unable to locate package infiniband-diags\n", /offers no/],
    ["dnf, harmless", "dnf", DNF, null],
    ["dnf would remove vendor packages", "dnf", REMOVING, /mlnx-ofa-tools/],
    ["dnf knows no such package", "dnf", "Error: Unable to find a match: infiniband-diags\n", /offers no/],
  ];
  for (const [name, manager, output, refused] of cases)
    test(name, () => {
      const why = refuseInstall(parseSimulation(manager, output));
      if (refused === null) expect(why).toBe(null);
      else expect(why).toMatch(refused);
    });
});

describe("installing", () => {
  const ok = (out = ""): ToolAnswer => ({ code: 0, out, err: "" });
  const gone: ToolAnswer = { failed: "missing", why: "not here" };
  function rig(answers: Readonly<Record<string, ToolAnswer>>) {
    const asked: string[] = [];
    const run: RunTool = async (argv) => {
      const line = argv.join(" ");
      asked.push(line);
      const key = Object.keys(answers).find((each) => line.startsWith(each));
      return key === undefined ? gone : (answers[key] ?? gone);
    };
    return { run, asked, wrote: () => asked.filter((line) => / -y /.test(line)) };
  }
  const real = { ib_root: REAL_IB_ROOT, is_root: true };

  test("apt: simulated first, then done, ib_umad loaded, never opensm", async () => {
    const { run, asked, wrote } = rig({ modprobe: ok(), "apt-get -s": ok(APT), "apt-get --version": ok(), "apt-get -q -y": ok() });
    expect(await installDiags({ ...real, run })).toEqual({ done: "installed infiniband-diags" });
    expect(asked[0]).toBe("modprobe ib_umad");
    expect(wrote()).toEqual(["apt-get -q -y --no-remove --no-install-recommends install infiniband-diags"]);
    expect(asked.join()).not.toContain("opensm");
  });
  test("dnf", async () => {
    const { run, wrote } = rig({ modprobe: ok(), "dnf --assumeno": { code: 1, out: DNF, err: "" }, "dnf --version": ok(), "dnf -q": ok() });
    expect(await installDiags({ ...real, run })).toEqual({ done: "installed infiniband-diags" });
    expect(wrote()).toEqual(["dnf -q -y install infiniband-diags"]);
  });
  test("refused: nothing is written", async () => {
    const { run, wrote } = rig({ modprobe: ok(), "dnf --assumeno": { code: 1, out: REMOVING, err: "" }, "dnf --version": ok() });
    expect(await installDiags({ ...real, run })).toMatchObject({ not: expect.stringContaining("mlnx-ofa-tools") as string });
    expect(wrote()).toEqual([]);
  });
  test("already there", async () => {
    const { run, wrote } = rig({ modprobe: { code: 1, out: "", err: "not found" }, "saquery --version": ok() });
    expect(await installDiags({ ...real, run })).toEqual({ done: "the tools are there; ib_umad cannot be loaded" });
    expect(wrote()).toEqual([]);
  });
  test("not root, or not the kernel's InfiniBand: nothing is even asked", async () => {
    const { run, asked } = rig({});
    expect(await installDiags({ ib_root: REAL_IB_ROOT, is_root: false, run })).toHaveProperty("not");
    expect(await installDiags({ ib_root: "/elsewhere", is_root: true, run })).toHaveProperty("not");
    expect(asked).toEqual([]);
  });
});
