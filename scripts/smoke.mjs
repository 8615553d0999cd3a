// What the installed npm package has to do without a GPU: read what Python exported, and say what is missing.
//
//   node smoke.mjs BUNDLE VERSION     beside a node_modules with the package
import assert from "node:assert/strict";
import {readFileSync, readdirSync} from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";
import * as runtime from "torch-webgpu";

const [bundle, version] = process.argv.slice(2);
const installed = JSON.parse(readFileSync("node_modules/torch-webgpu/package.json", "utf8"));
assert.equal(installed.version, version);

const [weights] = readdirSync(join(bundle, "weights"));
const tensors = runtime.readSafetensors(new Uint8Array(readFileSync(join(bundle, "weights", weights))));
assert.equal(Object.values(tensors).filter(({dtype}) => dtype === "F32").length, 4);

const fetched = [];
const fetch = async (url) => (fetched.push(url.pathname), new Response(readFileSync(url)));
await assert.rejects(runtime.load(pathToFileURL(bundle), {fetch}), runtime.WebGPUUnavailableError);
assert.ok(fetched.some((path) => path.endsWith("/manifest.json")));
console.log(`torch-webgpu ${version} on node ${process.versions.node}`);
