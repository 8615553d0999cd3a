/** Plans: their types, and whether what was fetched is one that fits its entry. */

import {
  type Check, below, count, demand, dtype, fields, flag, is, list, oneOf, optional, record, refuse, table, text,
} from "./checks.js";
import { type DType, itemsize } from "./dtypes.js";
import { type Expr, type Names, type NumberValue, exprOf, numberOf } from "./expressions.js";
import { inRows } from "./layout.js";
import type { Entry, Variant } from "./manifest.js";

export interface Kernel { name: string; wgsl: number; bindings: { writable: boolean }[]; parameter_count: number }
export type Role = "input" | "constant" | "intermediate" | "output" | "prepared" | "status";
export interface PlanBuffer {
  role: Role; dtype: DType; sizes: Expr[]; strides: Expr[]; offset: Expr; nbytes: Expr; slot: number | null;
}
export interface Binding { buffer: string; offset_nbytes: number; nbytes: Expr | null }
/** Of an index that comes from data, made by a kernel. */
export interface IndexCheck { op: string; source: string; dim: number | null }
export interface Dispatch {
  kernel: number; bindings: Binding[]; grid: Expr[]; parameters: NumberValue[]; checks: IndexCheck[]; narrow: Expr[];
}
export interface PlanOutput { buffer: string; sizes: Expr[]; strides: Expr[]; offset: Expr; mutates: number | null }
export interface Plan {
  version: number; kernels: Kernel[]; buffers: Record<string, PlanBuffer>; steps: Dispatch[]; inputs: { buffer: string | null }[];
  outputs: PlanOutput[]; constants: Record<string, Uint8Array<ArrayBuffer>>; preparation: Plan | null;
}

/** The parameter that is the number of a dispatch's first check. */
export const FIRST_CHECK = "first_check";
export const STATUS_NBYTES = 32;
export const VERSION = 9;
const MOST_PARAMETERS = 1 << 14; // a uniform buffer of 64 KiB
const BINDING_ALIGNMENT = 256;

const kernel = fields<Kernel>({
  name: text, wgsl: count, bindings: list(fields({ writable: flag })), parameter_count: below(MOST_PARAMETERS),
});
const check = fields<IndexCheck>({ op: text, source: text, dim: optional(count) });
const bytes: Check<Uint8Array<ArrayBuffer>> = (data, at) => {
  try {
    return Uint8Array.from(atob(text(data, at)), (letter) => letter.charCodeAt(0));
  } catch {
    return refuse(at, "is no base64");
  }
};

export function planOf(symbols: Names): Check<Plan> {
  const expr = exprOf(symbols);
  const dispatch = fields<Dispatch>({
    kernel: count,
    bindings: list(fields<Binding>({
      buffer: text,
      offset_nbytes: (data, at) => {
        demand(count(data, at) % BINDING_ALIGNMENT === 0, at, "is no multiple of 256");
        return data as number;
      },
      nbytes: optional(expr),
    })),
    grid: list(expr, 3), parameters: list(numberOf({ has: (name) => name === FIRST_CHECK || symbols.has(name) })), checks: list(check), narrow: list(expr),
  });
  return fields<Plan>({
    version: is((data) => data === VERSION, `is not the ${VERSION} that this runtime reads`),
    kernels: list(kernel),
    buffers: table(fields<PlanBuffer>({
      role: oneOf("input", "constant", "intermediate", "output", "prepared", "status"), dtype,
      sizes: list(expr), strides: list(expr), offset: expr, nbytes: expr, slot: optional(count),
    })),
    steps: list((data, at) => dispatch(record(data, at)["Dispatch"], at)),
    inputs: list(fields<{ buffer: string | null }>({ buffer: optional(text) })),
    outputs: list(fields<PlanOutput>({
      buffer: text, sizes: list(expr), strides: list(expr), offset: (data, at) => expr(data ?? 0, at), mutates: optional(count),
    })),
    constants: table(bytes),
    preparation: (data, at) => (data === null ? null : planOf(new Set())(data, at)),
  });
}

/**
 * The plan in parsed JSON.
 *
 * @param at the file that it is from.
 * @param modules how many WGSL modules there are.
 * @throws BundleError for anything that is none, or does not fit the entry or the variant's state.
 */
export function checkPlan(data: unknown, at: string, entry: Entry, variant: Variant, modules: number): Plan {
  const plan = planOf(new Set(Object.keys(entry.sizes)))(data, at);
  checkParts(plan, at, modules);
  checkArguments(plan, at, entry, variant);
  checkPreparation(plan, at, entry, modules);
  return plan;
}

export const same = (a: unknown, b: unknown): boolean => JSON.stringify(a) === JSON.stringify(b);

const named = ({ buffers }: Plan, role: Role): string[] => Object.keys(buffers).filter((name) => buffers[name]!.role === role);

/**
 * That all that is named exists, and that what is read has been written.
 *
 * @param shown roles of buffers that outputs may be besides those of their own.
 */
