/** Python's arithmetic, with which composed plans compute: an integer of 64 bits is a bigint, a float a number. */

import { type Check, demand, is } from "./checks.js";
import { InputError } from "./errors.js";
import { type Expr, type NumberValue, evaluate, numberOf } from "./expressions.js";

export type Scalar = bigint | number;

const MOST_DIGITS = 50;

function fail(problem: string): never {
  throw new InputError(`${problem}, in a number that the call computes; use other inputs`);
}

/** An integer as JavaScript's sizes are. */
export function asSize(value: Scalar): number {
  const size = Number(value);
  if (!Number.isSafeInteger(size)) fail(`${value} is no integer below 2^53`);
  return size;
}

export const isTrue = (value: Scalar): boolean => value != 0; // loosely: of both types

const asBool = (condition: boolean): bigint => BigInt(condition);
const isInt = (value: Scalar): value is bigint => typeof value === "bigint";

/** An operation that integers and floats have, on what both operands can be. */
const arithmetic = (ofInts: (a: bigint, b: bigint) => bigint, ofFloats: (a: number, b: number) => number) =>
  (a: Scalar, b: Scalar): Scalar => (isInt(a) && isInt(b) ? ofInts(a, b) : ofFloats(Number(a), Number(b)));

const integer = (whole: (value: number) => number) => (a: Scalar): bigint => {
  if (isInt(a)) return a;
  return Number.isFinite(a) ? BigInt(whole(a)) : fail(`${a} becomes an integer`);
};

/** The nearest integer; of two, the even one. */
function nearest(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
}

/** As CPython does it. */
function floorDivided(a: number, b: number): number {
  const rest = a % nonzero(b);
  const quotient = (a - rest) / b - Number(rest !== 0 && rest < 0 !== b < 0);
  const below = Math.floor(quotient);
  if (quotient !== 0) return below + Number(quotient - below > 0.5);
  return Object.is(Math.sign(a / b), -0) || a / b < 0 ? -0 : 0;
}

function remainder(a: number, b: number): number {
  const rest = a % nonzero(b);
  return rest !== 0 ? rest + (rest < 0 === b < 0 ? 0 : b) : b < 0 ? -0 : 0;
}

const nonzero = <T extends Scalar>(b: T): T => (isTrue(b) ? b : fail("a division by zero"));

function floorDividedInts(a: bigint, b: bigint): bigint {
  return a / nonzero(b) - BigInt(a % b !== 0n && a < 0n !== b < 0n);
}

function power(a: Scalar, b: Scalar): Scalar {
  if (isInt(a) && isInt(b) && b >= 0n && b <= 64n) return a ** b;
  const [x, y] = [Number(a), Number(b)];
  if (x === 1 || (x === -1 && Math.abs(y) === Infinity)) return 1;
  if (x === 0 && y < 0) fail("a division by zero");
  if (x < 0 && Number.isFinite(x) && Number.isFinite(y) && !Number.isInteger(y)) fail("a power that is complex");
  const found = x ** y;
  return Number.isFinite(x) && Number.isFinite(y) && !Number.isFinite(found) ? fail("a power that is too large") : found;
}

/** Rounded to so many decimal places; of two, the even one. */
function roundTo(a: Scalar, places: Scalar): Scalar {
  const count = Number(places);
  if (!(count >= 0 && count <= MOST_DIGITS)) return fail(`rounding to ${places} places`);
  if (isInt(a) || !Number.isFinite(a) || Math.abs(a) >= 2 ** 53) return a;
  const digits = Math.abs(a).toFixed(100); // exactly
  const end = digits.indexOf(".") + 1 + count;
  const isTie = /^50*$/.test(digits.slice(end));
  const rounded = isTie && Number(digits.slice(0, end).replace(".", "").slice(-1)) % 2 === 0 ? digits.slice(0, end) : Math.abs(a).toFixed(count);
  return Number(rounded) * (a < 0 || Object.is(a, -0) ? -1 : 1);
}

