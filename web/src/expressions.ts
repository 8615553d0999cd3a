/** Sizes that follow from those of a call's inputs; see docs/bundle.md. */

import { BundleError } from "./errors.js";

export type Atom = [string, number] | ["//" | "%", Expr, Expr];
export type Expr = number | { c: number; t: [number, ...Atom[]][] };
export type Sizes = Readonly<Record<string, number>>;

const MOST_TERMS = 512;
const MOST_DEPTH = 32;

function exact(value: number): number {
  if (!Number.isSafeInteger(value)) throw new BundleError("a size exceeds 2^53; export the model again");
  return value;
}

/** a / b rounded down, exactly. */
export function floorDiv(a: number, b: number): number {
  return (a - mod(a, b)) / b;
}

/** The remainder of `floorDiv`. */
export function mod(a: number, b: number): number {
  const rest = a % b;
  return rest < 0 ? rest + b : rest;
}

class DividedByZero extends Error {}

/** The value of an expression. */
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

/** The same, but 0 where it divides by an empty dimension: no element has it. */
export function evaluateOrZero(expr: Expr, sizes: Sizes): number {
  try {
    return evaluate(expr, sizes);
  } catch (error) {
    if (error instanceof DividedByZero) return 0;
    throw error;
  }
}

function evaluateAtom(atom: Atom, sizes: Sizes): number {
  if (atom.length === 2) {
    const value = sizes[atom[0]];
    if (value === undefined) throw new BundleError(`no input has the size ${atom[0]}`);
    return value;
  }
  const a = evaluate(atom[1], sizes);
  const b = evaluate(atom[2], sizes);
  if (b === 0) throw new DividedByZero();
  if (b < 0) throw new BundleError("a size is divided by a negative number");
  return atom[0] === "//" ? floorDiv(a, b) : mod(a, b);
}

/** Throws `BundleError` for anything that is no expression over these symbols. */
export function checkExpr(data: unknown, symbols: ReadonlySet<string>, depth = 0): asserts data is Expr {
  if (Number.isSafeInteger(data)) return;
  const terms = (data as { t?: unknown } | null)?.t;
  const fits =
    typeof data === "object" && data !== null && Number.isSafeInteger((data as { c?: unknown }).c) &&
    Array.isArray(terms) && terms.length <= MOST_TERMS && depth < MOST_DEPTH;
  if (!fits) throw new BundleError("this is no size");
  for (const term of terms as unknown[]) {
    if (!Array.isArray(term) || term.length > MOST_DEPTH || !Number.isSafeInteger(term[0])) {
      throw new BundleError("this is no term of a size");
    }
    for (const atom of term.slice(1)) {
      if (!Array.isArray(atom)) throw new BundleError("this is no part of a size");
      if (atom.length === 2 && symbols.has(atom[0])) continue;
      if (atom.length !== 3 || (atom[0] !== "//" && atom[0] !== "%")) {
        throw new BundleError(`the size ${String(atom[0])} belongs to no input`);
      }
      checkExpr(atom[1], symbols, depth + 1);
      checkExpr(atom[2], symbols, depth + 1);
    }
  }
}

/** A float64 that a kernel gets as float32. */
export interface HostNumber {
  op: string;
  args: NumberArgument[];
}
type NumberArgument = { HostNumber: HostNumber } | { Expr: Expr } | { float: number | string };

const NUMBER_OPS: Record<string, [number, (a: number, b: number) => number]> = {
  float: [1, (a) => a],
  neg: [1, (a) => -a],
  sqrt: [1, (a) => Math.sqrt(a)],
  add: [2, (a, b) => a + b],
  sub: [2, (a, b) => a - b],
  mul: [2, (a, b) => a * b],
  div: [2, (a, b) => a / b],
  pow: [2, (a, b) => a ** b],
};

/** The value of a number, in float64. */
export function evaluateNumber(number: HostNumber, sizes: Sizes): number {
  const [a, b] = number.args.map((arg) => {
    if ("float" in arg) return Number(String(arg.float).replace("inf", "Infinity"));
    return "Expr" in arg ? evaluateOrZero(arg.Expr, sizes) : evaluateNumber(arg.HostNumber, sizes);
  });
  return NUMBER_OPS[number.op]![1](a!, b!);
}

/** Throws `BundleError` for anything that is no number over these symbols. */
export function checkNumber(data: unknown, symbols: ReadonlySet<string>, depth = 0): asserts data is HostNumber {
  const { op, args } = (data ?? {}) as HostNumber;
  const row = Object.hasOwn(NUMBER_OPS, op) ? NUMBER_OPS[op] : undefined;
  if (!row || !Array.isArray(args) || args.length !== row[0] || depth > MOST_DEPTH) {
    throw new BundleError("this is no number");
  }
  for (const arg of args) {
    if (typeof arg !== "object" || arg === null) throw new BundleError("this is no number");
    if ("Expr" in arg) checkExpr(arg.Expr, symbols);
    else if ("HostNumber" in arg) checkNumber(arg.HostNumber, symbols, depth + 1);
    else if (!/^(-?inf|nan|-?[\d.]+(e[-+]?\d+)?)$/.test(String(arg.float))) throw new BundleError("this is no number");
  }
}
