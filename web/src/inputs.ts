/** `readInputs`: what a call is given, as bytes of the right dtypes and sizes. */

import { type DType, type NumberList, encode, itemsize } from "./dtypes.js";
import { InputError } from "./errors.js";
import { type Sizes, evaluate } from "./expressions.js";
import { numel } from "./layout.js";
import type { Entry } from "./manifest.js";
import { Tensor } from "./tensor.js";

type NestedNumbers = number | bigint | boolean | readonly NestedNumbers[];

/**
 * What an input takes: a result, or numbers in rows. Sizes follow from lists in lists, or are given; where they are not,
 * they are those of the entry, of which one may follow from the number of elements.
 */
export type Input<D extends DType = DType> = Tensor<D> | NumberList | NestedNumbers | { data: Tensor<D> | NumberList; shape: readonly number[] };

export interface Given {
  /** Of the entry's size symbols. */
  sizes: Sizes;
  /** Of each input. */
  shapes: Record<string, readonly number[]>;
  /** Of each input. */
  values: Record<string, Tensor | Uint8Array<ArrayBuffer>>;
}

/**
 * The inputs of a call.
 *
 * @throws InputError where one is missing, or does not fit the entry or another one.
 */
export function readInputs(name: string, entry: Entry, inputs: Record<string, Input>): Given {
  const unknown = Object.keys(inputs).find((key) => !(key in entry.inputs));
  if (unknown !== undefined) throw new InputError(`${name} has no input ${unknown}; it takes ${Object.keys(entry.inputs)}`);
  const shapes: Record<string, readonly number[] | null> = {};
  const raw: Record<string, Tensor | NumberList> = {};
  for (const [key, { dtype, sizes }] of Object.entries(entry.inputs)) {
    const given = inputs[key];
    if (given == null) throw new InputError(`${name} needs the input ${key}: ${dtype}, ${sizes.length} dimensions`);
    [shapes[key], raw[key]] = read(`${name}: ${key}`, sizes.length, given);
  }
  const sizes = sizesOf(name, entry, shapes, raw);
  const given: Given = { sizes, shapes: {}, values: {} };
  for (const [key, { dtype, sizes: exprs }] of Object.entries(entry.inputs)) {
    const what = `${name}: ${key}`;
    const wanted = (given.shapes[key] = exprs.map((size) => evaluate(size, sizes)));
    const value = raw[key]!;
    if (shapes[key] && String(shapes[key]) !== String(wanted)) {
      throw new InputError(`${what} has the sizes [${shapes[key]}], it has to have [${wanted}]`);
    }
    if (value instanceof Tensor && value.dtype !== dtype) {
      throw new InputError(`${what} is ${value.dtype}, it has to be ${dtype}; convert it`);
    }
    const bytes = value instanceof Tensor ? value : encode(dtype, value, what);
    const count = bytes instanceof Tensor ? bytes.size : bytes.length / itemsize(dtype);
    if (count !== numel(wanted)) throw new InputError(`${what} has ${count} elements, it has to have [${wanted}]`);
    given.values[key] = bytes;
  }
  return given;
}

/** The sizes of an input, null where they are not given, and its elements. */
function read(what: string, dims: number, given: Input): [readonly number[] | null, Tensor | NumberList] {
  if (given instanceof Tensor) return [given.shape, given];
  if (typeof given !== "object") return [null, [given]];
  if ("data" in given) return [given.shape, given.data];
  if (!Array.isArray(given)) return [null, given as NumberList];
  const shape = [given.length];
  let flat: readonly NestedNumbers[] = given;
  while (Array.isArray(flat[0])) {
    const length: number = flat[0].length;
    if (!flat.every((row) => Array.isArray(row) && row.length === length)) {
      throw new InputError(`${what} has rows of several lengths; pad them`);
    }
    shape.push(length);
    flat = flat.flat() as readonly NestedNumbers[];
  }
  // A list of numbers for something with other dimensions is its elements in rows.
  return [shape.length === 1 && dims !== 1 ? null : shape, flat as NumberList];
}

/** The size symbols' values; where an input's sizes are not given, one of them follows from its number of elements. */
function sizesOf(
  name: string, entry: Entry, shapes: Record<string, readonly number[] | null>, raw: Record<string, Tensor | NumberList>,
): Sizes {
  const known: Record<string, number> = {};
  const symbols = Object.entries(entry.sizes);
  const unknown = Object.fromEntries(symbols.map(([symbol]) => [symbol, 0]));
  for (const [symbol, { input, dim }] of symbols) if (shapes[input]) known[symbol] = shapes[input][dim]!;
  for (const [key, spec] of Object.entries(entry.inputs)) {
    const free = symbols.flatMap(([symbol, { input }]) => (input === key && !(symbol in known) ? symbol : []));
    if (free.length > 1) throw new InputError(`${name}: ${key} needs its sizes: give {data, shape}`);
    const [symbol] = free;
    if (symbol === undefined) continue;
    const sizes = { ...unknown, ...known, [symbol]: 1 };
    const rest = numel(spec.sizes.map((size) => evaluate(size, sizes)));
    known[symbol] = rest && Math.floor((raw[key] as NumberList).length / rest);
  }
  for (const [symbol, { name: label, low, high, input, dim }] of symbols) {
    const size = known[symbol]!;
    if (!(size >= low && size <= high && Number.isInteger(size))) {
      throw new InputError(`${name}: ${label} is ${size} (dimension ${dim} of ${input}), it has to be ${low} to ${high}`);
    }
  }
  return known;
}
