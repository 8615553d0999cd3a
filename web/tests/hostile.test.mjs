// Manifests and plans that were tampered with: one change of a bundle that fits, and what is said of it.
import assert from "node:assert/strict";
import { test } from "node:test";
import runtime from "./modules.mjs";

const n = { c: 0, t: [[1, ["n", 0]]] };
const times = (factor) => ({ c: 0, t: [[factor, ["n", 0]]] });
const buffer = (role, more = {}) => ({ role, dtype: "float32", sizes: [n], strides: [1], offset: 0, nbytes: times(4), slot: null, ...more });
const fixed = { sizes: [4], nbytes: 16 };

/** y = f(x) and total += g(x), by way of an intermediate, with a prepared buffer, a constant, a check and a copy. */
const bundle = () => ({
  manifest: {
    format: "torch-webgpu-bundle", version: 1, name: "b", producer: "p", chunk_nbytes: 64,
    files: Object.fromEntries([["p.json", 100], ["k/a.json", 64], ["w.safetensors", 48]].map(([name, nbytes]) =>
      [name, { nbytes, sha256: "0".repeat(64), chunks: Array(Math.ceil(nbytes / 64)).fill("1".repeat(64)) }])),
    variants: [{
      name: "float32", features: [], limits: { maxBufferSize: 1 }, kernels: "k/a.json",
      state: {
        total: { kind: "buffer", dtype: "float32", sizes: [4], changes: true, file: null, offset: 0 },
        weight: { kind: "parameter", dtype: "float32", sizes: [4], changes: false, file: "w.safetensors", offset: 32 },
      },
      entries: {
        forward: {
          plan: "p.json", sizes: { n: { name: "rows", low: 1, high: 8, input: "x", dim: 0 } },
          arguments: [{ input: "x", state: null, seeds: null }, { input: null, state: "total", seeds: null },
            { input: null, state: "weight", seeds: null }, { input: null, state: null, seeds: 2 }],
          inputs: { x: { dtype: "float32", sizes: [n] } },
          results: { y: { tensor: { dtype: "float32", sizes: [n] }, output: 0, input: null, state: null } },
          structure: "{}",
        },
      },
    }],
  },
  plan: {
    version: 9, name: "p", format: "webgpu-plan",
    kernels: [
      { name: "f", wgsl: 0, bindings: [{ writable: false }, { writable: false }, { writable: true }, { writable: true }], parameter_count: 2 },
      { name: "g", wgsl: 1, bindings: [{ writable: false }, { writable: true }], parameter_count: 0 },
    ],
    buffers: {
      x: buffer("input"), total: buffer("input", fixed), weight: buffer("input", fixed), seeds: buffer("input", fixed),
      made: buffer("prepared", fixed), four: buffer("constant", { ...fixed, sizes: [1], nbytes: 4 }),
      one: buffer("intermediate", { slot: 0 }), two: buffer("intermediate", { slot: 1 }), y: buffer("output"), next: buffer("output", fixed),
      status: buffer("status", { dtype: "uint32", sizes: [8], nbytes: 32 }),
    },
    steps: [
      { Dispatch: { kernel: 0, bindings: ["x", "made", "one", "status"].map((name) => ({ buffer: name, offset_nbytes: 0, nbytes: null })),
        grid: [n, 1, 1], parameters: [{ Expr: n }, { Expr: { c: 0, t: [[1, ["first_check", 0]]] } }], narrow: [times(2)],
        checks: [{ op: "aten.index", source: "", dim: 0 }] } },
      { Dispatch: { kernel: 1, bindings: [{ buffer: "one", offset_nbytes: 0, nbytes: null }, { buffer: "two", offset_nbytes: 0, nbytes: null }],
        grid: [n, 1, 1], parameters: [], narrow: [], checks: [] } },
      { Dispatch: { kernel: 1, bindings: [{ buffer: "two", offset_nbytes: 0, nbytes: n }, { buffer: "y", offset_nbytes: 256, nbytes: null }],
        grid: [n, 1, 1], parameters: [], narrow: [], checks: [] } },
      { Dispatch: { kernel: 1, bindings: [{ buffer: "four", offset_nbytes: 0, nbytes: null }, { buffer: "next", offset_nbytes: 0, nbytes: null }],
        grid: [1, 1, 1], parameters: [], narrow: [], checks: [] } },
    ],
    inputs: ["x", "total", "weight", "seeds"].map((name) => ({ buffer: name, size: null })),
    outputs: [
      { buffer: "y", sizes: [n], strides: [1], offset: null, mutates: null },
      { buffer: "next", sizes: [4], strides: [1], offset: 0, mutates: 1 },
    ],
    constants: { four: "AACAQA==" },
    preparation: {
      version: 9, kernels: [{ name: "g", wgsl: 1, bindings: [{ writable: false }, { writable: true }], parameter_count: 0 }],
      buffers: { weight: buffer("input", fixed), made: buffer("output", fixed) },
      steps: [{ Dispatch: { kernel: 0, bindings: [{ buffer: "weight", offset_nbytes: 0, nbytes: null }, { buffer: "made", offset_nbytes: 0, nbytes: null }],
        grid: [1, 1, 1], parameters: [], narrow: [], checks: [] } }],
      inputs: [{ buffer: "weight" }], outputs: [{ buffer: "made", sizes: [4], strides: [1], offset: 0, mutates: null }], constants: {}, preparation: null,
    },
  },
});

