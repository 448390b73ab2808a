// Runs the pinned Bun from node_modules with the given arguments, and fetches node_modules first when they
// are not there. Needs only Node 20 and npm, and works where npm runs no install scripts: then the command
// of the `bun` package is a stub, but the program itself lies in the package of the platform.
import { spawn, spawnSync } from "node:child_process";
import { existsSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");

function findBun() {
  const arch = process.arch === "arm64" ? "aarch64" : process.arch;
  const places = [
    join(root, "node_modules", "@oven", `bun-${process.platform}-${arch}`, "bin", "bun"),
    join(root, "node_modules", "bun", "bin", "bun.exe"),
  ];
  // The stub is a few hundred bytes; the program is about 100 MB.
  return places.find((place) => existsSync(place) && statSync(place).size > 1_000_000);
}

if (!findBun()) {
  console.error("llmgw: fetching development packages (npm ci)");
  const { status } = spawnSync("npm", ["ci", "--ignore-scripts", "--no-audit", "--no-fund"], { cwd: root, stdio: ["ignore", 2, 2] });
  if (status !== 0) process.exit(status ?? 1);
}
const bun = findBun();
if (!bun) {
  console.error(`llmgw: the bun package has no program for ${process.platform} ${process.arch}`);
  process.exit(1);
}

// `bun check` would run the script of that name in package.json, and that one calls this.
const [word, ...rest] = process.argv.slice(2);
const words = word === "check" ? [word, "--no-script", ...rest] : process.argv.slice(2);
const child = spawn(bun, words, { cwd: root, stdio: "inherit" });
// The terminal sends Ctrl-C to the child as well; this process only waits for it.
process.on("SIGINT", () => {});
process.on("SIGTERM", () => child.kill("SIGTERM"));
child.on("exit", (code, signal) => process.exit(code ?? (signal === "SIGINT" ? 130 : 1)));
