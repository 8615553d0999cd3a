// Composed plans that were tampered with, and Python's arithmetic: what needs no GPU.
import assert from "node:assert/strict";
import { test } from "node:test";
import runtime from "./modules.mjs";

const n = { c: 0, t: [[1, ["n", 0]]] };
const u = { c: 0, t: [[1, ["u", 0]]] };
const buffer = (role, size, more = {}) =>
  ({ role, dtype: "float32", sizes: [size], strides: [1], offset: 0, nbytes: { c: 0, t: [[4, ...size.t[0].slice(1)]] }, slot: null, ...more });
const one = { role: "output", dtype: "float32", sizes: [], strides: [], offset: 0, nbytes: 4, slot: null };
const common = { version: 9, constants: {}, preparation: null, plans: null };
const dispatch = (grid, ...names) => ({ Dispatch: {
  kernel: 0, bindings: names.map((name) => ({ buffer: name, offset_nbytes: 0, nbytes: null })), grid: [grid, 1, 1], parameters: [], narrow: [], checks: [],
} });
const kernel = { name: "f", wgsl: 0, bindings: [{ writable: false }, { writable: true }], parameter_count: 0 };
const tensor = (name, size) => ({ buffer: name, sizes: [size], strides: [1], offset: 0, size: null, constant: null, mutates: null });

/** Counts x until u of it, as often as a number says; gives u elements, and x. */
const bundle = () => ({
  entry: {
    plan: "p.json", sizes: { n: { name: "n", low: 1, high: 8, input: "x", dim: 0 } }, arguments: [{ input: "x", state: null, seeds: null }, { input: null, state: "s", seeds: null }],
    inputs: { x: { dtype: "float32", sizes: [n] } }, structure: "{}",
    results: { y: { tensor: { dtype: "float32", sizes: [null] }, output: 0, input: null, state: null } },
  },
  variant: { state: { s: { kind: "buffer", dtype: "float32", sizes: [4], changes: true, file: null, offset: 0 } } },
  plan: {
    ...common, name: "p", kernels: [],
    buffers: { x: buffer("input", n), s: { ...buffer("input", n), sizes: [4], nbytes: 16 } },
    inputs: [{ buffer: "x", size: null }, { buffer: "s", size: null }],
    steps: [
      { Run: { plan: 0, arguments: ["x"], results: ["total", "length"] } },
      { ReadNumber: { buffer: "total", name: "u" } },
      { Compute: { name: "few", value: { HostNumber: { op: "lt", args: [{ Expr: u }, { float: 9 }] } } } },
      { Check: { condition: "few", message: "too many" } },
      { Loop: { body: 1, condition: null, count: "u", carried: ["x"], others: ["u"], results: ["y"], stacked: [] } },
      { Branch: { index: "total", plans: [1, 1], arguments: ["s", "length"], results: ["t"] } },
      { Seeds: { name: "seeds", count: 2 } },
      { Floats: { name: "floats", numbers: ["u", "few"] } },
      { SizeOf: { buffer: "y", field: "size", dim: 0, name: "size" } },
    ],
    outputs: [{ buffer: "y", mutates: null }, { buffer: "t", mutates: 1 }].map((output) =>
      ({ sizes: [], strides: [], offset: null, size: null, constant: null, ...output })),
    plans: [
      {
        ...common, name: "count", kernels: [kernel], buffers: { x: buffer("input", n), total: one },
        inputs: [{ buffer: "x", size: null }], steps: [dispatch(n, "x", "total")],
        outputs: [{ ...tensor("total", n), sizes: [], strides: [] }, { ...tensor(null, n), sizes: [], strides: [], size: n }],
      },
      {
        ...common, name: "turn", kernels: [kernel], buffers: { x: buffer("input", n), y: buffer("output", u) },
        inputs: [{ buffer: "x", size: null }, { buffer: null, size: u }], steps: [dispatch(u, "x", "y")], outputs: [tensor("y", u)],
      },
    ],
  },
});

const check = ({ entry, variant, plan }) => runtime.checkComposed(plan, "p.json", entry, variant, 1);

test("a composed plan that fits", () => {
  const found = check(bundle());
  assert.deepEqual(found.dead[2], []);
  assert.deepEqual(found.dead.at(-1), ["size"]);
  assert.deepEqual(found.plans[1].sources.map(({ symbol, field }) => symbol + field), ["u", "nsize"]);
});

