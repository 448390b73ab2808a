import { expect, test } from "bun:test";
import { spawnSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  chooseNetwork,
  chooseNode,
  chooseStorages,
  cpuNote,
  createParameters,
  imageOf,
  refuseTaken,
} from "../../../src/provision/machine.ts";
import { networkOf, sameNetwork, settingsOf, vmidOf } from "../../../src/provision/settings.ts";
import { distinctKeys, readPublicKeys } from "../../../src/provision/ssh-keys.ts";

const WHO = { name: "llmgw-node05", ip: "10.0.0.145/24" };
const settings = (flags: Record<string, unknown> = {}, env: Record<string, string> = {}, file: object = {}) =>
  settingsOf(WHO, flags, env, file);
const KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpdeEdBjlVOp2ViFmKa/j2WaGGMGlVlsjJmqw9BWHkT ops@laptop";

test("flags lie over the environment, that over the file, that over what is usual", () => {
  expect(settings()).toMatchObject({
    vmid: 145,
    cores: 8,
    memory: 32_768,
    disk: 60,
    cpu: "host",
    user: "root",
    address: "10.0.0.145",
    bits: 24,
  });
  expect(settings().image_checksum).toMatch(/^sha512:[0-9a-f]{128}$/);
  const file = { cores: 2, memory: 1_024, bridge: "vmbr7" };
  expect(settings({ cores: 4 }, { LLMGW_CORES: "3", LLMGW_MEMORY: "2048" }, file)).toMatchObject({
    cores: 4,
    memory: 2_048,
    bridge: "vmbr7",
  });
  expect(settings({ hostpci: [] }, { LLMGW_HOSTPCI: "gpu-0,gpu-1" }).hostpci).toEqual(["gpu-0", "gpu-1"]);
  expect(settings({ image: "https://x/y.qcow2" }).image_checksum).toBeUndefined();
});

test.each([
  [() => settings({ cores: 0 }), /--cores is not usable/],
  [() => settings({}, { LLMGW_MEMORY: "lots" }), /LLMGW_MEMORY is not usable/],
  [() => settings({}, { LLMGW_DISK: "0x10" }), /LLMGW_DISK is not usable/],
  [() => settings({}, { LLMGW_CORES: " " }), /LLMGW_CORES is not usable/],
  [() => settings({ memory: 1e9 }), /--memory is not usable/],
  [() => settings({ cpu: "a b" }), /--cpu is not usable/],
  [() => settings({ cpu: "host,vendor=1" }), /--cpu is not usable/],
  [() => settings({ hostpci: ["gpu", "gpu"] }), /--hostpci is not usable/],
  [() => settings({ hostpci: Array.from({ length: 17 }, (_, index) => `gpu${index}`) }), /--hostpci is not usable/],
  [() => settings({ bridge: "vmbr0; rm -rf /" }), /--bridge is not usable/],
  [() => settings({ pve_fingerprint: "AA:BB" }), /--pve-fingerprint is not usable/],
  [() => settings({ hostpci: ["0000:01:00.0"] }), /--hostpci is not usable/],
  [() => settingsOf({ ...WHO, name: "No_Name" }, {}, {}, {}), /cannot be a node/],
  [() => networkOf("10.0.0.1"), /--ip cannot be/],
  [() => networkOf("fe80::1/64"), /--ip cannot be/],
  [() => networkOf("10.0.0.1/99"), /--ip cannot be/],
  [() => networkOf("10.0.0.1/24/7"), /--ip cannot be/],
  [() => networkOf("10.0.0.0/24"), /--ip cannot be/],
  [() => networkOf("10.0.0.255/24"), /--ip cannot be/],
  [() => networkOf("10.0.0.127/25"), /--ip cannot be/],
  [() => networkOf("0.0.0.145/8"), /--ip cannot be/],
  [() => networkOf("250.0.0.145/8"), /--ip cannot be/],
  [() => networkOf("x".repeat(100_000)), /^--ip cannot be "x{60}\.\.\."$/],
  [() => settings({ gateway: "10.0.0.145" }), /--gateway cannot be/],
  [() => settings({ gateway: "10.0.1.1" }), /--gateway cannot be/],
  [() => settings({}, { LLMGW_GATEWAY: "10.0.0.255" }), /LLMGW_GATEWAY cannot be/],
  [() => settings({}, {}, { gateway: "10.0.0.0" }), /gateway cannot be/],
  [() => vmidOf("10.0.0.45"), /--vmid is missing/],
])("what cannot be is refused with the flag's name", (make, words) => {
  expect(make).toThrow(words);
});

