/** `sizePlan`: a plan with its sizes evaluated, whatever buffers it will use. */

import { itemsize } from "./dtypes.js";
import { BundleError, InputError } from "./errors.js";
import { type Expr, type NumberValue, type Sizes, evaluate, evaluateNumber, orZero } from "./expressions.js";
import { rounded } from "./gpu.js";
import { type Layout, span } from "./layout.js";
import { FIRST_CHECK, type Dispatch, type Plan, type PlanBuffer } from "./plan.js";

/** A dispatch with a grid that is not empty. */
export interface SizedDispatch {
  kernel: number;
  /** Of each binding: the buffer's position, the offset and the size in bytes. */
  bindings: [number, number, number][];
  /** Where its parameters are in the uniform buffer, in bytes; -1 without any. */
  parameters: number;
  parametersSize: number;
  grid: number[];
}

export interface SizedPlan {
  /** Of each buffer of the plan, in order. */
  nbytes: number[];
  steps: SizedDispatch[];
  /** The parameters of all dispatches. */
  uniform: Uint8Array<ArrayBuffer>;
  /** Of each output. */
  layouts: Layout[];
}

const MOST_IDLE = 1 << 20; // workgroups
const MOST_GRID = 65_535;
const ALIGNMENT = 256;

/** Bytes for a size that calls decide: eight between powers of two serve all, so that memory is used again. */
function roundedMore(nbytes: number, most: number): number {
  return Math.max(nbytes, Math.min(rounded(2 ** (Math.ceil(8 * Math.log2(nbytes)) / 8)), most - (most % 16)));
}

/**
 * @param firstChecks the number of the first check of each step.
 * @param limits of the device.
 * @throws InputError for sizes at which the plan does not run; BundleError where it has no others.
 */
export function sizePlan(plan: Plan, sizes: Sizes, firstChecks: readonly number[], limits: GPUSupportedLimits): SizedPlan {
  const names = Object.keys(plan.buffers);
  const positions = new Map(names.map((name, k) => [name, k]));
  const value = (expr: Expr): number => evaluate(expr, sizes);
  const hasOthers = Object.keys(sizes).length > 0;

  function demand(condition: boolean, problem: string): void {
    if (condition) return;
    if (hasOthers) throw new InputError(`${problem} at these sizes; use smaller ones`);
    throw new BundleError(`${problem}; export the model for such a GPU`);
  }

  function layout(what: string, parts: { sizes: Expr[]; strides: Expr[]; offset: Expr }, { dtype, nbytes }: PlanBuffer): Layout {
    const found = { shape: parts.sizes.map(value), strides: parts.strides.map(value), offset: value(parts.offset) };
    const fits = Math.min(found.offset, ...found.shape, ...found.strides) >= 0 && span(found) * itemsize(dtype) <= Math.max(0, value(nbytes));
    demand(fits, `${what} lies outside of its memory`);
    return found;
  }

  /** What kernels touch of each buffer. */
  const touched = names.map((name) => {
    const buffer = plan.buffers[name]!;
    layout(name, buffer, buffer);
    const nbytes = Math.max(0, value(buffer.nbytes));
    demand(nbytes <= limits.maxBufferSize, `${name} needs ${nbytes} bytes, of which a buffer of this GPU has at most ${limits.maxBufferSize}`);
    return nbytes;
  });
  const nbytes = names.map((name, k) => {
    const { role, nbytes: size } = plan.buffers[name]!;
    const most = rounded(touched[k]!);
    return role === "output" && typeof size !== "number" ? roundedMore(most, limits.maxBufferSize) : most;
  });

  const places = new Map<string, number>();
  const words: number[] = [];
  const isInt32 = (number: number): boolean => (number | 0) === number;

  /** Where the parameters of a step are, in bytes. */
  function place({ parameters }: Dispatch, name: string, first: number): number {
    if (!parameters.length) return -1;
    const known = { ...sizes, [FIRST_CHECK]: first };
    const values = parameters.map((parameter) => {
      const word = parameterWord(parameter, known);
      demand(isInt32(word), `kernel ${name} needs ${word}, of more than 32 bits,`);
      return word;
    });
    const key = values.join();
    let at = places.get(key);
    if (at === undefined) {
      places.set(key, (at = words.length * 4));
      words.push(...values);
      while (words.length % (ALIGNMENT / 4)) words.push(0);
    }
    return at;
  }

  const steps: SizedPlan["steps"] = [];
  plan.steps.forEach((step, number) => {
    const { kernel, bindings } = step;
    const { name } = plan.kernels[kernel]!;
    const grid = step.grid.map(value);
    if (grid.includes(0)) return;
    demand(Math.min(...grid) > 0 && Math.max(...grid) <= MOST_GRID, `kernel ${name} needs ${grid} workgroups, more than ${MOST_GRID},`);
    // Very many workgroups without a byte of their own would do nothing but keep the GPU busy.
    const reached = bindings.reduce((sum, { buffer }) => sum + touched[positions.get(buffer)!]!, MOST_IDLE);
    demand(grid[0]! * grid[1]! * grid[2]! <= reached, `kernel ${name} has too many workgroups, ${grid},`);
    demand(step.narrow.every((expr) => isInt32(orZero(() => value(expr)))), `kernel ${name} needs numbers of more than 32 bits`);
    steps.push({
      kernel,
      bindings: bindings.map(({ buffer, offset_nbytes: offset, nbytes: most }) => {
        const position = positions.get(buffer)!;
        const left = rounded(touched[position]!) - offset;
        if (left <= 0) return [position, 0, 16]; // a window behind the end of a buffer that is small this time
        const reached = touched[position]! - offset;
        const size = Math.min(rounded(most === null ? reached : Math.min(reached, value(most))), left);
        const limit = limits.maxStorageBufferBindingSize;
        demand(size <= limit, `kernel ${name} needs ${size} bytes, of which this GPU binds at most ${limit},`);
        return [position, offset, size];
      }),
      parameters: place(step, name, firstChecks[number]!),
      parametersSize: Math.ceil(step.parameters.length / 4) * 16,
      grid,
    });
  });
  const layouts = plan.outputs.map((output) => layout("a result", output, plan.buffers[output.buffer]!));
  return { nbytes, steps, uniform: new Uint8Array(Int32Array.from(words).buffer), layouts };
}

const single = new Float32Array(1);
const asInteger = new Int32Array(single.buffer);

/** A word of a kernel's uniform buffer; 0 where it divides by an empty dimension. */
function parameterWord(parameter: NumberValue, sizes: Sizes): number {
  return orZero(() => {
    if ("Expr" in parameter) return evaluate(parameter.Expr, sizes);
    single[0] = evaluateNumber(parameter, sizes);
    return asInteger[0]!;
  });
}
