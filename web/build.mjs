// Bundles the runtime into one minified module, and refuses one that has grown too large.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { minify } from "terser";

const LARGEST = { bytes: 40_000, gzipped: 15_000 };

// Properties that neither a page, nor JSON, nor the browser ever sees.
const INTERNAL = [
  "allocated", "arena", "base", "bind", "bound", "bytesOf", "bytesToLoad", "cached", "callable",
  "callables", "carried", "change", "compile", "counted", "drawn", "fail", "failure", "fetchChunks",
  "fetcher", "firstChecks", "free", "generation", "grids", "groups", "hasChecks", "hasReports", "held",
  "isChecked", "isDestroyed", "isInPlace", "isOwn", "lastCheck", "layouts", "leave", "loadStates", "memory",   "named", "numbered", "onBytes", "onPipeline", "outer", "own", "parametersSize", "pool", "positions", "prepare",
  "program", "putState", "reader", "report", "restoring", "returned", "roles", "saved", "settled", "sized", "slots", "staging",
  "states", "uniform", "usable", "users", "versions", "take", "give", "use",
];

await build({
  entryPoints: ["src/index.ts"],
  outfile: "dist/torch-webgpu.js",
  bundle: true,
  minify: true,
  mangleProps: new RegExp(`^(${INTERNAL.join("|")})$`),
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});
// Its second passes take a twentieth off what is left.
const { code } = await minify(readFileSync("dist/torch-webgpu.js", "utf8"), {
  module: true,
  compress: { passes: 3, ecma: 2022, unsafe_arrows: true, pure_getters: true },
});
writeFileSync("dist/torch-webgpu.js", code);
const text = Buffer.from(code);
const size = { bytes: text.length, gzipped: gzipSync(text, { level: 9 }).length };
console.log(`dist/torch-webgpu.js: ${size.bytes} bytes, ${size.gzipped} gzipped`);
for (const [name, most] of Object.entries(LARGEST)) {
  if (size[name] > most) throw new Error(`the runtime has ${size[name]} ${name}, more than ${most}`);
}