test.each([
  "x",
  "https://",
  "https://host",
  "https://host/",
  "https://host:99999/debian.qcow2",
  "https://ops:secret@host/debian.qcow2",
  "ftp://host/debian.qcow2",
  "file:///etc/passwd",
  "local:/etc/passwd",
  "local:import/debian.qcow2,format=raw",
])("--image cannot be %s", (image) => {
  expect(() => settings({ image })).toThrow("--image is not usable");
});

test("networks", () => {
  expect(networkOf("10.0.0.254/31")).toEqual({ address: "10.0.0.254", bits: 31 });
  expect(networkOf("10.0.0.255/16")).toEqual({ address: "10.0.0.255", bits: 16 });
  expect(sameNetwork("10.0.0.1", "10.0.0.254", 24)).toBe(true);
  expect(sameNetwork("10.0.0.1", "10.0.1.1", 24)).toBe(false);
  expect(sameNetwork("10.0.0.129", "10.0.0.1", 25)).toBe(false);
});

test("keys: only whole ones of known types without options, harmless for YAML, each once", () => {
  const text = [
    "# the office",
    "",
    KEY,
    `${KEY} again`,
    `command="/bin/false" ${KEY}`,
    `from="10.0.0.1" ${KEY}`,
    KEY.replace("ssh-ed25519", "ssh-rsa"),
    KEY.slice(0, 40),
    'ssh-ed25519 "quoted"',
    KEY.replace("ops@laptop", 'work: laptop #1 "x"'),
  ].join("\n");
  const found = readPublicKeys(text);
  expect(found.map(({ line }) => line.split(" ").slice(2).join(" "))).toEqual(["ops@laptop", "ops@laptop-again", "work--laptop--1--x-"]);
  expect(distinctKeys(found)).toHaveLength(1);
  expect(found[0]?.fingerprint).toMatch(/^SHA256:[A-Za-z0-9+/]{43}$/);
});

/** A key of these fields, as authorized_keys has it. */
function keyOf(type: string, ...fields: (number | string)[]): string {
  const part = (bytes: Buffer) => Buffer.concat([Buffer.from([0, 0, bytes.length >> 8, bytes.length & 255]), bytes]);
  const parts = [type, ...fields].map((field) => part(typeof field === "number" ? Buffer.alloc(field, 1) : Buffer.from(field)));
  return `${type} ${Buffer.concat(parts).toString("base64")}`;
}

test.each([
  ["a short key", keyOf("ssh-ed25519", 31)],
  ["a field too many", keyOf("ssh-ed25519", 32, 32)],
  ["a field too few", keyOf("ssh-rsa", 3)],
  ["a point that is none", keyOf("ecdsa-sha2-nistp256", "nistp256", 64)],
  ["a certificate", keyOf("ssh-ed25519-cert-v01@openssh.com", 32, 32)],
  ["an old type", keyOf("ssh-dss", 128, 20, 128, 128)],
  ["more after its end", `${KEY.split(" ").slice(0, 2).join(" ")}AA`],
  ["a padding too much", `${KEY.split(" ").slice(0, 2).join(" ")}=`],
  ["a type of all objects", "constructor AAAA"],
])("no key: %s", (_what, line) => {
  expect(readPublicKeys(`${line}\n`)).toEqual([]);
});

