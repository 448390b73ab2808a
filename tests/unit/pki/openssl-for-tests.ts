import { writeFile } from "node:fs/promises";
import { join } from "node:path";

/** What a client shows at a door; all PEM. */
export interface Shown {
  readonly cert: string;
  readonly key: string;
  /** Further certificates it sends along. */
  readonly chain?: string;
}

export interface Call {
  readonly port: number;
  /** A folder for its files. */
  readonly folder: string;
  readonly shown: Shown | null;
  readonly version?: "-tls1_2" | "-tls1_3";
  /** File a session is written to, or taken from. */
  readonly save?: string;
  readonly resume?: string;
  /** What is asked for; `/who` when absent. */
  readonly path?: string;
}

let calls = 0;

/** Asks a door with `openssl s_client`, an implementation that is not Bun's, and says all it printed. */
export async function askWithOpenssl({ port, folder, shown, version = "-tls1_3", save, resume, path = "/who" }: Call): Promise<string> {
  const file = (name: string) => join(folder, `${calls}-${name}`);
  calls += 1;
  const args = ["openssl", "s_client", "-connect", `127.0.0.1:${port}`, "-ign_eof", version];
  if (shown) {
    await writeFile(file("crt"), shown.cert);
    await writeFile(file("key"), shown.key, { mode: 0o600 });
    args.push("-cert", file("crt"), "-key", file("key"));
    if (shown.chain !== undefined) {
      await writeFile(file("chain"), shown.chain);
      args.push("-cert_chain", file("chain"));
    }
  }
  if (save !== undefined) args.push("-sess_out", save);
  if (resume !== undefined) args.push("-sess_in", resume);
  const request = new Blob([`GET ${path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n`]);
  const client = Bun.spawn(args, { stdin: request, stdout: "pipe", stderr: "pipe", timeout: 10_000 });
  const [out, err] = await Promise.all([new Response(client.stdout).text(), new Response(client.stderr).text()]);
  await client.exited;
  return out + err;
}
