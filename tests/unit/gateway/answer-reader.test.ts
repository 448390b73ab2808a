import { describe, expect, test } from "bun:test";
import { AnswerReader } from "../../../src/gateway/answer-reader.ts";

interface Read {
  status: number;
  headers: Headers;
  body: string;
  ended: boolean;
  reusable: boolean;
}

/** Reads an answer that comes in the given pieces, then the end of the connection when `closed`. */
function read(pieces: readonly string[], closed = false): Read {
  const found: Read = { status: 0, headers: new Headers(), body: "", ended: false, reusable: false };
  const reader = new AnswerReader({
    head: ({ status, headers }) => Object.assign(found, { status, headers }),
    body: (bytes) => (found.body += Buffer.from(bytes).toString("latin1")),
    end: () => (found.ended = true),
  });
  for (const piece of pieces) reader.take(Buffer.from(piece, "latin1"));
  if (closed) reader.close();
  found.reusable = reader.reusable;
  return found;
}

const OK = "HTTP/1.1 200 OK\r\n";
const CHUNKS = "5\r\nhello\r\n1;note=x\r\n \r\nA\r\n0123456789\r\n0\r\nx-trailer: y\r\n\r\n";
const CHUNKED = `${OK}transfer-encoding: chunked\r\nx-a: 1\r\n\r\n${CHUNKS}`;

describe("an answer is read the same however its bytes are cut", () => {
  const cases: [name: string, text: string, body: string, reusable: boolean][] = [
    ["a length", `${OK}content-length: 5\r\n\r\nhello`, "hello", true],
    ["chunks, an extension and a trailer", CHUNKED, "hello 0123456789", true],
    ["nothing", `${OK}content-length: 0\r\n\r\n`, "", true],
    ["a status without a body", "HTTP/1.1 204 No Content\r\ncontent-length: 7\r\n\r\n", "", true],
    ["an interim answer first", `HTTP/1.1 100 Continue\r\n\r\n${OK}content-length: 2\r\n\r\nhi`, "hi", true],
    ["a sender that wants to close", `${OK}connection: Keep-Alive, Close\r\ncontent-length: 2\r\n\r\nhi`, "hi", false],
    ["an old sender", "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", "hi", false],
    ["no words in the status line", "HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nhi", "hi", true],
  ];
  test.each(cases)("%s", (_name, text, body, reusable) => {
    const expected = { body, ended: true, reusable };
    expect(read([text])).toMatchObject(expected);
    expect(read(text.split(""))).toMatchObject(expected);
    for (let at = 1; at < text.length; at++) expect(read([text.slice(0, at), text.slice(at)])).toMatchObject(expected);
  });

  test("without a length it ends with the connection, which is used up", () => {
    expect(read([`${OK}\r\nall `, "there is"], true)).toMatchObject({ body: "all there is", ended: true, reusable: false });
    expect(read([`${OK}\r\nall `])).toMatchObject({ ended: false, reusable: false });
  });

  test("headers keep their values, repeated ones too", () => {
    const { headers } = read([`${OK}Content-Length: 0\r\nX-Odd:  a b \r\nset-cookie: a=1\r\nset-cookie: b=2\r\n\r\n`]);
    expect(headers.get("x-odd")).toBe("a b");
    expect(headers.getSetCookie()).toEqual(["a=1", "b=2"]);
  });
});

describe("what is no whole answer is refused", () => {
  const cases: [name: string, text: string, closed: boolean][] = [
    ["another protocol", "SSH-2.0-OpenSSH_9.6\r\n\r\n", false],
    ["HTTP/2", "HTTP/2 200\r\n\r\n", false],
    ["a change of protocol", "HTTP/1.1 101 Switching Protocols\r\n\r\n", false],
    ["a length and chunks", `${OK}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n`, false],
    ["two lengths", `${OK}content-length: 5\r\ncontent-length: 6\r\n\r\n`, false],
    ["a length that is none", `${OK}content-length: -1\r\n\r\n`, false],
    ["another coding", `${OK}transfer-encoding: gzip, chunked\r\n\r\n`, false],
    ["a blank before the colon", `${OK}content-length : 5\r\n\r\n`, false],
    ["a folded header", `${OK}x-a: 1\r\n content-length: 5\r\n\r\n`, false],
    ["a header without a colon", `${OK}hello\r\n\r\n`, false],
    ["a chunk without a size", `${OK}transfer-encoding: chunked\r\n\r\nxyz\r\n`, false],
    ["a chunk that is too long", `${OK}transfer-encoding: chunked\r\n\r\n2\r\nhello\r\n`, false],
    ["a chunk size past every number", `${OK}transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n`, false],
    ["more than it said", `${OK}content-length: 2\r\n\r\nhello`, false],
    ["a head without an end", `${OK}x-a: ${"a".repeat(70_000)}`, false],
    ["a cut head", OK, true],
    ["a cut body", `${OK}content-length: 5\r\n\r\nhel`, true],
    ["cut chunks", `${OK}transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n`, true],
    ["chunks without the last line", `${OK}transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n`, true],
  ];
  test.each(cases)("%s", (_name, text, closed) => {
    expect(() => read([text], closed)).toThrow();
  });
});