const limits = { maxBufferSize: 1 << 20, maxStorageBufferBindingSize: 1 << 16 };

/** Reads a bundle as `load` does, and evaluates its plan at a size. */
function read(change = () => undefined, size = 8) {
  const { manifest, plan } = bundle();
  change(manifest, plan, manifest.variants[0], manifest.variants[0].entries.forward);
  const variant = runtime.checkManifest(JSON.parse(JSON.stringify(manifest))).variants[0];
  const checked = runtime.checkPlan(JSON.parse(JSON.stringify(plan)), "p.json", variant.entries.forward, variant, 2);
  return runtime.sizePlan(checked, { n: size }, [3, 4, 5, 6], limits);
}

test("a bundle that fits", () => {
  const { nbytes, steps, uniform, layouts } = read();
  assert.deepEqual(nbytes, [32, 16, 16, 16, 16, 16, 32, 32, 32, 16, 32]);
  assert.deepEqual(steps[0].bindings, [[0, 0, 32], [4, 0, 16], [6, 0, 32], [10, 0, 32]]);
  assert.deepEqual(steps[2].bindings, [[7, 0, 16], [8, 0, 16]]); // a window behind the end
  assert.deepEqual([...new Int32Array(uniform.buffer, 0, 2)], [8, 3]);
  assert.deepEqual(layouts[0], { shape: [8], strides: [1], offset: 0 });
  assert.equal(read(undefined, 0).steps.length, 1); // empty grids are left out
});

test("results of many sizes share a few sizes of memory", () => {
  const sizes = new Set();
  for (let size = 1025; size <= 8192; size++) sizes.add(read(undefined, size).nbytes[8]);
  assert.ok(sizes.size <= 24);
  for (const nbytes of sizes) assert.equal(nbytes % 16, 0);
});

const MANIFESTS = [
  [(m) => (m.format = "zip"), "is of no bundle"],
  [(m) => (m.version = 2), "has version 2, this runtime reads 1"],
  [(m) => (m.chunk_nbytes = 3), "chunk_nbytes is no multiple of 4"],
  [(m) => (m.chunk_nbytes = 1 << 30), "chunk_nbytes is no multiple of 4"],
  [(m) => (m.variants = []), "variants are missing"],
  [(m) => (m.files["w.safetensors"].chunks = []), "files.w.safetensors.chunks are not as many"],
  [(m) => (m.files["w.safetensors"].nbytes = -1), "nbytes is no size"],
  [(m) => (m.files["w.safetensors"].nbytes = 2 ** 60), "nbytes is no size"],
  [(m) => (m.files["w.safetensors"].sha256 = "F".repeat(64)), "sha256 is no SHA-256"],
  ...["../w.json", "/w.json", "a/../w.json", "//host/w.json", "https://host/w.json", "w.js", "a\\w.json", "a/.w.json", "w.json?x.json", "%2e%2e/w.json"]
    .map((path) => [(m) => (m.files[path] = m.files["p.json"]), "is no path inside"]),
  [(m, p, v) => (v.kernels = "other.json"), "other.json is not among the files"],
  [(m, p, v, e) => (e.plan = "__proto__.json"), "__proto__.json is not among the files"],
  [(m, p, v) => (v.features = ["shader-f64"]), "features[0] is none of shader-f16"],
  [(m, p, v) => (v.limits.maxBufferSize = "1"), "limits.maxBufferSize is no size"],
  [(m, p, v) => (v.state.weight.sizes = [2 ** 40, 2 ** 40]), "state weight is too large"],
  [(m, p, v) => (v.state.total.sizes = [0, 2 ** 52]), "state total is too large"],
  [(m, p, v) => (v.state.weight.offset = 36), "state weight lies outside of its file"],
  [(m, p, v) => (v.state.weight.file = "other.safetensors"), "state weight lies outside of its file"],
  [(m, p, v) => (v.state.weight.dtype = "toString"), "dtype is no dtype"],
  [(m, p, v) => (v.state.weight.kind = "code"), "kind is none of"],
  [(m, p, v, e) => (e.sizes.n.dim = 1), "sizes.n is no dimension of an input"],
  [(m, p, v, e) => (e.sizes.n.input = "constructor"), "sizes.n is no dimension of an input"],
  [(m, p, v, e) => (e.sizes.n.low = 9), "sizes.n is no dimension of an input"],
  [(m, p, v, e) => (e.inputs.x.sizes = [times(2)]), "sizes.n is no dimension of an input"],
  [(m, p, v, e) => (e.inputs.x.sizes = Array(65).fill(n)), "is no list, or too long"],
  [(m, p, v, e) => (e.arguments[0].state = "total"), "forward: argument 0 is not one thing"],
  [(m, p, v, e) => (e.arguments[1].state = "hasOwnProperty"), "forward: argument 1 is not one thing"],
  [(m, p, v, e) => (e.arguments[3].seeds = 2 ** 40), "seeds is no number below"],
  [(m, p, v, e) => (e.results.y.output = null), "forward: result y is not one thing"],
  [(m, p, v, e) => (e.results.y = { ...e.results.y, output: null, input: "z" }), "forward: result y is not one thing"],
];

