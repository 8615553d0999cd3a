/** Elements as JavaScript sees them; bytes are PyTorch's. */

import { InputError } from "./errors.js";

export type DType =
  | "float32" | "float16" | "bfloat16" | "float64" | "int64" | "int32" | "int16" | "int8" | "uint8" | "uint32" | "bool"
  | "float8_e4m3fn" | "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz";

/** A result: float16 and bfloat16 are given as float32, bool as bytes of 0 and 1. */
export type Elements =
  | Float32Array | Float64Array | BigInt64Array | Int32Array | Uint32Array | Int16Array | Int8Array | Uint8Array;

const BYTES: Record<DType, number> = {
  float32: 4, float16: 2, bfloat16: 2, float64: 8, int64: 8, int32: 4, int16: 2, int8: 1, uint8: 1, uint32: 4, bool: 1,
  float8_e4m3fn: 1, float8_e5m2: 1, float8_e4m3fnuz: 1, float8_e5m2fnuz: 1,
};

export const SAFETENSORS: Partial<Record<DType, string>> = {
  float32: "F32", float16: "F16", bfloat16: "BF16", float64: "F64", int64: "I64", int32: "I32", int16: "I16", int8: "I8",
  uint8: "U8", uint32: "U32", bool: "BOOL", float8_e4m3fn: "F8_E4M3", float8_e5m2: "F8_E5M2",
};

export const isDType = (name: unknown): name is DType => typeof name === "string" && Object.hasOwn(BYTES, name);

/** Bytes of an element. */
export const itemsize = (dtype: DType): number => BYTES[dtype];

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
} as const;

/** Whole numbers that an integer type holds. */
const RANGES: Partial<Record<DType, [number, number]>> = {
  int32: [-(2 ** 31), 2 ** 31 - 1], uint32: [0, 2 ** 32 - 1], int16: [-(2 ** 15), 2 ** 15 - 1],
  int8: [-128, 127], uint8: [0, 255],
};

const word = new Float32Array(1);
const bits = new Uint32Array(word.buffer);

/** The float16 nearest to a number, as bits; ties go to even. */
export function toHalf(value: number): number {
  word[0] = value;
  const b = bits[0]!;
  const sign = (b >>> 16) & 0x8000;
  const magnitude = b & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x47800000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {
    word[0] = Math.abs(word[0]!) + 0.5; // aligned by the addition, which rounds
    return sign | (bits[0]! - 0x3f000000);
  }
  return sign | ((magnitude + 0xc8000fff + ((magnitude >>> 13) & 1)) >>> 13) & 0x7fff;
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
  const b = bits[0]!;
  return Number.isNaN(value) ? 0x7fc0 : ((b + 0x7fff + ((b >>> 16) & 1)) >>> 16) & 0xffff;
}

function fromBfloat(half: number): number {
  bits[0] = half << 16;
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

/** Numbers as the bytes of a dtype. Throws `InputError` where one has no place in it. */
export function encode(dtype: DType, values: NumberList, what: string): Uint8Array<ArrayBuffer> {
  const count = values.length;
  const made = ARRAYS[dtype as keyof typeof ARRAYS];
  if (made && values instanceof made && values.buffer instanceof ArrayBuffer && dtype !== "bool") {
    return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  }
  const refuse = (k: number): never => {
    throw new InputError(`${what}: element ${k} is ${String(values[k])}, which is no ${dtype}; convert it first`);
  };
  if (dtype === "int64") {
    const out = new BigInt64Array(count);
    for (let k = 0; k < count; k++) {
      const value = values[k]!;
      if (typeof value !== "bigint" && !Number.isSafeInteger(Number(value))) refuse(k);
      const whole = BigInt(value as number);
      if (BigInt.asIntN(64, whole) !== whole) refuse(k);
      out[k] = whole;
    }
    return new Uint8Array(out.buffer);
  }
  if (dtype === "float16" || dtype === "bfloat16") {
    const round = dtype === "float16" ? toHalf : toBfloat;
    return new Uint8Array(Uint16Array.from(values as ArrayLike<number>, (v) => round(Number(v))).buffer);
  }
  if (!made) throw new InputError(`${what}: ${dtype} cannot be made of numbers; give bytes through writeState`);
  const range = dtype === "bool" ? [0, 1] : RANGES[dtype];
  const out = new (made as Uint8ArrayConstructor)(count);
  for (let k = 0; k < count; k++) {
    const value = Number(values[k]);
    if (range && !(Number.isInteger(value) && value >= range[0]! && value <= range[1]!)) refuse(k);
    out[k] = value;
  }
  return new Uint8Array(out.buffer as ArrayBuffer);
}
