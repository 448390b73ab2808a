import { afterAll, afterEach, beforeAll, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, readdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { install, installedEngines, uvTool, type InstallJob } from "../../../src/agent/engine-install.ts";
import { isAlive } from "../../../src/os/process.ts";
import type { Recipe, ReleaseFile } from "../../../src/protocol/engine-release.ts";
import { explain, OperatorError } from "../../../src/protocol/errors.ts";
import { ARCHIVE_ENTRIES_COUNT } from "../../../src/protocol/limits.ts";
import { until } from "../shim/rank-for-tests.ts";

const recipe = { how: "packages" as const, requirements: ["sglang==0.5.23"], uv: [] };

test("what uv is asked for: an environment of its own Python, then exactly these packages", () => {
  const words = uvTool("/e/uv/uv").steps("/e/sglang/0.5.23", { ...recipe, index: null });
  expect(words.map((argv) => argv.join(" "))).toEqual([
    "/e/uv/uv venv --python 3.12 --seed /e/sglang/0.5.23",
    "/e/uv/uv pip install --python /e/sglang/0.5.23/bin/python --prerelease=allow sglang==0.5.23",
  ]);
});

// Archives as a hostile or broken mirror may have them, written by Python's tarfile: tar itself would not.
let folder = "";
let web: Bun.Server<undefined>;
const archives = new Map<string, Buffer>();
let path_before: string | undefined;

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-install-"));
  web = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => {
      const archive = archives.get(new URL(request.url).pathname.slice(1));
      return archive ? new Response(archive) : new Response("no", { status: 404 });
    },
  });
  path_before = process.env["PATH"];
});
afterAll(async () => {
  await web.stop(true);
  await rm(folder, { recursive: true, force: true });
});
afterEach(() => {
  process.env["PATH"] = path_before;
});

/** An entry: `file` with a text, or one that leads elsewhere. */
type Entry = readonly [name: string, kind: "file" | "symlink" | "link" | "device" | "pipe", more: string];

const WRITER = `
import io, json, sys, tarfile
with tarfile.open(sys.argv[1], "w:gz", compresslevel=1) as tar:
    for name, kind, more in json.load(sys.stdin):
        entry = tarfile.TarInfo(name)
        entry.mode = 0o6777
        if kind == "file":
            data = more.encode()
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        else:
            entry.type = {"symlink": b"2", "link": b"1", "device": b"3", "pipe": b"6"}[kind]
            entry.linkname, entry.devmajor, entry.devminor = more, 1, 3
            tar.addfile(entry)
`;

/** Serves a file of the folder. */
async function served(name: string): Promise<ReleaseFile> {
  const bytes = await readFile(join(folder, name));
  archives.set(name, bytes);
  return {
    name,
    url: `http://127.0.0.1:${web.port}/${name}`,
    size: bytes.length,
    sha256: createHash("sha256").update(bytes).digest("hex"),
  };
}

let count = 0;
async function archiveOf(entries: readonly Entry[]): Promise<ReleaseFile> {
  const name = `${(count += 1)}.tar.gz`;
  const input = Buffer.from(JSON.stringify(entries));
  const made = Bun.spawn(["python3", "-c", WRITER, join(folder, name)], { stdin: input, stderr: "pipe" });
  if ((await made.exited) !== 0) throw new Error(await made.stderr.text());
  return served(name);
}

function jobOf(root: string, recipe: Recipe, signal = new AbortController().signal): InstallJob {
  const kind = recipe.how === "archives" ? "llamacpp" : "vllm";
  const host = { arch: "x64" } as InstallJob["inventory"]["host"];
  return { root, engine: { kind, version: "v1", recipe, reason: "" }, inventory: { host, gpus: [] }, signal, tell: () => {} };
}

async function installedFrom(files: readonly ReleaseFile[]): Promise<{ root: string; fault: OperatorError | null }> {
  const root = await mkdtemp(join(folder, "engines-"));
  const job = jobOf(root, { how: "archives", builds: [{ arch: "x64", cuda: null, files: [...files] }] });
  try {
    await install(job);
    return { root, fault: null };
  } catch (error) {
    if (!(error instanceof OperatorError)) throw error;
    return { root, fault: error };
  }
}

const installed = async (...parts: readonly (readonly Entry[])[]) => installedFrom(await Promise.all(parts.map(archiveOf)));

const SERVER: Entry = ["llama/llama-server", "file", "#!/bin/sh\n"];
const OUTSIDE = "/usr/lib";