const dispatch = (p, k) => p.steps[k].Dispatch;
const PLANS = [
  [(m, p) => (p.version = 6), "version is not the 9"],
  [(m, p) => (p.kernels[1].wgsl = 2), "no module of the kernel g"],
  [(m, p) => (p.kernels[0].bindings[0] = null), "kernels[0].bindings[0] is no object"],
  [(m, p) => (p.kernels[0].parameter_count = 1 << 20), "parameter_count is no number below"],
  [(m, p) => (p.buffers.x.role = "weights"), "buffers.x.role is none of"],
  [(m, p) => (p.buffers.x.strides = []), "a buffer x of which the parts do not fit"],
  [(m, p) => (p.buffers.y.slot = 1), "a buffer y of which the parts do not fit"],
  [(m, p) => (p.buffers.status.nbytes = 64), "a buffer status of which the parts do not fit"],
  [(m, p) => (p.constants.four = "AAAA"), "a buffer four of which the parts do not fit"],
  [(m, p) => (p.constants.four = "\u1234"), "constants.four is no base64"],
  [(m, p) => delete p.constants.four, "a buffer four of which the parts do not fit"],
  [(m, p) => (p.buffers.more = buffer("input")), "inputs that nothing gives"],
  [(m, p) => (p.inputs[2].buffer = "total"), "inputs that nothing gives"],
  [(m, p) => (dispatch(p, 0).kernel = 2), "step 0 that does not fit its kernel"],
  [(m, p) => dispatch(p, 0).bindings.pop(), "step 0 that does not fit its kernel"],
  [(m, p) => dispatch(p, 0).parameters.pop(), "step 0 that does not fit its kernel"],
  [(m, p) => dispatch(p, 0).grid.pop(), "step 0 that does not fit its kernel"],
  [(m, p) => (dispatch(p, 0).bindings[0].buffer = "__proto__"), "has no buffer __proto__"],
  [(m, p) => (dispatch(p, 0).bindings[0].offset_nbytes = 4), "is no multiple of 256"],
  [(m, p) => (dispatch(p, 0).bindings[0].offset_nbytes = -256), "offset_nbytes is no size"],
  [(m, p) => (dispatch(p, 0).bindings[0].buffer = "two"), "reads two before it is written"],
  [(m, p) => (dispatch(p, 0).bindings[2].buffer = "x"), "writes x, which does not change"],
  [(m, p) => (dispatch(p, 0).bindings[2].buffer = "four"), "writes four, which does not change"],
  [(m, p) => (p.buffers.y = buffer("intermediate", { slot: 1 })), "reads and writes y in step 2"],
  [(m, p) => (p.buffers.two.slot = 0), "reads and writes two in step 1"],
  [(m, p) => (p.steps[1] = { HostStep: {} }), "steps[1] is no object"],
  [(m, p) => (p.steps = p.steps.slice(0, 2)), "reads y before it is written"],
  [(m, p) => (p.outputs[0].buffer = "two"), "gives two, which is no memory of an output"],
  [(m, p) => (p.outputs[0].buffer = "weight"), "gives weight, which is no memory of an output"],
  [(m, p) => (p.outputs[0].strides = [1, 1]), "gives y, which is no memory of an output"],
  [(m, p) => (p.outputs[1].mutates = 2), "changes argument 2, which does not change"],
  [(m, p) => (p.outputs[1].mutates = 0), "changes argument 0, which does not change"],
  [(m, p) => (p.outputs[1].mutates = 99), "changes argument 99, which does not change"],
  [(m, p) => (p.outputs[1].offset = 1), "changes the layout of argument 1"],
  [(m, p) => (p.outputs[1].strides = [2]), "changes the layout of argument 1"],
  [(m, p) => (p.outputs[1].sizes = [n]), "changes the layout of argument 1"],
  [(m, p, v) => (v.state.weight.sizes = [2, 2]), "takes an argument 2 of another dtype or size"],
  [(m, p, v, e) => (e.inputs.x.dtype = "int32"), "takes an argument 0 of another dtype or size"],
  [(m, p, v, e) => e.arguments.pop(), "takes other arguments"],
  [(m, p, v, e) => (e.results.y.output = 1), "no output for the result y"],
  [(m, p, v, e) => (e.results.y.tensor.dtype = "int64"), "no output for the result y"],
  [(m, p) => (p.preparation = null), "lacks what is prepared"],
  [(m, p) => (p.preparation.buffers.made.nbytes = 8), "its preparation makes other buffers"],
  [(m, p) => (p.preparation.buffers.more = buffer("output", fixed)), "its preparation makes other buffers"],
  [(m, p) => (p.preparation.steps = []), "its preparation reads made before it is written"],
  [(m, p) => (p.preparation.buffers.weight.nbytes = 64), "its preparation takes or changes more than states"],
  [(m, p) => (p.preparation.buffers.made.sizes = [n]), "has the size n of no input"],
  [(m, p) => (p.preparation.inputs[0].buffer = null), "its preparation has inputs that nothing gives"],
];

