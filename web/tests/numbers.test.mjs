// Expressions, elements, inputs, seeds and safetensors files: what needs no GPU.
import assert from "node:assert/strict";
import { test } from "node:test";
import runtime from "./modules.mjs";

const expr = (json, symbols = ["n", "m"]) => runtime.exprOf(new Set(symbols))(json, "here");
const refuses = (what, words) => assert.throws(what, (error) => words.test(`${error.name}: ${error.message}`));

test("expressions are exact, and divide as Python does", () => {
  const divided = (sign, a, b) => runtime.evaluate(expr({ c: 0, t: [[1, [sign, { c: 0, t: [[1, ["n", 0]]] }, b]]] }), { n: a });
  for (const [a, b, quotient, rest] of [[7, 3, 2, 1], [-7, 3, -3, 2], [-6, 3, -2, 0], [2 ** 53 - 1, 2, 2 ** 52 - 1, 1]]) {
    assert.equal(divided("//", a, b), quotient);
    assert.equal(divided("%", a, b), rest);
  }
  const product = expr({ c: -1, t: [[3, ["n", 0], ["m", 1], ["m", 1]], [-2, ["n", 0]]] });
  assert.equal(runtime.evaluate(product, { n: 5, m: 4 }), 3 * 5 * 16 - 10 - 1);
  refuses(() => runtime.evaluate(product, { n: 2 ** 40, m: 2 ** 20 }), /BundleError: a size exceeds 2\^53/);
  assert.throws(() => divided("//", 1, 0));
  assert.equal(runtime.orZero(() => divided("//", 1, 0)), 0);
  refuses(() => runtime.orZero(() => divided("%", 1, -2)), /divided by -2/);
});

test("what is no expression is refused", () => {
  let deep = 1;
  for (let k = 0; k < 40; k++) deep = { c: 0, t: [[1, ["//", deep, 2]]] };
  const wide = { c: 0, t: Array(600).fill([1, ["n", 0]]) };
  const high = { c: 0, t: [[1, ...Array(40).fill(["n", 0])]] };
  for (const json of [null, "1", 1.5, 2 ** 53, [], {}, { c: 1 }, { c: 0, t: [[]] }, { c: 0, t: [[1, 2]] }, { c: 0, t: [[1, ["k", 0]]] },
    { c: 0, t: [[1, ["__proto__", 0]]] }, { c: 0, t: [["1", ["n", 0]]] }, { c: 0, t: [[1, ["n", null]]] }, deep, wide, high]) {
    refuses(() => expr(json), /BundleError: here.* is|BundleError: here.* has/);
  }
});

test("numbers from sizes are float64", () => {
  const number = (op, ...args) => ({ HostNumber: { op, args } });
  const n = { Expr: { c: 0, t: [[1, ["n", 0]]] } };
  const value = (json) => runtime.evaluateNumber(runtime.numberOf(new Set(["n"]))(json, "here"), { n: 7 });
  assert.equal(value(number("div", { float: 1 }, number("sqrt", n))), 1 / Math.sqrt(7));
  assert.equal(value(number("mul", { float: "-inf" }, number("neg", n))), Infinity);
  assert.ok(Number.isNaN(value({ float: "nan" })));
  for (const json of [number("constructor", n), number("add", n), number("float", n, n), number("neg", {}), { HostNumber: null }, null]) {
    refuses(() => value(json), /BundleError: here/);
  }
});

test("float16 and bfloat16 are rounded to the nearest, ties to even", () => {
  for (let bits = 0; bits < 1 << 16; bits++) {
    const value = runtime.fromHalf(bits);
    if (Number.isNaN(value)) assert.equal(runtime.toHalf(value) & 0x7fff, 0x7e00);
    else assert.equal(runtime.toHalf(value), bits);
    const next = runtime.fromHalf(bits + 1);
    if (!Number.isFinite(value) || !Number.isFinite(next)) continue;
    const tie = (value + next) / 2; // exact in float32
    assert.equal(runtime.toHalf(tie), bits % 2 ? bits + 1 : bits);
    assert.equal(runtime.toHalf(tie + (next - value) / 64), bits + 1);
    assert.equal(runtime.toHalf(tie - (next - value) / 64), bits);
  }
  assert.deepEqual([65519.99, 65520, -65520, Infinity, 2 ** -25, 2 ** -24].map(runtime.toHalf), [0x7bff, 0x7c00, 0xfc00, 0x7c00, 0, 1]);
  const words = new Uint16Array(runtime.encode("bfloat16", [1, 1.00390625, 1.01171875, -2, NaN, 3.4e38], "x").buffer);
  assert.deepEqual([...words], [0x3f80, 0x3f80, 0x3f82, 0xc000, 0x7fc0, 0x7f80]);
  assert.deepEqual([...runtime.decode("bfloat16", new Uint8Array(words.slice(2, 4).buffer))], [1.015625, -2]);
});

test("numbers become elements where they have a place, and only there", () => {
  const made = (dtype, values) => [...runtime.decode(dtype, runtime.encode(dtype, values, "x"))];
  assert.deepEqual(made("int64", [1, -2n, true, 2 ** 53 - 1, -(2n ** 63n)]), [1n, -2n, 1n, 2n ** 53n - 1n, -(2n ** 63n)]);
  assert.deepEqual(made("int8", [-128, 127n]), [-128, 127]);
  assert.deepEqual(made("uint32", [2 ** 32 - 1, 0]), [2 ** 32 - 1, 0]);
  assert.deepEqual(made("int32", Float64Array.of(-(2 ** 31), 2 ** 31 - 1)), [-(2 ** 31), 2 ** 31 - 1]);
  assert.deepEqual(made("float32", [1n, 0.5, false]), [1, 0.5, 0]);
  assert.deepEqual(made("bool", [true, 0]), [1, 0]);
  const own = Float32Array.of(1, 2, 3).subarray(1);
  assert.equal(runtime.encode("float32", own, "x").buffer, own.buffer);
  for (const [dtype, value] of [["int64", 2 ** 53], ["int64", 2n ** 63n], ["int64", 0.5], ["int32", 2 ** 31], ["int8", 128], ["uint8", -1], ["uint8", NaN],
    ["bool", 2], ["float32", "1"], ["float32", undefined], ["float16", null], ["float32", [1]], ["int16", {}], ["float8_e5m2", 1]]) {
    refuses(() => runtime.encode(dtype, [value], "x"), /InputError: x: /);
  }
});

