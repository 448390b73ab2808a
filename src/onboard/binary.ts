import { createHash } from "node:crypto";
import { open, stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import { messageOf, OperatorError } from "../protocol/errors.ts";

/** A file that can be installed on a node. */
export interface Binary {
  readonly path: string;
  readonly arch: "amd64" | "arm64";
  /** sha256, hex. */
  readonly digest: string;
  readonly size: number;
}

/** e_machine of ELF headers. */
const MACHINES: Readonly<Record<number, "amd64" | "arm64">> = { 62: "amd64", 183: "arm64" };

/** The architecture a program is for, from its first 20 bytes; null when it is no ELF program of a known one. */
export function architectureOfProgram(head: Uint8Array): "amd64" | "arm64" | null {
  if (head.length < 20 || Buffer.from(head.subarray(0, 4)).toString("latin1") !== "\x7fELF") return null;
  // Byte 5 tells the order of bytes; both architectures are little-endian, 64 bit.
  if (head[4] !== 2 || head[5] !== 1) return null;
  return MACHINES[Buffer.from(head).readUInt16LE(18)] ?? null;
}

interface BinarySource {
  /** Files of `--binary`. */
  readonly given: readonly string[];
  /** This program when it is a built binary; null when it runs from its sources. */
  readonly own: string | null;
}

/**
 * The binaries there are to choose from: those given, else the release's beside this program, and this program itself.
 * @throws OperatorError E_FILE, E_CONFIG when a given file is no program
 */
export async function binariesOf({ given, own }: BinarySource): Promise<Binary[]> {
  if (given.length > 0) return Promise.all(given.map(readBinary));
  if (own === null) return [];
  const beside = ["amd64", "arm64"].map((arch) => join(dirname(own), `llmgw-linux-${arch}`));
  const found: Binary[] = [];
  for (const path of [...beside, own]) if (await Bun.file(path).exists()) found.push(await readBinary(path));
  return found;
}

/**
 * The binary for a node's architecture.
 * @throws OperatorError E_CONFIG when there is none
 */
export function chooseBinary(binaries: readonly Binary[], arch: "amd64" | "arm64", given: boolean): Binary {
  const found = binaries.find((binary) => binary.arch === arch);
  if (found) return found;
  const there = binaries.map(({ path, arch: other }) => `${path} is for ${other}`).join(", ");
  const remedy = given
    ? `add --binary llmgw-linux-${arch}`
    : `put llmgw-linux-${arch} of the release beside this program, or name it with --binary`;
  throw new OperatorError("E_CONFIG", `there is no llmgw binary for the node's architecture, ${arch}`, there || "none was found", remedy);
}

async function readBinary(path: string): Promise<Binary> {
  try {
    const { size } = await stat(path);
    const file = await open(path);
    const head = new Uint8Array(64);
    try {
      await file.read(head);
    } finally {
      await file.close();
    }
    const arch = architectureOfProgram(head);
    if (arch === null)
      throw new OperatorError(
        "E_CONFIG",
        `${path} is not an llmgw binary`,
        "it is no program for Linux on amd64 or arm64",
        "name the release's binary with --binary",
      );
    const hash = createHash("sha256");
    for await (const chunk of Bun.file(path).stream()) hash.update(chunk);
    return { path, arch, digest: hash.digest("hex"), size };
  } catch (error) {
    if (error instanceof OperatorError) throw error;
    throw new OperatorError("E_FILE", `cannot read the binary ${path}`, messageOf(error), "check the path of --binary");
  }
}
