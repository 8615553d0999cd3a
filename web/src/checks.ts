/** What parsed JSON has to be: a check gives a value as its type, or names the place of what is none. */

import { type DType, isDType } from "./dtypes.js";
import { BundleError } from "./errors.js";

/**
 * Gives `data`, which was found at `at`, as a T.
 *
 * @throws BundleError where it is none.
 */
export type Check<T> = (data: unknown, at: string) => T;

const LONGEST_TEXT = 1 << 20;
const MOST_ITEMS = 1 << 20;

export function refuse(at: string, problem: string): never {
  throw new BundleError(`${at.slice(0, 200)} ${problem}; export the model again`);
}

export function demand(condition: boolean, at: string, problem: string): asserts condition {
  if (!condition) refuse(at, problem);
}

/** A check of one kind of value. */
export const is = <T>(test: (data: unknown) => boolean, problem: string): Check<T> => (data, at) =>
  test(data) ? (data as T) : refuse(at, problem);

const isCount = (data: unknown): boolean => Number.isSafeInteger(data) && (data as number) >= 0;

export const text = is<string>((data) => typeof data === "string" && data.length <= LONGEST_TEXT, "is no text, or too long");
export const flag = is<boolean>((data) => typeof data === "boolean", "is neither true nor false");
export const count = is<number>(isCount, "is no size");
export const dtype = is<DType>(isDType, "is no dtype");
export const record = is<Record<string, unknown>>(
  (data) => typeof data === "object" && data !== null && !Array.isArray(data), "is no object");

export const below = (most: number): Check<number> => is((data) => isCount(data) && (data as number) < most, "is no number below " + most);

export const oneOf = <T extends string>(...names: readonly T[]): Check<T> =>
  is((data) => names.includes(data as T), `is none of ${names}`);

export const optional = <T>(check: Check<T>): Check<T | null> => (data, at) => (data === null ? null : check(data, at));

/** An object with these fields; others are left out. */
export function fields<T>(checks: { [K in keyof T]: Check<T[K]> }): Check<T> {
  return (data, at) => {
    const given = record(data, at);
    const found = {} as T;
    for (const name in checks) found[name] = checks[name](given[name], `${at}.${name}`);
    return found;
  };
}

/** Values by name. */
export function table<T>(check: Check<T>): Check<Record<string, T>> {
  return (data, at) => {
    // Without a prototype: a name may be anything, "__proto__" too.
    const found: Record<string, T> = Object.create(null);
    for (const [name, value] of Object.entries(record(data, at))) found[name] = check(value, `${at}.${name}`);
    return found;
  };
}

export function list<T>(check: Check<T>, most = MOST_ITEMS): Check<T[]> {
  return (data, at) => {
    if (!Array.isArray(data) || data.length > most) refuse(at, "is no list, or too long");
    return data.map((value, k) => check(value, `${at}[${k}]`));
  };
}