const HOSTILE: readonly (readonly [string, readonly (readonly Entry[])[], RegExp])[] = [
  ["a name that climbs out", [[SERVER, ["../../out", "file", "x"]]], /Member name contains '\.\.'/],
  ["a link to all of the machine", [[SERVER, ["llama/all", "symlink", "/"]]], /the link .*all leads to \/, which is not part of it/],
  ["a link to a folder, and a file through it", [[SERVER, ["llama/d", "symlink", OUTSIDE], ["llama/d/f", "file", "x"]]], /llama\/d\/f/],
  ["a hard link to what is not in it", [[SERVER, ["llama/h", "link", "/etc/passwd"]]], /llama\/h: Cannot hard link/],
  ["a device", [[SERVER, ["llama/null", "device", ""]]], /llama\/null is neither a file nor a folder nor a link/],
  ["a pipe", [[SERVER, ["llama/pipe", "pipe", ""]]], /llama\/pipe is neither a file nor a folder nor a link/],
  ["a program that is a link out", [[["llama/llama-server", "symlink", "/bin/sh"]]], /llama-server leads to \/bin\/sh/],
  ["no program", [[["llama/README", "file", "x"]]], /there is no llama-server/],
  ["a runtime whose link is a folder of libraries", [[SERVER], [["cuda/all", "symlink", OUTSIDE]]], /the link .*all leads to \/usr\/lib/],
  [
    "more files than an engine has",
    [[SERVER, ...Array.from({ length: ARCHIVE_ENTRIES_COUNT }, (_, at): Entry => [`llama/${at}`, "file", ""])]],
    /it has more than \d+ files/,
  ],
];

test.each(HOSTILE)(
  "an archive with %s is refused with the reason, and nothing of it stays",
  async (_what, parts, reason) => {
    const before = await readdir(OUTSIDE);
    const { root, fault } = await installed(...parts);
    expect(fault).toBeInstanceOf(OperatorError);
    expect(explain(fault)).toMatch(reason);
    expect(await installedEngines(root, "llamacpp")).toEqual([]);
    expect(await readdir(join(root, "llamacpp"))).toEqual([]);
    expect(await readdir(OUTSIDE)).toEqual(before);
    expect(existsSync(join(root, "out"))).toBe(false);
  },
  30_000,
);

test("what would run as another user is unpacked as an ordinary file, and a circle of links is no way out", async () => {
  const { root, fault } = await installed([SERVER, ["llama/lib/x.so", "file", "x"], ["llama/lib/up", "symlink", "../lib"]]);
  expect(fault).toBeNull();
  const [engine] = await installedEngines(root, "llamacpp");
  expect((await stat(engine?.program ?? "")).mode & 0o7000).toBe(0);
});

test("an archive that holds more than there is room for is refused before it fills the disk", async () => {
  const top = await mkdtemp(join(folder, "bomb-"));
  await writeFile(join(top, "llama-server"), "#!/bin/sh\n");
  // A hole of 8 TiB is a few bytes of an archive.
  const words = "truncate -s 8T hole && tar --create --sparse --gzip --file ../bomb.tar.gz llama-server hole && rm hole";
  expect(await Bun.spawn(["sh", "-c", words], { cwd: top }).exited).toBe(0);
  const { root, fault } = await installedFrom([await served("bomb.tar.gz")]);
  expect(fault).toMatchObject({ code: "E_NO_ROOM", why: expect.stringMatching(/what is in it needs 8\d{6} MiB, and \d+ MiB are free/) });
  expect(await readdir(join(root, "llamacpp"))).toEqual([]);
});

/** Puts programs of these texts before all others. */
async function programs(texts: Readonly<Record<string, string>>): Promise<void> {
  const bin = await mkdtemp(join(folder, "bin-"));
  for (const [name, text] of Object.entries(texts)) await writeFile(join(bin, name), `#!/bin/sh\n${text}\n`, { mode: 0o755 });
  process.env["PATH"] = `${bin}:${path_before}`;
}

/** A python3 that makes an environment whose pip does this. */
const venvWith = (pip: string) =>
  [
    'mkdir -p "$3/bin"',
    `printf '%s' '${`#!/bin/sh\n${pip}\n`.replaceAll("'", `'"'"'`)}' > "$3/bin/python"`,
    'chmod +x "$3/bin/python"',
  ].join("\n");

async function pythonFails(python3: string): Promise<OperatorError> {
  await programs({ python3 });
  const root = await mkdtemp(join(folder, "engines-"));
  const failed = await install(jobOf(root, { how: "packages", requirements: ["vllm==1"], index: null, uv: [] })).catch(
    (error: unknown) => error,
  );
  expect(await readdir(join(root, "vllm"))).toEqual([]);
  if (!(failed instanceof OperatorError)) throw failed;
  return failed;
}

