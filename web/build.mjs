// Bundles the runtime into one minified module, with its types, and refuses one that has grown too large.
//
//   node build.mjs FOLDER …     writes it into each of these
import { build } from "esbuild";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { minify } from "terser";
import { declarations } from "./declarations.mjs";

const folders = process.argv.slice(2);

function write(name, text) {
  for (const folder of folders) {
    mkdirSync(folder, { recursive: true });
    writeFileSync(`${folder}/${name}`, text);
  }
}

// Most pages never fetch the second one, which runs loops, branches and sizes that data decide; it takes 600 bytes of the first one.
const LARGEST = {
  "torch-webgpu": { bytes: 40 * 1024, gzipped: 16 * 1024 },
  "torch-webgpu-composed": { bytes: 20_000, gzipped: 8 * 1024 },
  "torch-webgpu-report": { bytes: 4_000, gzipped: 2 * 1024 },
  "torch-webgpu-image": { bytes: 5_000, gzipped: 2_500 },
  "torch-webgpu-audio": { bytes: 80_000, gzipped: 25_000 }, // with Hugging Face's tokenizers
  "torch-webgpu-text": { bytes: 150_000, gzipped: 50_000 }, // with Hugging Face's tokenizers and chat templates
};

// Properties that neither a page, nor JSON, nor the browser ever sees.
const INTERNAL = [
  "alive", "allocate", "allocated", "arena", "base", "bound", "boundTo", "bytesOf", "cached", "callables", "change",
  "changed", "chunksOf", "compileOne", "composing", "copied", "counted", "counts", "damaged", "dead", "drawn", "draws", "drop", "ending", "entry", "expect", "fail", "failure",
  "fetchChunks", "fetcher", "firstChecks", "fitting", "free", "generation", "give", "given", "gpu", "group",
  "groups", "hasChecks", "hasReports", "held", "goesOn", "install", "isAlone", "isChecked", "isDestroyed", "isInPlace", "isOwn",
  "isWritten", "place", "placed", "last", "laidOut", "lastCheck", "layouts", "leave", "loadAll", "made", "memory", "modules", "names",
  "nbytesOf", "numbered", "onBytes", "onPipeline", "outer", "own", "parametersSize", "parsed", "parts", "pool",
  "position", "positions", "prepare", "program", "programs", "readBytes", "readback", "reader", "release", "report", "reserve",
  "restoring", "returned", "roles", "room", "saved", "scopes", "settled", "shapes", "since", "sized", "sizedAt",
  "slots", "sources", "staging", "stateAs", "stateEntries", "states", "lend", "uniform", "upload", "uploaded", "urge", "usable", "hold", "users", "versions", "wanted",
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

// A name in a text stays as it is.
for (const file of readdirSync("src")) {
  const asked = [...readFileSync(`src/${file}`, "utf8").matchAll(/"(\w+)" in /g)].map(([, name]) => name).filter((name) => INTERNAL.includes(name));
  if (asked.length) throw new Error(`src/${file} asks whether there is ${asked}, which has another name when built`);
}

/** Fetches what runs composed plans when it is imported. */
const apart = {
  name: "apart",
  setup: ({ onResolve }) => onResolve({ filter: /^\.\/composed\.js$/ }, ({ kind }) =>
    kind === "dynamic-import" ? { path: "./torch-webgpu-composed.js", external: true } : null),
};

/** Takes the runtime from the module beside. */
const beside = {
  name: "beside",
  setup: ({ onResolve }) => onResolve({ filter: /^\.\/index\.js$/ }, () => ({ path: "./torch-webgpu.js", external: true })),
};

/** Takes what src/shared.ts lists from the runtime that gives it, the variable `shared`. */
const lent = {
  name: "lent",
  setup: ({ onResolve, onLoad }) => {
    const modules = new Map();
    for (const [, names, path] of readFileSync("src/shared.ts", "utf8").matchAll(/export \{([^}]*)\} from "(.*)"/g)) modules.set(path, names);
    onResolve({ filter: /^\.\// }, ({ path }) => (modules.has(path) ? { path, namespace: "lent" } : null));
    onLoad({ filter: /./, namespace: "lent" }, ({ path }) => ({ contents: `export const {${modules.get(path)}} = shared;` }));
  },
};

let mangleCache = {};
for (const [name, entry, options] of [
  ["torch-webgpu", "index", { format: "esm", plugins: [apart] }],
  ["torch-webgpu-composed", "composed", {
    format: "iife", globalName: "made", plugins: [lent], banner: { js: "export default shared => {" }, footer: { js: "return made; };" },
  }],
  ["torch-webgpu-report", "report", { format: "esm" }],
  ["torch-webgpu-image", "image", { format: "esm", plugins: [beside] }],
  ["torch-webgpu-audio", "audio", { format: "esm", plugins: [beside] }],
  ["torch-webgpu-text", "text", { format: "esm", plugins: [beside] }],
]) {
  const made = await build({
    entryPoints: [`src/${entry}.ts`],
    write: false,
    bundle: true,
    minify: true,
    mangleProps: new RegExp(`^(${INTERNAL.join("|")})$`),
    mangleCache,
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    ...options,
  });
  ({ mangleCache } = made);
  // Its second passes take a twentieth off what is left.
  const { code } = await minify(made.outputFiles[0].text, {
    module: true,
    compress: { passes: 3, ecma: 2022, unsafe_arrows: true, pure_getters: true, hoist_funs: true },
  });
  write(`${name}.js`, code);
  const text = Buffer.from(code);
  const size = { bytes: text.length, gzipped: gzipSync(text, { level: 9 }).length };
  console.log(`${name}.js: ${size.bytes} bytes, ${size.gzipped} gzipped`);
  for (const [unit, most] of Object.entries(LARGEST[name])) {
    if (size[unit] > most) throw new Error(`${name}.js has ${size[unit]} ${unit}, more than ${most}`);
  }
}

// What of others is in a module, and their terms.
const LENT = { "torch-webgpu-audio": ["@huggingface/tokenizers"], "torch-webgpu-text": ["@huggingface/jinja", "@huggingface/tokenizers"] };
for (const [module, names] of Object.entries(LENT)) {
  write(`${module}.LICENSES.txt`, names.map((name) => {
    const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
    return `${name} ${version} (${license}) is a part of ${module}.js.\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8")}`;
  }).join("\n\n"));
}

const types = declarations({
  "torch-webgpu": "index", "torch-webgpu-report": "report", "torch-webgpu-image": "image",
  "torch-webgpu-audio": "audio", "torch-webgpu-text": "text",
});
for (const [name, text] of Object.entries(types)) write(`${name}.d.ts`, text);
