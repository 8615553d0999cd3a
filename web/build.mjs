// Bundles the runtime into one minified module, and refuses one that has grown too large.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { minify } from "terser";

const LARGEST = { bytes: 40_000, gzipped: 15 * 1024 };

// Properties that neither a page, nor JSON, nor the browser ever sees.
const INTERNAL = [
  "alive", "allocated", "arena", "base", "bound", "boundTo", "bytesOf", "cached", "callables", "carried", "change",
  "changed", "chunksOf", "compileOne", "counted", "drawn", "draws", "ending", "entry", "expect", "fail", "failure",
  "fetchChunks", "fetcher", "firstChecks", "fitting", "free", "generation", "give", "given", "gpu", "group",
  "groups", "hasChecks", "hasReports", "held", "install", "isChecked", "isDestroyed", "isInPlace", "isOwn",
  "isWritten", "place", "last", "lastCheck", "layouts", "leave", "loadAll", "made", "memory", "modules", "names",
  "nbytesOf", "numbered", "onBytes", "onPipeline", "outer", "own", "parametersSize", "parsed", "parts", "pool",
  "position", "positions", "prepare", "program", "readBytes", "readback", "reader", "report", "reserve",
  "restoring", "returned", "roles", "room", "saved", "scopes", "settled", "shapes", "since", "sized", "sizedAt",
  "slots", "staging", "states", "lend", "uniform", "upload", "urge", "usable", "hold", "users", "versions", "wanted",
];

// Those of the language and of WebGPU would break; of the globals, some are not used here.
const unused = new Set(["console", "process", "WebAssembly", "navigator"]);
const taken = new Set(Object.getOwnPropertyNames(globalThis).flatMap((name) => {
  const object = Object(unused.has(name) ? null : globalThis[name]);
  return [object, Object(object.prototype)].flatMap((each) => Object.getOwnPropertyNames(each));
}));
const webgpu = readFileSync("node_modules/@webgpu/types/dist/index.d.ts", "utf8");
for (const [, name] of webgpu.matchAll(/^\s+(?:readonly )?(\w+)[?]?[:(]/gm)) taken.add(name);
taken.delete("gpu"); // of the browser's it is written ["gpu"]
const unfit = INTERNAL.filter((name) => taken.has(name));
if (unfit.length) throw new Error(`the language or WebGPU has these names: ${unfit}; call what is internal otherwise`);

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
  compress: { passes: 3, ecma: 2022, unsafe_arrows: true, pure_getters: true, hoist_funs: true },
});
writeFileSync("dist/torch-webgpu.js", code);
const text = Buffer.from(code);
const size = { bytes: text.length, gzipped: gzipSync(text, { level: 9 }).length };
console.log(`dist/torch-webgpu.js: ${size.bytes} bytes, ${size.gzipped} gzipped`);
for (const [name, most] of Object.entries(LARGEST)) {
  if (size[name] > most) throw new Error(`the runtime has ${size[name]} ${name}, more than ${most}`);
}