test("sizes follow from what is given", () => {
  const n = { c: 0, t: [[1, ["n", 0]]] };
  const entry = {
    sizes: { n: { name: "rows", low: 1, high: 9, input: "x", dim: 0 } },
    inputs: { __proto__: null, x: { dtype: "float32", sizes: [n, 3] }, y: { dtype: "int64", sizes: [n] }, z: { dtype: "float32", sizes: [] } },
  };
  const read = (x, y = [1, 2], z = 0) => runtime.readInputs("f", entry, { x, y, z });
  for (const x of [[[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5, 6], Float64Array.of(1, 2, 3, 4, 5, 6), { data: [1, 2, 3, 4, 5, 6], shape: [2, 3] }]) {
    const given = read(x);
    assert.deepEqual(given.sizes, { n: 2 });
    assert.deepEqual(given.shapes, { x: [2, 3], y: [2], z: [] });
    assert.deepEqual([...new Float32Array(given.values.x.buffer)], [1, 2, 3, 4, 5, 6]);
    assert.equal(given.values.y.length, 16);
  }
  const ok = Float32Array.of(1, 2, 3, 4, 5, 6);
  for (const [args, words] of [
    [[Float32Array.of(1, 2, 3, 4, 5, 6, 7)], /x has 7 elements, it has to have \[2,3\]/],
    [[{ data: [1, 2, 3], shape: [2, 3] }], /x has 3 elements/],
    [[{ data: ok, shape: [3, 2] }, [1, 2, 3]], /sizes \[3,2\], it has to have \[3,3\]/],
    [[[[1, 2, 3], [4, 5]]], /rows of several lengths/],
    [[new Float32Array(30)], /rows is 10 .* has to be 1 to 9/],
    [[{ data: [], shape: [0.5, 3] }], /rows is 0.5/],
    [[[[]]], /sizes \[1,0\], it has to have \[1,3\]/],
    [[[]], /rows is 0/],
    [[ok, [1, 2, 3]], /y has the sizes \[3\], it has to have \[2\]/],
    [[ok, 1], /y has 1 elements/],
    [[ok, [1, 2], [1, 2]], /z has 2 elements/],
    [[["1", "2", "3"], [1]], /element 0 is 1, which is no float32/],
    [[null], /needs the input x: float32/],
  ]) refuses(() => read(...args), new RegExp(`InputError: .*${words.source}`));
  refuses(() => runtime.readInputs("f", entry, { toString: 1 }), /no input toString; it takes x,y,z/);
});

test("seeds are those of docs/bundle.md", () => {
  const random = new runtime.Random(12345);
  assert.deepEqual([...random.draw(2), ...random.draw(1)], [17459946467270492857n, 4213614170979499575n, 13781534019090122807n]);
  assert.deepEqual([...new runtime.Random(-1n).draw(1)], [...new runtime.Random(2n ** 64n - 1n).draw(1)]);
});

test("safetensors files, also damaged ones", () => {
  const file = runtime.writeSafetensors({
    a: { dtype: "uint8", sizes: [3], data: Uint8Array.of(1, 2, 3) },
    b: { dtype: "float32", sizes: [1, 2], data: new Uint8Array(Float32Array.of(1, 2).buffer) },
    "a.b": { dtype: "bfloat16", sizes: [], data: Uint8Array.of(128, 63) },
  });
  const { a, b } = runtime.readSafetensors(file);
  assert.deepEqual([a.dtype, a.sizes, [...a.data]], ["U8", [3], [1, 2, 3]]);
  assert.deepEqual([b.dtype, b.sizes, b.data.length], ["F32", [1, 2], 8]);
  assert.equal((file.length - 13) % 8, 0);
  assert.deepEqual(["float16", "int64", "bool", "uint32", "float8_e4m3fn", "float8_e5m2"].map(runtime.safetensorsName),
    ["F16", "I64", "BOOL", "U32", "F8_E4M3", "F8_E5M2"]);
  refuses(() => runtime.writeSafetensors({ x: { dtype: "float8_e5m2fnuz", sizes: [], data: new Uint8Array(1) } }), /leave it out/);
  const other = (header) => {
    const text = new TextEncoder().encode(JSON.stringify(header));
    const made = new Uint8Array(8 + text.length + 4);
    new DataView(made.buffer).setBigUint64(0, BigInt(text.length), true);
    made.set(text, 8);
    return made;
  };
  const row = (start, end) => ({ x: { dtype: "F32", shape: [1], data_offsets: [start, end] } });
  assert.equal(runtime.readSafetensors(other(row(0, 4))).x.data.length, 4);
  for (const wrong of [new Uint8Array(3), file.subarray(0, 40), other(row(0, 8)), other(row(-4, 0)), other(row(4, 0)), other([]), other({ x: null }),
    other({ x: { dtype: 1, shape: [1], data_offsets: [0, 4] } }), new Uint8Array(20).fill(255)]) {
    refuses(() => runtime.readSafetensors(wrong), /BundleError: this is no safetensors file/);
  }
});