const step = (p, kind) => p.steps.find((each) => kind in each)[kind];
const CHANGES = [
  [(p) => (p.version = 8), "version"],
  [(p) => (p.kernels = [kernel]), "has kernels of its own"],
  [(p) => (p.steps[0] = { HostStep: {} }), "is HostStep, which is no step that a page runs"],
  [(p) => (p.steps[0] = dispatch(n, "x", "y")), "is Dispatch, which is no step"],
  [(p) => (step(p, "Run").plan = 7), "has no plan 7"],
  [(p) => step(p, "Run").arguments.push("x"), "with other arguments"],
  [(p) => (step(p, "Run").arguments = ["y"]), "uses y before it is there"],
  [(p) => (step(p, "Run").results = ["total"]), "or results"],
  [(p) => (step(p, "ReadNumber").buffer = "length"), "uses length, a number, as a tensor"],
  [(p) => (step(p, "ReadNumber").name = "x"), "names two values x"],
  [(p) => (step(p, "Compute").value.HostNumber.op = "eval"), "is no number"],
  [(p) => (step(p, "Compute").value.HostNumber.args = []), "has other arguments"],
  [(p) => (step(p, "Check").condition = "x"), "computes with x, a tensor"],
  [(p) => (step(p, "Loop").count = null), "has a loop without an end"],
  [(p) => (step(p, "Loop").condition = 0), "runs count with other arguments or results|without an end"],
  [(p) => (step(p, "Loop").stacked = [3]), "stacks what is no tensor"],
  [(p) => (step(p, "Loop").others = ["x"]), "gives x, a tensor, for a number"],
  [(p) => (step(p, "Loop").carried = ["u"]), "as a tensor"],
  [(p) => (step(p, "Branch").plans[1] = 0), "with other arguments"],
  [(p) => (step(p, "Branch").plans = []), "chooses among no plans"],
  [(p) => (step(p, "Seeds").count = 2 ** 21), "is no number below"],
  [(p) => (p.outputs[0].buffer = "u"), "has no output for the result y"],
  [(p) => (p.outputs[1].mutates = 0), "changes argument 0, which does not change"],
  [(p) => (p.inputs = p.inputs.slice(1)), "has inputs that nothing gives"],
  [(p) => (p.buffers.x.dtype = "int32"), "takes an argument 0 of another dtype"],
  [(p) => (p.plans[1].inputs[1].size = 1), "has the size u of no input"],
  [(p) => (p.plans[1].kernels[0] = { ...kernel, wgsl: 5 }), "has no module"],
  [(p) => (p.plans[1].preparation = { ...p.plans[1] }), "prepares|of no input"],
  [(p) => { for (let k = 0; k < 40; k++) p.plans = [{ ...p, plans: p.plans }]; }, "is nested too deeply"],
];

test("composed plans that were tampered with", () => {
  for (const [change, words] of CHANGES) {
    const made = bundle();
    change(made.plan);
    assert.throws(() => check(made), (error) => error.name === "BundleError" && new RegExp(words).test(error.message), `${change} ${words}`);
  }
});

test("random damage ends in BundleError alone", () => {
  let seed = 1;
  const random = (most) => (seed = (seed * 48271) % 2147483647) % most;
  const values = [null, -1, 0, 1, 2 ** 60, "x", "__proto__", "u", [], {}, true, { c: 0, t: [[1, ["u", 0]]] }];
  for (let round = 0; round < 3000; round++) {
    const made = structuredClone(bundle());
    for (let at = made.plan; ;) {
      const keys = Object.keys(at);
      if (!keys.length) break;
      const key = keys[random(keys.length)];
      if (typeof at[key] !== "object" || at[key] === null || !random(6)) {
        if (random(4)) at[key] = values[random(values.length)];
        else delete at[key];
        break;
      }
      at = at[key];
    }
    try {
      check({ ...made, plan: JSON.parse(JSON.stringify(made.plan)) });
    } catch (error) {
      assert.equal(error.name, "BundleError", `${round}: ${error.stack}`);
    }
  }
});

const value = (op, ...args) => runtime.PYTHON_OPS[op](...args);

test("numbers are computed as Python does", () => {
  const rows = [
    ["floordiv", -7n, 2n, -4n], ["floordiv", -7.5, 2n, -4], ["floordiv", -1, Infinity, -1], ["mod", -7n, 3n, 2n], ["mod", 7, -3, -2],
    ["div", 7n, 2n, 3.5], ["pow", 3n, 40n, 12157665459056928801n], ["pow", 2n, -1n, 0.5], ["pow", 1, NaN, 1], ["round", 2.5, 2n], ["round", -3.5, -4n],
    ["round_to", 0.125, 2n, 0.12], ["round_to", 2.675, 2n, 2.67], ["trunc", -2.7, -2n], ["ceil", -2.7, -2n], ["neg", 0n, 0n], ["min", 1n, NaN, 1n],
    ["lt", 2n ** 53n + 1n, 2 ** 53, 0n], ["and", 1n, 0, 0n], ["not", 0, 1n], ["where", 0n, 1, 2n, 2n], ["max", 3, 2n, 3],
  ];
  for (const [op, ...args] of rows) {
    const wanted = args.pop();
    assert.ok(Object.is(value(op, ...args), wanted), `${op} ${args.map(String)} is ${value(op, ...args)}, not ${wanted}`);
  }
  for (const [op, ...args] of [["div", 1n, 0n], ["mod", 1, 0], ["sqrt", -1], ["round", NaN], ["pow", 0n, -1n], ["pow", -1.5, 0.5], ["pow", 10, 400n]]) {
    assert.throws(() => value(op, ...args), { name: "InputError" }, op);
  }
  const number = { HostNumber: { op: "mul", args: [{ Expr: u }, { Expr: u }] } };
  assert.equal(runtime.pythonNumber(number, () => 3n), 9n);
  assert.throws(() => runtime.pythonNumber(number, () => 2n ** 40n), /more than 64 bits/);
  assert.throws(() => runtime.pythonNumber({ Expr: { c: 1, t: [[1, ["u", 0]]] } }, () => 2n ** 60n), /is no integer below 2\^53/);
});
