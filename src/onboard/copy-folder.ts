import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { OperatorError } from "../protocol/errors.ts";
import { lastWords, type NodeShell } from "./node-shell.ts";

/** Says what the folder there was made of; a folder without that mark is somebody else's and stays as it is. */
const MARK = ".llmgw-copy";

const LOOK = `
if [ -f "$1/${MARK}" ]; then cat "$1/${MARK}"; elif [ -e "$1" ]; then echo foreign; fi
`;

/** The archive is compared before the folder takes its place, so that a lost connection leaves no half of it. */
const UNPACK = `
umask 022
new="$1.llmgw-$$"
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP PIPE TERM
mkdir -p "$new"
tee "$new/archive" | sha256sum | cut -c1-64 > "$new/${MARK}"
[ "$(cat "$new/${MARK}")" = "$2" ] || { echo "what arrived is not what was sent" >&2; exit 1; }
tar -xf "$new/archive" -C "$new" --no-same-owner
rm "$new/archive"
rm -rf "$1"
mv "$new" "$1"
`;

/** The same folder gives the same bytes: order, owners and times of files do not count. Engines' user may read all of it. */
async function* archive(folder: string): AsyncGenerator<Uint8Array> {
  const options = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX", `--exclude=./${MARK}`];
  const child = spawn("tar", [...options, "-C", folder, "-cf", "-", "."], { stdio: ["ignore", "pipe", "ignore"] });
  yield* child.stdout as AsyncIterable<Uint8Array>;
}

/**
 * Copies a folder of this machine to the same path on a node, when it is not there already.
 * @returns what was done
 * @throws OperatorError E_EXISTS when something else is in its place, E_NODE when it cannot be unpacked
 */
export async function copyFolder(folder: string, shell: NodeShell): Promise<string> {
  const hash = createHash("sha256");
  let size = 0;
  for await (const chunk of archive(folder)) {
    hash.update(chunk);
    size += chunk.length;
  }
  const digest = hash.digest("hex");
  const there = (await shell.script(`looking at ${folder}`, LOOK, [folder])).trim();
  if (there === digest) return `${folder} is there`;
  if (there === "foreign")
    throw new OperatorError(
      "E_EXISTS",
      `${folder} is there on the node already`,
      "llmgw did not put it there, and does not replace it",
      `move it away there, or give the path of its llama-server instead of the folder`,
    );
  const ran = await shell.run(["sh", "-euc", UNPACK, "sh", folder, digest], { input: archive(folder) });
  if (ran.code !== 0)
    throw new OperatorError("E_NODE", `${folder} could not be copied to the node`, lastWords(ran), "mend that, then onboard again");
  return `${folder}, ${Math.round(size / 1024 / 1024)} MiB, copied from here`;
}
