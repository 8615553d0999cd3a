/** Elements as JavaScript sees them; bytes are PyTorch's. */

import { InputError } from "./errors.js";

const DTYPES = [
  "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint32", "bool",
  "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
] as const;
/** PyTorch's names. */
export type DType = (typeof DTYPES)[number];

interface Arrays {
  float64: Float64Array; int64: BigInt64Array; int32: Int32Array; int16: Int16Array; int8: Int8Array;
  uint32: Uint32Array; uint8: Uint8Array; bool: Uint8Array;
}
/** The elements of a dtype: float16, bfloat16 and floats of 8 bits are given as float32, bool as bytes of 0 and 1. */
export type ElementsOf<D extends DType> = D extends keyof Arrays ? Arrays[D] : Float32Array;
export type Elements = ElementsOf<DType>;

export const isDType = (name: unknown): name is DType => DTYPES.includes(name as DType);

/** Bits of an element: the first number of its dtype's name. */
const bits = (dtype: DType): number => Number(/\d+|$/.exec(dtype)![0]) || 8;

/** Bytes of an element. */
export const itemsize = (dtype: DType): number => bits(dtype) / 8;

/** The name of a dtype in safetensors files: F32, BF16, U8, BOOL, F8_E4M3; they have none that ends in UZ. */
export const safetensorsName = (dtype: DType): string =>
  dtype.toUpperCase().replace(/LOAT|(?<=U)INT|NT|FN$/g, "");

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
} as const;

const word = new Float32Array(1);
const asBits = new Uint32Array(word.buffer);

/** The float16 nearest to a number, as bits; ties go to even. */
export function toHalf(value: number): number {
  const size = Math.abs(Math.fround(value)); // as PyTorch, which converts to float32 before
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  if (!(size < 65520)) return sign | (size > 0 ? 0x7c00 : 0x7e00);
  const exponent = Math.max(-14, Math.floor(Math.log2(size)));
  const fraction = size * 2 ** (10 - exponent) + 2 ** 52 - 2 ** 52; // the sum has no room for what is rounded
  return sign | (((exponent + 14) << 10) + fraction);
}

/** A float16's value. */
export function fromHalf(half: number): number {
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  const sign = half & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

function toBfloat(value: number): number {
  word[0] = value;
  const b = asBits[0]!;
  return Number.isNaN(value) ? 0x7fc0 : ((b + 0x7fff + ((b >>> 16) & 1)) >>> 16) & 0xffff;
}

function fromBfloat(half: number): number {
  asBits[0] = half << 16;
  return word[0]!;
}

/** A tensor's bytes as elements; `bytes` starts at a multiple of 8. */
export function decode(dtype: DType, bytes: Uint8Array): Elements {
  const { buffer, byteOffset, byteLength } = bytes;
  if (dtype === "float16" || dtype === "bfloat16") {
    return Float32Array.from(new Uint16Array(buffer, byteOffset, byteLength / 2), dtype === "float16" ? fromHalf : fromBfloat);
  }
  const array = ARRAYS[dtype as keyof typeof ARRAYS] ?? Uint8Array;
  return new array(buffer as ArrayBuffer, byteOffset, byteLength / itemsize(dtype));
}

export type NumberList = ArrayLike<number | bigint | boolean>;

/**
 * Numbers as the bytes of a dtype; the array's own bytes where it is of that dtype.
 *
 * @throws InputError where one has no place in it.
 */
export function encode(dtype: DType, values: NumberList, what: string): Uint8Array<ArrayBuffer> {
  const made = ARRAYS[dtype as keyof typeof ARRAYS];
  if (made && values instanceof made && values.buffer instanceof ArrayBuffer && dtype !== "bool") {
    return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  }
  const isHalf = dtype === "float16" || dtype === "bfloat16";
  if (!made && !isHalf) throw new InputError(`${what}: ${dtype} cannot be made of numbers; use writeState`);
  const isWhole = !dtype.includes("float");
  const low = dtype.startsWith("i") ? -(2 ** (bits(dtype) - 1)) : 0;
  const high = dtype === "bool" ? 1 : low + 2 ** bits(dtype) - 1;
  const round = dtype === "float16" ? toHalf : toBfloat;
  const out = new ((made ?? Uint16Array) as Uint8ArrayConstructor)(values.length);
  for (let k = 0; k < out.length; k++) {
    const given: unknown = values[k];
    const isBig = typeof given === "bigint";
    const value = Number(given);
    const fits = isBig || typeof given === "number" || typeof given === "boolean"
      ? dtype === "int64" ? (isBig ? BigInt.asIntN(64, given) === given : Number.isSafeInteger(value))
        : !isWhole || (Number.isInteger(value) && value >= low && value <= high)
      : false;
    if (!fits) throw new InputError(`${what}: element ${k} is ${String(given)}, which is no ${dtype}; convert it`);
    out[k] = isHalf ? round(value) : dtype === "int64" ? (BigInt(given as number) as unknown as number) : value;
  }
  return new Uint8Array(out.buffer as ArrayBuffer);
}