const PYTHON_TOO_OLD = [
  "echo 'ERROR: Ignored the following versions that require a different python version: 1 Requires-Python >=3.99' >&2",
  "echo 'ERROR: Could not find a version that satisfies the requirement vllm==1' >&2",
  "echo 'ERROR: No matching distribution found for vllm==1' >&2; exit 1",
].join("\n");
const NO_ENSUREPIP = [
  "echo 'The virtual environment was not created successfully because ensurepip is not'",
  "echo 'available.  On Debian/Ubuntu systems, you need to install the python3-venv'",
  "echo 'Failing command: /x/bin/python3.13'; exit 1",
].join("\n");
const MUCH = "head -c 3000000 /dev/zero | tr '\\0' 'x' | fold -w 100; echo 'ERROR: the true reason' >&2; echo 'see above'; exit 1";

test.each([
  [
    "a Python that is too old",
    venvWith(PYTHON_TOO_OLD),
    "E_ENGINE",
    /require a different python version: 1 Requires-Python >=3\.99/,
    /python3/,
  ],
  ["no ensurepip", NO_ENSUREPIP, "E_ENGINE", /ensurepip is not/, /python3 with its venv/],
  ["megabytes of output", venvWith(MUCH), "E_ENGINE", /the true reason/, /by hand/],
  [
    "a full disk, said in the midst",
    venvWith("echo 'OSError: [Errno 28] No space left on device'; echo 'ERROR: it failed' >&2; exit 2"),
    "E_NO_ROOM",
    /No space left/,
    /free some disk/,
  ],
  ["pip that says nothing", venvWith("exit 3"), "E_ENGINE", /says nothing/, /by hand/],
] as const)("%s is told as what it is", async (_what, python3, code, why, remedy) => {
  const failed = await pythonFails(python3);
  expect(failed.code).toBe(code);
  expect(failed.why).toMatch(why);
  expect(failed.remedy).toMatch(remedy);
});

test("the index, which may hold a password, is told by the environment and stands in no argument", async () => {
  const index = "https://reader:hunter2@mirror.example/simple/";
  expect(JSON.stringify(uvTool("/uv").steps("/f", { ...recipe, index }))).not.toContain("mirror.example");
  expect(uvTool("/uv").index_variable).toBe("UV_DEFAULT_INDEX");
  const root = await mkdtemp(join(folder, "engines-"));
  const pip = `echo "$@" > ${root}/argv; echo "$PIP_INDEX_URL" > ${root}/index; touch $(dirname $0)/vllm; chmod +x $(dirname $0)/vllm`;
  await programs({ python3: venvWith(pip) });
  await install(jobOf(root, { how: "packages", requirements: ["vllm==1"], index, uv: [] }));
  expect(await readFile(join(root, "index"), "utf8")).toBe(`${index}\n`);
  const argv = await readFile(join(root, "argv"), "utf8");
  expect(argv).toContain("vllm==1");
  expect(argv).not.toContain("hunter2");
});

const hangs = (pid_file: string) => venvWith(`(echo $$ > ${pid_file}; exec sleep 600)`);
const pidIn = async (file: string): Promise<number> => {
  await until("its pid", async () => /^\d+\n/.test(await readFile(file, "utf8").catch(() => "")));
  return Number(await readFile(file, "utf8"));
};

test("an installation that is no longer wanted ends with all its programs before its promise does", async () => {
  const root = await mkdtemp(join(folder, "engines-"));
  await programs({ python3: hangs(join(root, "pid")) });
  const stop = new AbortController();
  const job = jobOf(root, { how: "packages", requirements: ["vllm==1"], index: null, uv: [] }, stop.signal);
  const over = install(job).catch((error: unknown) => error);
  const pid = await pidIn(join(root, "pid"));
  stop.abort(new Error("no longer wanted"));
  expect(String(await over)).toContain("no longer wanted");
  expect(isAlive(pid)).toBe(false);
  expect(await readdir(join(root, "vllm"))).toEqual([]);
});

test("what an agent that was killed left at work is ended before its folder is made anew", async () => {
  const root = await mkdtemp(join(folder, "engines-"));
  await mkdir(join(root, "vllm", "v1"), { recursive: true });
  // As a pip of an agent that is gone: nobody's child, and it goes on writing.
  const orphan = Bun.spawn(
    ["setsid", "sh", "-c", `while true; do mkdir -p ${root}/vllm/v1; echo x > ${root}/vllm/v1/half; sleep 0.02; done`],
    {
      env: { PATH: path_before, LLMGW_INSTALL: join(root, "vllm", "v1") },
    },
  );
  try {
    await until("it to write", () => existsSync(join(root, "vllm", "v1", "half")));
    await programs({ python3: venvWith("touch $(dirname $0)/vllm; chmod +x $(dirname $0)/vllm") });
    const engine = await install(jobOf(root, { how: "packages", requirements: ["vllm==1"], index: null, uv: [] }));
    expect(isAlive(orphan.pid)).toBe(false);
    expect(await readdir(engine.folder)).not.toContain("half");
  } finally {
    orphan.kill("SIGKILL");
  }
});
