import { readFile } from "node:fs/promises";
import { loadIdentity, makeIdentity, type Identity } from "../pki/identity.ts";
import { messageOf, OperatorError } from "../protocol/errors.ts";
import { isPem, type Context } from "./context.ts";

async function pem(text: string): Promise<string> {
  if (isPem(text)) return text;
  try {
    return await readFile(text, "utf8");
  } catch (error) {
    throw new OperatorError("E_FILE", `cannot read ${text}`, messageOf(error), "check the path and its mode");
  }
}

/**
 * The identity a context speaks with.
 * @throws OperatorError naming the context when a file is missing, a key is open to others, or the parts do not fit
 */
export async function identityOf(name: string, context: Context): Promise<Identity> {
  const { ca, cert, key } = context;
  try {
    // A key in a file of its own is checked for who may read it; one in the file of contexts was checked with that.
    if (!isPem(key) && !isPem(cert) && !isPem(ca)) return await loadIdentity({ ca, cert, key });
    const named = (text: string, what: string) => (isPem(text) ? `the ${what} of context ${name}` : text);
    const names = { ca: named(ca, "authority"), cert: named(cert, "certificate"), key: named(key, "key") };
    return makeIdentity({ ca: await pem(ca), cert: await pem(cert), key: await pem(key) }, names);
  } catch (error) {
    if (!(error instanceof OperatorError)) throw error;
    throw new OperatorError(error.code, `context ${name}: ${error.message}`, error.why, error.remedy);
  }
}
