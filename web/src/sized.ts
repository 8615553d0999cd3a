/** `sizePlan`: a plan with its sizes evaluated, whatever buffers it will use. */

import { InputError } from "./errors.js";
import { type Sizes, evaluate, evaluateNumber, evaluateOrZero } from "./expressions.js";
import { rounded } from "./gpu.js";
import { FIRST_CHECK, type Dispatch, type Plan, type PlanBuffer } from "./plan.js";

/** A dispatch with a grid that is not empty. */
export interface SizedDispatch {
  kernel: number;
  /** Of each binding: the buffer's position, the offset and the size in bytes. */
  bindings: [number, number, number][];
  /** Where its parameters are in the uniform buffer, in bytes; -1 without any. */
  parameters: number;
  parametersSize: number;
  grid: [number, number, number];
}
export interface SizedCopy { source: number; destination: number; nbytes: number }
export type SizedStep = SizedDispatch | SizedCopy;

export interface SizedPlan {
  sizes: Sizes;
  /** Of each buffer of the plan, in order. */
  nbytes: number[];
  steps: SizedStep[];
  /** The parameters of all dispatches. */
  uniform: Uint8Array<ArrayBuffer>;
}

const MOST_GRID = 65_535;
const ALIGNMENT = 256;

const bytesOf = (buffer: PlanBuffer, sizes: Sizes): number => Math.max(0, evaluate(buffer.nbytes, sizes));

/**
 * @param firstChecks the number of the first check of each step.
 * @param limits of the device.
 * @throws InputError for sizes at which the plan does not run.
 */
export function sizePlan(plan: Plan, sizes: Sizes, firstChecks: readonly number[], limits: GPUSupportedLimits): SizedPlan {
  const names = Object.keys(plan.buffers);
  const positions = new Map(names.map((name, k) => [name, k]));
  const nbytes = names.map((name) => rounded(bytesOf(plan.buffers[name]!, sizes)));
  const places = new Map<string, number>();
  const words: Int32Array[] = [];
  let used = 0;

  function place(step: Dispatch, first: number): number {
    if (!step.parameters.length) return -1;
    const values = parameters(step, sizes, first);
    const key = values.join();
    let at = places.get(key);
    if (at === undefined) {
      at = used;
      const room = Math.ceil((values.length * 4) / ALIGNMENT) * ALIGNMENT;
      const padded = new Int32Array(room / 4);
      padded.set(values);
      words.push(padded);
      used += room;
      places.set(key, at);
    }
    return at;
  }

  const steps: SizedStep[] = [];
  plan.steps.forEach((step, number) => {
    if ("CopyBuffer" in step) {
      const { source, destination } = step.CopyBuffer;
      const size = Math.ceil(bytesOf(plan.buffers[source]!, sizes) / 4) * 4;
      if (size) steps.push({ source: positions.get(source)!, destination: positions.get(destination)!, nbytes: size });
      return;
    }
    const { kernel, grid, bindings, narrow } = step.Dispatch;
    const name = plan.kernels[kernel]!.name;
    const [x, y, z] = grid.map((size) => evaluate(size, sizes)) as [number, number, number];
    if (!x || !y || !z) return;
    if (Math.min(x, y, z) < 0 || Math.max(x, y, z) > MOST_GRID || narrow.some((n) => !isInt32(evaluateOrZero(n, sizes)))) {
      throw new InputError(`kernel ${name} cannot run at these sizes; use smaller ones`);
    }
    steps.push({
      kernel,
      bindings: bindings.map(({ buffer, offset_nbytes: offset, nbytes: most }) => {
        const position = positions.get(buffer)!;
        const left = nbytes[position]! - offset;
        if (left <= 0) return [position, 0, 16]; // a window behind the end of a buffer that is small this time
        const reached = bytesOf(plan.buffers[buffer]!, sizes) - offset;
        const size = Math.min(rounded(most === null ? reached : Math.min(reached, evaluate(most, sizes))), left);
        if (size > limits.maxStorageBufferBindingSize) {
          throw new InputError(`kernel ${name} needs ${size} bytes of a tensor, more than this device binds; use smaller sizes`);
        }
        return [position, offset, size];
      }),
      parameters: place(step.Dispatch, firstChecks[number]!),
      parametersSize: Math.ceil(step.Dispatch.parameters.length / 4) * 16,
      grid: [x, y, z],
    });
  });
  const uniform = new Int32Array(Math.max(4, used / 4));
  let at = 0;
  for (const part of words) {
    uniform.set(part, at);
    at += part.length;
  }
  return { sizes, nbytes, steps, uniform: new Uint8Array(uniform.buffer) };
}

const isInt32 = (value: number): boolean => (value | 0) === value;

const single = new Float32Array(1);
const asInteger = new Int32Array(single.buffer);

function parameters(step: Dispatch, sizes: Sizes, firstCheck: number): number[] {
  const known = { ...sizes, [FIRST_CHECK]: firstCheck };
  return step.parameters.map((parameter) => {
    if ("HostNumber" in parameter) {
      single[0] = evaluateNumber(parameter.HostNumber, sizes);
      return asInteger[0]!;
    }
    const value = evaluateOrZero(parameter.Expr, known);
    if (!isInt32(value)) throw new InputError(`a kernel needs the number ${value}, which has more than 32 bits; use smaller sizes`);
    return value;
  });
}
