import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { createHash, randomBytes } from "node:crypto";
import { mkdtemp, readdir, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readIfThere } from "../../../src/os/files.ts";
import { fetchFile, type FetchRequest } from "../../../src/weights/fetch.ts";
import { fileNameOf, shownUrl, sourceOf } from "../../../src/weights/source.ts";
import { WeightStore } from "../../../src/weights/store.ts";
import type { OperatorError } from "../../../src/protocol/errors.ts";

const FILE = randomBytes(300_000);
const SHA256 = createHash("sha256").update(FILE).digest("hex");

/** How the next answers of the server go; the last one stays. */
type Behaviour = "well" | "cut" | "no-ranges" | "missing" | "broken" | "silent" | "other-size" | "no-if-range" | "endless";
/** By what the server knows its file; null = it says nothing. */
let etag: string | null = null;
let content = FILE;
let behaviours: Behaviour[] = ["well"];
let asked: string[] = [];
let server: Bun.Server<undefined>;
let folder: string;

function answer(request: Request): Response | Promise<Response> {
  asked.push(request.headers.get("range") ?? "whole");
  const behaviour = behaviours.length > 1 ? behaviours.shift() : behaviours[0];
  const condition = behaviour === "no-if-range" ? null : request.headers.get("if-range");
  const range = condition !== null && condition !== etag ? null : request.headers.get("range");
  const from = Number(/bytes=(\d+)-/.exec(range ?? "")?.[1] ?? 0);
  const tag = etag === null ? {} : { etag };
  switch (behaviour) {
    case "missing":
      return new Response("no", { status: 404 });
    case "broken":
      return new Response("no", { status: 503 });
    case "other-size":
      return new Response(FILE.subarray(0, 1_000));
    case "silent":
      return new Response(new ReadableStream({ pull: () => new Promise(() => {}) }), {
        headers: { "content-length": String(FILE.length) },
      });
    case "cut": {
      const half = from + Math.floor((FILE.length - from) / 2);
      let sent = false;
      const body = new ReadableStream({
        pull: async (controller) => {
          if (sent) {
            await Bun.sleep(50);
            controller.close();
          } else controller.enqueue(new Uint8Array(content.subarray(from, half)));
          sent = true;
        },
      });
      const headers = {
        "content-range": `bytes ${from}-${FILE.length - 1}/${FILE.length}`,
        "content-length": String(FILE.length - from),
        ...tag,
      };
      return new Response(body, { status: from > 0 ? 206 : 200, headers });
    }
    case "endless":
      return new Response(new ReadableStream({ pull: (controller) => controller.enqueue(new Uint8Array(65_536)) }));
    case "no-ranges":
      return new Response(FILE);
    case "well":
    case "no-if-range":
    case undefined:
      if (from === 0) return new Response(content, { headers: tag });
      if (from >= content.length) return new Response(null, { status: 416, headers: { "content-range": `bytes */${content.length}` } });
      return new Response(content.subarray(from), {
        status: 206,
        headers: { "content-range": `bytes ${from}-${content.length - 1}/${content.length}`, ...tag },
      });
  }
}

beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "llmgw-weights-"));
  behaviours = ["well"];
  etag = null;
  content = FILE;
  asked = [];
  server = Bun.serve({ hostname: "127.0.0.1", port: 0, fetch: answer });
});
afterEach(async () => {
  await server.stop(true);
  await rm(folder, { recursive: true, force: true });
});

const url = () => `http://127.0.0.1:${server.port}/models/tiny.gguf?token=secret`;
const request = (more: Partial<FetchRequest> = {}): FetchRequest => ({
  url: url(),
  path: join(folder, "file"),
  sha256: SHA256,
  size: FILE.length,
  signal: new AbortController().signal,
  progress: () => {},
  free: async () => 1e12,
  first_wait_ms: 1,
  ...more,
});
const refusal = (promise: Promise<unknown>): Promise<OperatorError> =>
  promise.then(
    () => Promise.reject(new Error("it was taken")),
    (error: OperatorError) => error,
  );

