import { join } from "node:path";
import { makePrivateFolder, readIfThere, writeAtomic } from "../../os/files.ts";
import { CERTIFICATE_DAYS, issueWithKey, makeAuthority, type Circumstances, type KeyedCertificate } from "../../pki/authority.ts";
import type { Role } from "../../protocol/ids.ts";

interface Issued {
  readonly folder: string;
  /** The files' name without ending: `node` for node.crt and node.key. */
  readonly file: string;
  readonly name: string;
  readonly role: Role;
  readonly ips: readonly string[];
}

/** The folder's authority, made when there is none: a demo that starts from a kept folder keeps whom it trusts. */
async function authorityIn(folder: string, circumstances: Circumstances): Promise<KeyedCertificate> {
  await makePrivateFolder(folder);
  const [cert, key] = await Promise.all([readIfThere(join(folder, "ca.crt")), readIfThere(join(folder, "ca.key"))]);
  if (cert !== null && key !== null) return { cert, key };
  const made = await makeAuthority("llmgw demo", circumstances);
  await writeAtomic(join(folder, "ca.crt"), made.cert);
  await writeAtomic(join(folder, "ca.key"), made.key, 0o600);
  return made;
}

async function issueTo(authority: KeyedCertificate, issued: Issued, circumstances: Circumstances): Promise<void> {
  const { folder, file, name, role, ips } = issued;
  await makePrivateFolder(folder);
  const made = await issueWithKey(authority, { name, role, ips, dns: [], days: CERTIFICATE_DAYS }, circumstances);
  await Promise.all([
    writeAtomic(join(folder, "ca.crt"), authority.cert),
    writeAtomic(join(folder, `${file}.crt`), made.cert),
    writeAtomic(join(folder, `${file}.key`), made.key, 0o600),
  ]);
}

/** Writes the certificates of a demo: server, gateway, an admin for ctl, and each node. */
export async function demoCertificates(
  root: string,
  nodes: readonly { readonly id: string; readonly address: string }[],
  circumstances: Circumstances,
): Promise<void> {
  const authority = await authorityIn(join(root, "ca"), circumstances);
  const tls = join(root, "server", "tls");
  const all: Issued[] = [
    { folder: tls, file: "server", name: "server", role: "server", ips: ["127.0.0.1"] },
    { folder: tls, file: "gateway", name: "gateway", role: "gateway", ips: [] },
    { folder: join(root, "ctl"), file: "admin", name: "demo", role: "admin", ips: [] },
    ...nodes.map(({ id, address }): Issued => ({
      folder: join(root, "nodes", id, "tls"),
      file: "node",
      name: id,
      role: "node",
      ips: [address],
    })),
  ];
  await Promise.all(all.map((each) => issueTo(authority, each, circumstances)));
}