function divided(a: Scalar, b: Scalar): number {
  nonzero(b);
  return isInt(a) && isInt(b) ? asSize(a) / asSize(b) : Number(a) / Number(b);
}

export const PYTHON_OPS: Record<string, (...args: any[]) => Scalar> = {
  float: (a) => Number(a),
  neg: (a) => -a,
  sqrt: (a) => (a < 0 ? fail(`the root of ${a}`) : Math.sqrt(Number(a))),
  add: arithmetic((a, b) => a + b, (a, b) => a + b),
  sub: arithmetic((a, b) => a - b, (a, b) => a - b),
  mul: arithmetic((a, b) => a * b, (a, b) => a * b),
  div: (a, b) => divided(a, b),
  pow: (a, b) => power(a, b),
  floordiv: (a, b) => arithmetic(floorDividedInts, floorDivided)(a, nonzero(b)),
  mod: (a, b) => arithmetic((x, y) => x - floorDividedInts(x, y) * y, remainder)(a, nonzero(b)),
  min: (a, b) => (b < a ? b : a),
  max: (a, b) => (b > a ? b : a),
  abs: (a) => (a < 0 || Object.is(a, -0) ? -a : a),
  trunc: integer(Math.trunc),
  floor: integer(Math.floor),
  ceil: integer(Math.ceil),
  round: integer(nearest),
  round_to: (a, places) => roundTo(a, places),
  eq: (a, b) => asBool(a == b),
  ne: (a, b) => asBool(a != b),
  lt: (a, b) => asBool(a < b),
  le: (a, b) => asBool(a <= b),
  gt: (a, b) => asBool(a > b),
  ge: (a, b) => asBool(a >= b),
  and: (a, b) => asBool(isTrue(a) && isTrue(b)),
  or: (a, b) => asBool(isTrue(a) || isTrue(b)),
  not: (a) => asBool(!isTrue(a)),
  where: (condition, a, b) => (isTrue(condition) ? a : b),
};

/** The name of the number that an expression is, if it is no more than that. */
export function symbolOf(expr: Expr): string | null {
  if (typeof expr === "number" || expr.c !== 0 || expr.t.length !== 1) return null;
  const [coefficient, ...atoms] = expr.t[0]!;
  return coefficient === 1 && atoms.length === 1 && atoms[0]!.length === 2 ? (atoms[0]![0] as string) : null;
}

/**
 * The value of a number made of named ones.
 *
 * @throws InputError where Python raises an error, and for sizes beyond 2^53.
 */
export function pythonNumber(value: NumberValue, named: (name: string) => Scalar): Scalar {
  if ("float" in value) return value.float;
  if ("Expr" in value) {
    const name = symbolOf(value.Expr);
    if (name !== null) return named(name);
    const sizes = new Proxy({}, { get: (_, symbol) => asSize(named(symbol as string)) });
    return BigInt(evaluate(value.Expr, sizes));
  }
  const { op, args } = value.HostNumber;
  const found = PYTHON_OPS[op]!(...args.map((arg) => pythonNumber(arg, named)));
  if (isInt(found) && BigInt.asIntN(64, found) !== found) fail(`${found} has more than 64 bits`);
  return found;
}

/** Checks that something is a number made of named ones. */
export const pythonNumberOf = (names: Pick<ReadonlySet<string>, "has">): Check<NumberValue> => numberOf(names, PYTHON_OPS);

/** Checks a constant: of a number, its value. */
export const scalar: Check<Scalar | null> = (data, at) => {
  if (data === null) return null;
  if (typeof data === "boolean") return BigInt(data);
  if (typeof data === "number") return BigInt(is<number>(Number.isSafeInteger, "is no integer below 2^53")(data, at));
  const { float } = numberOf(new Set<string>())(data, at) as { float?: number };
  demand(float !== undefined, at, "is no number");
  return float;
};
