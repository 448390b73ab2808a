import { BODY_MS, REQUEST_BODY_BYTES } from "../protocol/limits.ts";
import { ApiError } from "./openai.ts";

/**
 * Reads the body of a request, of at most REQUEST_BODY_BYTES within BODY_MS, however it is sent.
 * @throws ApiError request_too_large, request_timeout
 */
export async function readBody(request: Request): Promise<Uint8Array> {
  const announced = request.headers.get("content-length");
  if (Number(announced ?? 0) > REQUEST_BODY_BYTES) throw tooLarge();
  let timer: Timer | undefined;
  const late = new Promise<never>((_resolve, reject) => {
    timer = setTimeout(() => reject(new ApiError("request_timeout", `a body must come within ${BODY_MS / 1_000} s`)), BODY_MS);
  });
  try {
    return await Promise.race([announced === null ? readChunks(request) : request.bytes(), late]);
  } finally {
    clearTimeout(timer);
  }
}

const tooLarge = () => new ApiError("request_too_large", `a request may have ${REQUEST_BODY_BYTES} bytes`);

/** A body of unknown length is counted as it comes, so that no more than the limit is ever held. */
async function readChunks(request: Request): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  for await (const piece of request.body ?? []) {
    length += piece.byteLength;
    if (length > REQUEST_BODY_BYTES) throw tooLarge();
    pieces.push(piece);
  }
  return Buffer.concat(pieces);
}
