import { createHash } from "node:crypto";
import type { WeightsRef } from "../protocol/plan.ts";

/** Where weights come from: a file or folder that is already there, or something to fetch. */
export type Source =
  | { readonly kind: "path"; readonly path: string }
  | {
      readonly kind: "url";
      readonly url: string;
      /** Names the one copy on a node: the digest when it is known, else the URL's. */
      readonly key: string;
      readonly file_name: string;
    };

/** Reads a source of the catalog (its schema has seen it). */
export function sourceOf({ source, sha256 }: WeightsRef): Source {
  if (source.startsWith("/")) return { kind: "path", path: source };
  const key = sha256 ?? `url-${createHash("sha256").update(source).digest("hex").slice(0, 40)}`;
  return { kind: "url", url: source, key, file_name: fileNameOf(source) };
}

/** The last part of a URL's path as a harmless file name: engines look at endings like `.gguf`. */
export function fileNameOf(url: string): string {
  const last = new URL(url).pathname.split("/").at(-1) ?? "";
  let name: string;
  try {
    name = decodeURIComponent(last);
  } catch {
    name = last;
  }
  const safe = name
    .replaceAll(/[^A-Za-z0-9._-]/g, "_")
    .replace(/^\.+/, "")
    .slice(-120);
  return safe === "" ? "weights" : safe;
}

/** A URL for logs and reasons: without user, password and query, where tokens hide. */
export function shownUrl(url: string): string {
  const { protocol, host, pathname } = new URL(url);
  return `${protocol}//${host}${pathname}`;
}