test("whatever is taken, ssh-keygen reads as well: Proxmox refuses all keys for one it cannot", async () => {
  const folder = await mkdtemp(join(tmpdir(), "llmgw-keys-"));
  try {
    for (const words of ["ed25519", "rsa -b 2048", "ecdsa -b 256", "ecdsa -b 384", "ecdsa -b 521"]) {
      const file = join(folder, words.replaceAll(" ", ""));
      expect(spawnSync("ssh-keygen", ["-q", "-N", "", "-t", ...words.split(" "), "-f", file, "-C", "a: #b"]).status).toBe(0);
      const [key] = readPublicKeys((await readFile(`${file}.pub`, "utf8")).replaceAll("\n", "\r\n"));
      expect(key?.line).toEndWith(" a---b");
      await writeFile(join(folder, "line"), `${key?.line}\n`);
      const { stdout } = spawnSync("ssh-keygen", ["-l", "-f", join(folder, "line")], { encoding: "utf8" });
      expect(stdout).toContain(key?.fingerprint as string);
    }
  } finally {
    await rm(folder, { recursive: true });
  }
});

test("the create call, whole", () => {
  const place = { node: "pve1", disks: "local-lvm", bridge: "vmbr0", gateway: "10.0.0.1", volid: "local:import/debian.qcow2" };
  const parameters = createParameters(settings({ vlan: 7, hostpci: ["h100-0"] }), place, readPublicKeys(KEY), "r1");
  expect(parameters).toEqual({
    vmid: 145,
    name: "llmgw-node05",
    ostype: "l26",
    machine: "q35",
    cpu: "host",
    sockets: 1,
    cores: 8,
    numa: 1,
    memory: 32_768,
    balloon: 0,
    scsihw: "virtio-scsi-single",
    scsi0: "local-lvm:0,import-from=local:import/debian.qcow2,discard=on,iothread=1,ssd=1",
    scsi1: "local-lvm:cloudinit",
    boot: "order=scsi0",
    serial0: "socket",
    net0: "virtio,bridge=vmbr0,tag=7",
    ipconfig0: "ip=10.0.0.145/24,gw=10.0.0.1",
    ciuser: "root",
    sshkeys: encodeURIComponent(KEY),
    ciupgrade: 0,
    agent: "enabled=1",
    onboot: 1,
    tags: "llmgw",
    description: "Made by llmgw provision, run r1",
    bios: "ovmf",
    efidisk0: "local-lvm:1,efitype=4m,pre-enrolled-keys=0",
    hostpci0: "mapping=h100-0,pcie=1",
  });
  expect(String(parameters["sshkeys"])).toMatch(/^[-%a-zA-Z0-9_.!~*'()]*$/);
});

const STORAGES = [
  { storage: "local", content: "iso,import,backup", avail: 50 * 2 ** 30, active: 1 },
  { storage: "local-lvm", content: "images,rootdir", avail: 500 * 2 ** 30, active: 1 },
  { storage: "tank", content: "images", avail: 900 * 2 ** 30, active: 0 },
];
test("storages: most room for disks, one that takes imports for the image", () => {
  expect(chooseStorages(STORAGES, { storage: undefined, disk: 60 })).toEqual({ disks: "local-lvm", images: "local" });
  expect(() => chooseStorages(STORAGES, { storage: "tank", disk: 60 })).toThrow("storage tank takes no disks");
  expect(() => chooseStorages(STORAGES, { storage: undefined, disk: 600 })).toThrow("storage local-lvm has no room");
  expect(() => chooseStorages([], { storage: undefined, disk: 1 })).toThrow("no storage takes disks");
  expect(() => chooseStorages(STORAGES.slice(1), { storage: undefined, disk: 60 })).toThrow("no storage takes images to import");
});

const NETWORKS = [
  { iface: "enp1s0", type: "eth" },
  { iface: "vmbr0", type: "bridge", cidr: "192.168.1.2/24", gateway: "192.168.1.1" },
  { iface: "vmbr1", type: "bridge", cidr: "10.0.0.1/24" },
];
const wants = { address: "10.0.0.145", bits: 24, bridge: undefined, gateway: undefined, vlan: undefined };
test("the bridge in the address's network, and its way out", () => {
  expect(chooseNetwork(NETWORKS, wants)).toEqual({ bridge: "vmbr1", gateway: "10.0.0.1" });
  expect(chooseNetwork(NETWORKS, { ...wants, address: "192.168.1.50" })).toEqual({ bridge: "vmbr0", gateway: "192.168.1.1" });
  expect(chooseNetwork(NETWORKS, { ...wants, gateway: "10.0.0.254" })).toEqual({ bridge: "vmbr1", gateway: "10.0.0.254" });
  expect(() => chooseNetwork(NETWORKS, { ...wants, address: "172.16.0.5" })).toThrow("--gateway is missing");
  expect(() => chooseNetwork(NETWORKS, { ...wants, vlan: 5 })).toThrow("--gateway is missing");
  expect(() => chooseNetwork(NETWORKS, { ...wants, address: "10.0.0.1" })).toThrow("10.0.0.1 is taken");
  expect(() => chooseNetwork(NETWORKS, { ...wants, address: "192.168.1.1" })).toThrow("192.168.1.1 is taken");
  expect(() => chooseNetwork(NETWORKS, { ...wants, bridge: "vmbr9" })).toThrow("there is no bridge vmbr9");
});

test("the node, and what is taken", () => {
  const nodes = [
    { node: "pve2", status: "online" },
    { node: "pve1", status: "offline" },
  ];
  expect(chooseNode(nodes, "pve2", null)).toBe("pve2");
  expect(chooseNode(nodes, undefined, "pve2")).toBe("pve2");
  expect(() => chooseNode(nodes, undefined, null)).toThrow("--pve-node is missing");
  expect(() => chooseNode(nodes, "pve9", null)).toThrow("there is no Proxmox node pve9");
  expect(() => chooseNode(nodes, "pve1", null)).toThrow("Proxmox node pve1 is offline");
  expect(() => chooseNode([], undefined, null)).toThrow("Proxmox lists no node");
  expect(() => refuseTaken([{ vmid: 145, name: "other", node: "pve1" }], settings())).toThrow("VMID 145 is taken");
  expect(() => refuseTaken([{ vmid: 9, name: "llmgw-node05", node: "pve1" }], settings())).toThrow(
    "there is a machine called llmgw-node05",
  );
});

test.each([
  ["local:import/debian.qcow2", { volid: "local:import/debian.qcow2", fetch: null }],
  [
    "https://x/a/debian.qcow2",
    { volid: "local:import/debian.qcow2", fetch: { url: "https://x/a/debian.qcow2", storage: "local", file: "debian.qcow2" } },
  ],
  [
    "https://x/noble-server.img",
    {
      volid: "local:import/noble-server.qcow2",
      fetch: { url: "https://x/noble-server.img", storage: "local", file: "noble-server.qcow2" },
    },
  ],
  [
    "https://x/a%zz%20b.qcow2?v=1",
    {
      volid: "local:import/a_zz_b.qcow2",
      fetch: { url: "https://x/a%zz%20b.qcow2?v=1", storage: "local", file: "a_zz_b.qcow2" },
    },
  ],
  ["https://x/there.raw", { volid: "local:import/there.raw", fetch: null }],
])("the image %s", (image, expected) => {
  expect(imageOf(image, "local", ["local:import/there.raw"])).toEqual(expected);
});

test("another processor type than the host's is warned of, with what it costs", () => {
  expect(cpuNote("host")).toBeNull();
  expect(cpuNote("host,flags=+aes")).toBeNull();
  expect(cpuNote("x86-64-v2-AES")).toContain("1.5B 5.80 instead of 39.09");
});
