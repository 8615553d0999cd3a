/** Sizes that follow from those of a call's inputs; see docs/bundle.md. */

import { type Check, demand, is, list, record } from "./checks.js";
import { BundleError } from "./errors.js";

export type Atom = [string, number] | ["//" | "%", Expr, Expr];
export type Expr = number | { c: number; t: [number, ...Atom[]][] };
export type Sizes = Readonly<Record<string, number>>;

const MOST_TERMS = 512;
const MOST_DEPTH = 32;

function exact(value: number): number {
  if (!Number.isSafeInteger(value)) throw new BundleError("a size exceeds 2^53; use smaller ones");
  return value;
}

class DividedByZero extends BundleError {}

/**
 * The value of an expression.
 *
 * @throws BundleError where it divides by what is not positive, or exceeds 2^53.
 */
export function evaluate(expr: Expr, sizes: Sizes): number {
  if (typeof expr === "number") return expr;
  let total = expr.c;
  for (const [coefficient, ...atoms] of expr.t) {
    let product = coefficient;
    for (const atom of atoms) product = exact(product * evaluateAtom(atom, sizes));
    total = exact(total + product);
  }
  return total;
}

function evaluateAtom(atom: Atom, sizes: Sizes): number {
  if (atom.length === 2) return sizes[atom[0]]!;
  const a = evaluate(atom[1], sizes);
  const b = evaluate(atom[2], sizes);
  if (b <= 0) throw new (b ? BundleError : DividedByZero)(`a size is divided by ${b}; use others`);
  const rest = (a % b) + (a % b < 0 ? b : 0);
  return atom[0] === "//" ? (a - rest) / b : rest;
}

/** What a function gives, but 0 where it divides by an empty dimension: no element has that. */
export function orZero(value: () => number): number {
  try {
    return value();
  } catch (error) {
    if (error instanceof DividedByZero) return 0;
    throw error;
  }
}

const integer = is<number>(Number.isSafeInteger, "is no integer below 2^53");

/** Names that are known. */
export type Names = Pick<ReadonlySet<string>, "has">;

/** Checks that something is an expression over these symbols. */
export function exprOf(symbols: Names, depth = 0): Check<Expr> {
  return (data, at) => {
    if (typeof data === "number") return integer(data, at);
    demand(depth < MOST_DEPTH, at, "is nested too deeply");
    const { c, t } = record(data, at);
    const inner = exprOf(symbols, depth + 1);
    const atom: Check<Atom> = (part, place) => {
      const [sign, a, b] = list<any>((item) => item, MOST_DEPTH)(part, place);
      if (sign === "//" || sign === "%") return [sign, inner(a, place), inner(b, place)];
      demand(symbols.has(sign), place, `has the size ${String(sign)} of no input`);
      return [sign, integer(a, place)];
    };
    const term: Check<[number, ...Atom[]]> = (part, place) => {
      const [coefficient, ...atoms] = list<any>((item) => item, MOST_DEPTH)(part, place);
      return [integer(coefficient, place), ...atoms.map((item) => atom(item, place))];
    };
    return { c: integer(c, at), t: list(term, MOST_TERMS)(t, at) };
  };
}

/** A float64 that a kernel gets as float32. */
export interface HostNumber { op: string; args: NumberValue[] }
export type NumberValue = { HostNumber: HostNumber } | { Expr: Expr } | { float: number };

const NUMBER_OPS: Record<string, (a: number, b: number) => number> = {
  float: (a) => a,
  neg: (a) => -a,
  sqrt: (a) => Math.sqrt(a),
  add: (a, b) => a + b,
  sub: (a, b) => a - b,
  mul: (a, b) => a * b,
  div: (a, b) => a / b,
  pow: (a, b) => a ** b,
};

/** The value of a number, in float64. */
export function evaluateNumber(value: NumberValue, sizes: Sizes): number {
  if ("float" in value) return value.float;
  if ("Expr" in value) return evaluate(value.Expr, sizes);
  const [a, b] = value.HostNumber.args.map((arg) => evaluateNumber(arg, sizes));
  return NUMBER_OPS[value.HostNumber.op]!(a!, b!);
}

/** Checks that something is a number over these symbols, of functions by name. */
export function numberOf(symbols: Names, ops: Record<string, (...args: any[]) => unknown> = NUMBER_OPS, depth = 0): Check<NumberValue> {
  return (data, at) => {
    const { Expr, HostNumber, float } = record(data, at);
    if (Expr !== undefined) return { Expr: exprOf(symbols)(Expr, at) };
    if (HostNumber === undefined) {
      const value = typeof float === "string" ? Number(float.replace("inf", "Infinity")) : float;
      demand(typeof value === "number", at, "is no number");
      return { float: value as number };
    }
    const { op, args } = record(HostNumber, at);
    demand(Object.hasOwn(ops, op as string) && depth < MOST_DEPTH, at, "is no number");
    const found = list(numberOf(symbols, ops, depth + 1), 3)(args, at);
    demand(found.length === ops[op as string]!.length, at, "has other arguments");
    return { HostNumber: { op: op as string, args: found } };
  };
}