describe("a fetch", () => {
  test("puts the whole file in its place and tells how far it is", async () => {
    let last = 0;
    await fetchFile(request({ progress: (done) => (last = done) }));
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
    expect(last).toBe(FILE.length);
    expect(await readdir(folder)).toEqual(["file"]);
  });

  test("goes on where a broken connection left it", async () => {
    behaviours = ["cut", "cut", "well"];
    await fetchFile(request());
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
    expect(asked[0]).toBe("whole");
    expect(Number(/\d+/.exec(asked[2] ?? "")?.[0])).toBeGreaterThan(FILE.length / 3);
  });

  test("starts again where the server knows no ranges", async () => {
    behaviours = ["cut", "no-ranges"];
    await fetchFile(request());
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test("tells that it takes the digest, so that nobody takes it for stalled", async () => {
    const told: string[] = [];
    await fetchFile(request({ progress: (done, total, doing) => told.push(`${doing} ${done} ${total}`) }));
    expect(told[0]).toBe(`fetching 0 ${FILE.length}`);
    expect(told.at(-1)).toBe(`checking ${FILE.length} ${FILE.length}`);
  });

  test("is not asked for again when it was whole already", async () => {
    await writeFile(join(folder, "file.part"), FILE);
    await fetchFile(request());
    expect(asked).toEqual([]);
    await writeFile(join(folder, "file.part"), FILE);
    await fetchFile(request({ size: undefined }));
    expect(asked).toEqual([`bytes=${FILE.length}-`]);
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test("with neither digest nor a tag of the server, what was left is not trusted", async () => {
    behaviours = ["cut", "well"];
    await fetchFile(request({ sha256: undefined }));
    expect(asked).toEqual(["whole", "whole"]);
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test.each<[string, Behaviour[], number]>([
    ["and the server compares", ["cut", "well"], 2],
    ["and the server does not compare", ["cut", "no-if-range"], 3],
  ])("a file that changes on the server between two tries is not mixed, %s", async (_what, turns, requests) => {
    behaviours = turns;
    etag = '"one"';
    const fetched = fetchFile(request({ sha256: undefined, first_wait_ms: 200 }));
    while ((await readIfThere(join(folder, "file.tag.part"))) === null) await Bun.sleep(1);
    content = randomBytes(FILE.length);
    etag = '"two"';
    await fetched;
    expect(await readFile(join(folder, "file"))).toEqual(content);
    expect(asked).toHaveLength(requests);
    expect(await readdir(folder)).toEqual(["file"]);
  });

  test("an unchanged file is gone on with by its tag alone", async () => {
    behaviours = ["cut", "well"];
    etag = '"one"';
    await fetchFile(request({ sha256: undefined }));
    expect(asked[1]).toMatch(/^bytes=\d+-$/);
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test("tries that bring it further do not count", async () => {
    content = randomBytes(24 * 1024 * 1024);
    const sha256 = createHash("sha256").update(content).digest("hex");
    let cuts = 0;
    const origin = Bun.listen<undefined>({
      hostname: "127.0.0.1",
      port: 0,
      socket: {
        data: (socket, bytes) => {
          const from = Number(/range: bytes=(\d+)-/i.exec(bytes.toString())?.[1] ?? 0);
          const piece = content.subarray(from, from + 2 * 1024 * 1024);
          const head = [`HTTP/1.1 ${from > 0 ? "206 Partial Content" : "200 OK"}`, `content-length: ${content.length - from}`];
          if (from > 0) head.push(`content-range: bytes ${from}-${content.length - 1}/${content.length}`);
          cuts += 1;
          socket.write(`${head.join("\r\n")}\r\n\r\n`);
          let sent = 0;
          const pump = () => {
            while (sent < piece.length) {
              const wrote = socket.write(piece.subarray(sent));
              if (wrote <= 0) return void setTimeout(pump, 1);
              sent += wrote;
            }
            socket.end();
          };
          pump();
        },
      },
    });
    try {
      const url = `http://127.0.0.1:${origin.port}/w`;
      await fetchFile(request({ url, sha256, size: content.length }));
      expect(await readFile(join(folder, "file"))).toEqual(content);
      expect(cuts).toBeGreaterThanOrEqual(12);
    } finally {
      origin.stop(true);
    }
  });

  test("a disk that is full is told, and not tried again", async () => {
    await symlink("/dev/full", join(folder, "file.part"));
    const error = await refusal(fetchFile(request()));
    expect(error).toMatchObject({ code: "E_NO_ROOM", why: "the disk is full after 0 bytes" });
    expect(asked).toHaveLength(1);
  });

  test("what has no size and fills the disk does not stay on it", async () => {
    behaviours = ["endless"];
    await symlink("/dev/full", join(folder, "file.part"));
    expect(await refusal(fetchFile(request({ size: undefined, sha256: undefined })))).toMatchObject({ code: "E_NO_ROOM" });
    expect(await readdir(folder)).toEqual([]);
  });

  test("starts again when more was left than the server has", async () => {
    await writeFile(join(folder, "file.part"), randomBytes(FILE.length + 10));
    await fetchFile(request());
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test("does not trust what an earlier try left: the digest is of the whole file", async () => {
    await writeFile(join(folder, "file.part"), randomBytes(1_000));
    const error = await refusal(fetchFile(request()));
    expect(error.code).toBe("E_WEIGHTS");
    expect(error.why).toContain(SHA256);
    expect(await readdir(folder)).toEqual([]);
    await fetchFile(request());
    expect(await readFile(join(folder, "file"))).toEqual(FILE);
  });

  test.each([
    ["missing", {}, "E_WEIGHTS", "404", 1],
    ["other-size", {}, "E_WEIGHTS", "1000 bytes", 1],
    ["well", { sha256: "0".repeat(64) }, "E_WEIGHTS", SHA256, 1],
    ["endless", {}, "E_WEIGHTS", "more than the 300000 bytes", 1],
    ["broken", {}, "E_WEIGHTS", "503", 5],
    ["silent", { stall_ms: 100 }, "E_WEIGHTS", "no byte came", 5],
    ["well", { free: async () => 1_000 }, "E_NO_ROOM", "1000 are free", 1],
  ] as const)("%s %#: refused with its reason, nothing half left in place", async (behaviour, more, code, why, tries) => {
    behaviours = [behaviour];
    const error = await refusal(fetchFile(request(more)));
    expect(error.code).toBe(code);
    expect(error.why).toContain(why);
    expect(error.message).not.toContain("secret");
    expect(asked).toHaveLength(tries);
    expect(await Bun.file(join(folder, "file")).exists()).toBe(false);
  });
});

describe("a node's store", () => {
  const ref = () => ({ source: url(), sha256: SHA256, size: FILE.length });

  test("fetches once, however many ask and however often", async () => {
    const store = new WeightStore(join(folder, "store"));
    const signal = new AbortController().signal;
    const paths = await Promise.all(Array.from({ length: 5 }, () => store.obtain(ref(), () => {}, signal)));
    expect(new Set(paths).size).toBe(1);
    expect(await new WeightStore(join(folder, "store")).obtain(ref(), () => {}, signal)).toBe(paths[0] ?? "");
    expect(asked).toHaveLength(1);
    expect(paths[0]).toEndWith("/tiny.gguf");
  });

  test("one asker that leaves does not end the others' download; the last one does", async () => {
    behaviours = ["silent"];
    const store = new WeightStore(join(folder, "store"));
    const [first, second] = [new AbortController(), new AbortController()];
    const one = refusal(store.obtain(ref(), () => {}, first.signal));
    const two = refusal(store.obtain(ref(), () => {}, second.signal));
    first.abort(new Error("gone"));
    await one;
    expect(asked.length).toBeLessThanOrEqual(1);
    second.abort(new Error("gone too"));
    expect((await two).message).toBe("gone too");
    behaviours = ["well"];
    expect(await store.obtain(ref(), () => {}, new AbortController().signal)).toEndWith("tiny.gguf");
  });

  test("local files are used where they are, once they are what was named", async () => {
    const path = join(folder, "here.gguf");
    await writeFile(path, FILE);
    const store = new WeightStore(join(folder, "store"));
    const signal = new AbortController().signal;
    expect(await store.obtain({ source: path, sha256: SHA256 }, () => {}, signal)).toBe(path);
    expect((await refusal(store.obtain({ source: path, sha256: "0".repeat(64) }, () => {}, signal))).why).toContain(SHA256);
    expect((await refusal(store.obtain({ source: path, size: 1 }, () => {}, signal))).code).toBe("E_WEIGHTS");
    expect((await refusal(store.obtain({ source: folder, sha256: SHA256 }, () => {}, signal))).why).toContain("folder");
    expect(await store.obtain({ source: folder }, () => {}, signal)).toBe(folder);
    expect((await refusal(store.obtain({ source: "/dev/zero", sha256: SHA256 }, () => {}, signal))).why).toContain("neither a file");
    expect((await refusal(store.obtain({ source: join(folder, "none") }, () => {}, signal))).code).toBe("E_WEIGHTS");
  });
});

describe("sources", () => {
  test.each([
    ["https://x/a/b.gguf?x=1", "b.gguf"],
    ["https://x/a/%2e%2e%2fetc%2fpasswd", "_etc_passwd"],
    ["https://x/.hidden", "hidden"],
    ["https://x/", "weights"],
    ["https://x/%E0%A4%A", "_E0_A4_A"],
  ])("%s is kept as %s", (source, name) => {
    expect(fileNameOf(source)).toBe(name);
    expect(fileNameOf(source)).not.toContain("/");
  });

  test("a URL is shown without what is secret in it", () => {
    expect(shownUrl("https://user:pass@x/a?token=t")).toBe("https://x/a");
  });

  test("two URLs with one digest are one copy", () => {
    const key = (source: string) => {
      const it = sourceOf({ source, sha256: SHA256 });
      return it.kind === "url" ? it.key : "";
    };
    expect(key("https://a/x")).toBe(key("https://b/x"));
  });
});