export function checkParts(plan: Plan, at: string, modules: number, shown: readonly Role[] = []): void {
  const { kernels, buffers, steps, inputs, outputs, constants } = plan;
  const need = (condition: boolean, what: string): void => demand(condition, at, what);
  const known = (name: string): PlanBuffer => buffers[name] ?? refuse(at, `has no buffer ${name}`);
  const memory = (name: string): string | number => known(name).slot ?? name;
  const inPlace = new Set(outputs.flatMap(({ buffer, mutates }) => (mutates !== null && inputs[mutates]?.buffer === buffer ? buffer : [])));
  const written = new Set<string>();
  const reads = (name: string): void => need(written.has(name) || known(name).nbytes === 0, `reads ${name} before it is written`);
  const writes = (name: string): void =>
    need(["intermediate", "output", "status"].includes(known(name).role) || inPlace.has(name), `writes ${name}, which does not change`);

  for (const { name, wgsl } of kernels) need(wgsl < modules, `has no module of the kernel ${name}`);
  need(same(inputs.flatMap(({ buffer }) => buffer ?? []).sort(), named(plan, "input").sort()), "has inputs that nothing gives");
  for (const [name, { role, strides, sizes, nbytes, slot }] of Object.entries(buffers)) {
    const fits = sizes.length === strides.length && (slot === null || role === "intermediate") &&
      (role !== "status" || nbytes === STATUS_NBYTES) && (role !== "constant" || constants[name]?.length === nbytes);
    need(fits, `has a buffer ${name} of which the parts do not fit`);
    if (role !== "intermediate" && role !== "output") written.add(name);
  }
  steps.forEach((step, k) => {
    const { bindings, parameters, grid } = step;
    const kernel = kernels[step.kernel];
    need(bindings.length === kernel?.bindings.length && parameters.length === kernel.parameter_count && grid.length === 3, `has a step ${k} that does not fit its kernel`);
    const isWritten = (n: number): boolean => kernel!.bindings[n]!.writable;
    const read = bindings.filter((_, n) => !isWritten(n)).map(({ buffer }) => memory(buffer));
    bindings.forEach(({ buffer }, n) => {
      if (!isWritten(n)) return reads(buffer);
      writes(buffer);
      need(!read.includes(memory(buffer)), `reads and writes ${buffer} in step ${k}`);
    });
    bindings.forEach(({ buffer }, n) => isWritten(n) && written.add(buffer));
  });
  for (const { buffer, sizes, strides, mutates } of outputs) {
    reads(buffer);
    const isOwn = ["output", ...shown].includes(known(buffer).role) || (mutates !== null && inPlace.has(buffer));
    need(sizes.length === strides.length && isOwn, `gives ${buffer}, which is no memory of an output`);
  }
}

/** That inputs and outputs are what the entry says of them. */
function checkArguments({ inputs, outputs, buffers }: Plan, at: string, entry: Entry, { state }: Variant): void {
  const need = (condition: boolean, what: string): void => demand(condition, at, what);
  need(entry.arguments.length === inputs.length, "takes other arguments");
  entry.arguments.forEach(({ input, state: name }, k) => {
    const { buffer } = inputs[k]!;
    const given = input !== null ? entry.inputs[input] : state[name!];
    if (buffer === null || !given) return;
    const { sizes, dtype } = buffers[buffer]!;
    need(same(sizes, given.sizes) && dtype === given.dtype, `takes an argument ${k} of another dtype or size`);
  });
  const returned = outputs.filter(({ mutates, buffer, sizes, strides, offset }) => {
    if (mutates === null) return true;
    const changed = state[entry.arguments[mutates]?.state ?? ""];
    need(!!changed?.changes, `changes argument ${mutates}, which does not change`);
    // Its memory becomes that of the state.
    const isRows = inRows({ shape: changed!.sizes, strides: strides as number[], offset: 0 }) && offset === 0;
    need(same(sizes, changed!.sizes) && isRows && buffers[buffer]!.dtype === changed!.dtype, `changes the layout of argument ${mutates}`);
    return false;
  });
  for (const [name, { output, tensor }] of Object.entries(entry.results)) {
    const made = output === null ? tensor : buffers[returned[output]?.buffer ?? ""];
    need(made !== undefined && itemsize(made.dtype) === itemsize(tensor.dtype), `has no output for the result ${name}`);
  }
}

/** That the preparation makes what is prepared, of states. */
function checkPreparation(plan: Plan, at: string, entry: Entry, modules: number): void {
  const { preparation: inner, inputs, buffers } = plan;
  const wanted = named(plan, "prepared");
  demand(!wanted.length === !inner, at, "lacks what is prepared");
  if (!inner) return;
  const place = `${at}: its preparation`;
  checkParts(inner, place, modules);
  const fits = (name: string): boolean => same(buffers[name]!.nbytes, inner.buffers[name]!.nbytes);
  const isOfStates = inner.inputs.every(({ buffer }) =>
    buffer !== null && entry.arguments[inputs.findIndex((input) => input.buffer === buffer)]?.state != null && fits(buffer));
  demand(isOfStates && !inner.preparation && inner.outputs.every(({ mutates }) => mutates === null), place, "takes or changes more than states");
  demand(same(named(inner, "output").sort(), [...wanted].sort()) && !named(inner, "prepared").length && wanted.every(fits), place, "makes other buffers");
}