/** What only sizes decide. */
const SIZES = [
  [(m, p) => (p.outputs[0].offset = 1), "a result lies outside of its memory"],
  [(m, p) => (p.outputs[0].strides = [2]), "a result lies outside of its memory"],
  [(m, p) => (p.outputs[0].offset = -1), "a result lies outside of its memory"],
  [(m, p) => (p.buffers.y.nbytes = 4), "y lies outside of its memory"],
  [(m, p) => (p.buffers.x.strides = [1 << 20]), "x lies outside of its memory"],
  [(m, p) => (p.buffers.y.nbytes = 1 << 21), "y needs 2097152 bytes, of which a buffer of this GPU has at most 1048576"],
  [(m, p) => (p.buffers.y.nbytes = 1 << 18, dispatch(p, 2).bindings[1].offset_nbytes = 0), "kernel g needs 262144 bytes, of which this GPU binds at most 65536"],
  [(m, p) => (dispatch(p, 0).grid[1] = 65536), "kernel f needs 8,65536,1 workgroups"],
  [(m, p) => (dispatch(p, 0).grid = [65535, 65535, 65535]), "kernel f has too many workgroups, 65535,65535,65535"],
  [(m, p) => (dispatch(p, 0).grid = [65535, 17, 1]), "kernel f has too many workgroups"],
  [(m, p) => (dispatch(p, 0).grid[1] = -1), "kernel f needs 8,-1,1 workgroups"],
  [(m, p) => (dispatch(p, 0).narrow = [times(2 ** 30)]), "kernel f needs numbers of more than 32 bits"],
  [(m, p) => (dispatch(p, 0).parameters[0] = { Expr: times(2 ** 30) }), "kernel f needs 8589934592, of more than 32 bits"],
  [(m, p) => (dispatch(p, 0).grid[0] = { c: 0, t: [[2 ** 50, ["n", 0], ["n", 0]]] }), "a size exceeds 2^53"],
];

for (const [title, changes, kind] of [["manifests", MANIFESTS, /BundleError/], ["plans", PLANS, /BundleError/], ["sizes", SIZES, /BundleError|InputError/]]) {
  test(`${title} that were tampered with`, () => {
    for (const [change, words] of changes) {
      try {
        read(change);
      } catch (error) {
        assert.match(error.name, kind, `${change}: ${error.stack}`);
        assert.ok(error.message.includes(words), `${change}: ${error.message}`);
        continue;
      }
      assert.fail(`${change} is not refused`);
    }
  });
}

test("random damage ends in BundleError alone", () => {
  let seed = 1;
  const random = (most) => ((seed = (seed * 48271) % 0x7fffffff) % most);
  const values = [null, -1, 0, 1, 7, 2 ** 31, 2 ** 53, 1e300, 0.5, "", "x", "__proto__", true, [], {}, [[]], { c: 0, t: [] }];
  for (let round = 0; round < 5000; round++) {
    const change = (m, p) => {
      let at = random(3) ? p : m;
      for (;;) {
        const keys = Object.keys(at);
        if (!keys.length) return;
        const key = keys[random(keys.length)];
        if (typeof at[key] !== "object" || at[key] === null || !random(6)) {
          if (random(4)) at[key] = values[random(values.length)];
          else delete at[key];
          return;
        }
        at = at[key];
      }
    };
    try {
      read(change);
    } catch (error) {
      assert.match(error.name, /^(BundleError|InputError)$/, `${round}: ${error.stack}`);
    }
  }
});
