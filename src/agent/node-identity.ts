import { readFile } from "node:fs/promises";
import { loadIdentity } from "../pki/identity.ts";
import type { Identity, IdentityPaths } from "../pki/identity.ts";
import { OperatorError } from "../protocol/errors.ts";
import type { NodeId } from "../protocol/ids.ts";

/**
 * The identity of this node, from its files.
 * @throws OperatorError E_IDENTITY when the certificate is not that of the node; what `loadIdentity` throws
 */
export async function loadNodeIdentity(tls: IdentityPaths, node: NodeId): Promise<Identity> {
  const identity = await loadIdentity(tls);
  if (identity.role === "node" && identity.name === node) return identity;
  const why = `${tls.cert} is the certificate of ${identity.role} ${identity.name}`;
  const remedy = `issue a certificate with llmgw ca issue-node ${node}, or name the node it is for with --node`;
  throw new OperatorError("E_IDENTITY", `this agent cannot be node ${node}`, why, remedy);
}

/** Whether the files no longer hold what was loaded from them. Files that cannot be read are for `loadNodeIdentity` to tell. */
export async function changedFiles(tls: IdentityPaths, { ca, cert, key }: Identity): Promise<boolean> {
  const [ca_now, cert_now, key_now] = await Promise.all(
    [tls.ca, tls.cert, tls.key].map((file) => readFile(file, "utf8").catch(() => null)),
  );
  return (ca_now ?? ca) !== ca || (cert_now ?? cert) !== cert || (key_now ?? key) !== key;
}
