/** Plans: their types, and whether what was fetched is one that fits its entry. */

import { type DType, isDType } from "./dtypes.js";
import { BundleError } from "./errors.js";
import { type Expr, type HostNumber, checkExpr, checkNumber } from "./expressions.js";
import type { Entry, Variant } from "./manifest.js";

export interface Kernel {
  name: string; wgsl: number; bindings: { writable: boolean }[]; parameter_count: number; ops: string[];
}
export type Role = "input" | "constant" | "intermediate" | "output" | "prepared" | "status";
export interface PlanBuffer {
  role: Role; dtype: DType; sizes: Expr[]; strides: Expr[]; offset: Expr; nbytes: Expr; slot: number | null;
}
export interface Binding { buffer: string; offset_nbytes: number; nbytes: Expr | null }
export interface Check { op: string; source: string; dim: number | null }
export type Parameter = { Expr: Expr } | { HostNumber: HostNumber };
export interface Dispatch {
  kernel: number; bindings: Binding[]; grid: [Expr, Expr, Expr]; parameters: Parameter[]; checks: Check[]; narrow: Expr[];
}
export interface Copy { source: string; destination: string }
export type Step = { Dispatch: Dispatch } | { CopyBuffer: Copy };
export interface PlanOutput { buffer: string | null; sizes: Expr[]; strides: Expr[]; offset: Expr | null; mutates: number | null }
export interface Plan {
  name: string; kernels: Kernel[]; buffers: Record<string, PlanBuffer>; steps: Step[];
  inputs: { buffer: string | null }[]; outputs: PlanOutput[]; constants: Record<string, string>; preparation: Plan | null;
}

export const FIRST_CHECK = "first_check";
const VERSION = 7;
const ROLES = ["input", "constant", "intermediate", "output", "prepared", "status"];

/**
 * The plan in parsed JSON.
 *
 * @throws BundleError for anything that is none, or does not fit the entry, the variant's state, or the number of modules.
 */
export function checkPlan(data: unknown, at: string, entry: Entry, variant: Variant, modules: number): Plan {
  const plan = data as Plan;
  const symbols = new Set(Object.keys(entry.sizes));
  try {
    checkParts(plan, symbols, modules);
    checkArguments(plan, entry, variant);
    if (plan.preparation !== null) {
      const inner = plan.preparation;
      checkParts(inner, new Set(), modules);
      require(inner.preparation === null, "preparation");
      for (const { buffer } of inner.inputs) {
        const where = plan.inputs.findIndex((input) => input.buffer === buffer);
        require(buffer !== null && where >= 0 && entry.arguments[where]?.state != null, "preparation");
      }
      for (const [name, buffer] of Object.entries(plan.buffers)) {
        require(buffer.role !== "prepared" || own(inner.buffers, name)?.role === "output", name);
      }
    }
  } catch (error) {
    throw new BundleError(`${at}: ${(error as Error).message}; export the model again`);
  }
  return plan;
}

/** Throws where a part of a plan, which `what` names, is not as it has to be. */
function require(condition: boolean, what: string): asserts condition {
  if (!condition) throw new BundleError(`its ${what} cannot be right`);
}

function own<T>(table: Record<string, T>, name: string): T | undefined {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

const isList = (data: unknown): data is unknown[] => Array.isArray(data) && data.length <= 1 << 20;
const isObject = (data: unknown): data is object => typeof data === "object" && data !== null && !Array.isArray(data);
const isCount = (data: unknown, below = Number.MAX_SAFE_INTEGER): boolean =>
  Number.isSafeInteger(data) && (data as number) >= 0 && (data as number) < below;

function checkParts(plan: Plan, symbols: ReadonlySet<string>, modules: number): void {
  require(isObject(plan), "form");
  const { version } = plan as unknown as { version: unknown };
  require(version === VERSION, `version, which is ${String(version)} and not ${VERSION},`);
  require(isList(plan.kernels) && isObject(plan.buffers) && isList(plan.steps) && isList(plan.inputs), "form");
  require(isList(plan.outputs) && isObject(plan.constants), "form");
  for (const kernel of plan.kernels) {
    require(isObject(kernel) && isCount(kernel.wgsl, modules), "kernels");
    require(isList(kernel.bindings) && isCount(kernel.parameter_count, 1 << 14), "kernels");
  }
  for (const [name, buffer] of Object.entries(plan.buffers)) {
    require(isObject(buffer) && ROLES.includes(buffer.role) && isDType(buffer.dtype), name);
    require(isList(buffer.sizes) && isList(buffer.strides) && buffer.sizes.length === buffer.strides.length, name);
    for (const expr of [...buffer.sizes, ...buffer.strides, buffer.offset, buffer.nbytes]) checkExpr(expr, symbols);
    require(buffer.slot === null || isCount(buffer.slot), name);
    require(buffer.role !== "constant" || typeof own(plan.constants, name) === "string", name);
  }
  const withCheck = new Set([...symbols, FIRST_CHECK]);
  for (const step of plan.steps) {
    require(isObject(step), "steps");
    if ("CopyBuffer" in step) {
      const { source, destination } = step.CopyBuffer;
      require(own(plan.buffers, source) !== undefined && own(plan.buffers, destination) !== undefined, "copies");
      continue;
    }
    require("Dispatch" in step, "steps");
    const { kernel, bindings, grid, parameters, checks, narrow } = step.Dispatch;
    require(isCount(kernel, plan.kernels.length), "steps");
    const used = plan.kernels[kernel]!;
    require(isList(bindings) && bindings.length === used.bindings.length, used.name);
    for (const { buffer, offset_nbytes, nbytes } of bindings) {
      require(own(plan.buffers, buffer) !== undefined, used.name);
      require(isCount(offset_nbytes) && offset_nbytes % 256 === 0, used.name);
      if (nbytes !== null) checkExpr(nbytes, symbols);
    }
    require(isList(grid) && grid.length === 3, used.name);
    require(isList(narrow) && isList(checks) && isList(parameters), used.name);
    for (const expr of [...grid, ...narrow]) checkExpr(expr, symbols);
    require(parameters.length === used.parameter_count, used.name);
    for (const parameter of parameters) {
      require(isObject(parameter), used.name);
      if ("Expr" in parameter) checkExpr(parameter.Expr, withCheck);
      else checkNumber(parameter.HostNumber, symbols);
    }
  }
  for (const output of plan.outputs) {
    require(isObject(output) && isList(output.sizes) && isList(output.strides), "outputs");
    require(output.buffer !== null && own(plan.buffers, output.buffer) !== undefined, "outputs");
    for (const expr of [...output.sizes, ...output.strides, output.offset ?? 0]) checkExpr(expr, symbols);
    require(output.mutates === null || isCount(output.mutates, plan.inputs.length), "outputs");
  }
  for (const input of plan.inputs) {
    require(isObject(input) && (input.buffer === null || own(plan.buffers, input.buffer)?.role === "input"), "inputs");
  }
}

function checkArguments(plan: Plan, entry: Entry, variant: Variant): void {
  require(entry.arguments.length === plan.inputs.length, "arguments");
  entry.arguments.forEach(({ input, state, seeds }, k) => {
    const given = [input, state, seeds].filter((value) => value !== null).length;
    require(given === 1, `argument ${k}`);
    require(input === null || Object.hasOwn(entry.inputs, input), `argument ${k}`);
    require(state === null || Object.hasOwn(variant.state, state), `argument ${k}`);
    const buffer = plan.inputs[k]!.buffer;
    if (buffer === null || seeds !== null) return;
    const wanted = plan.buffers[buffer]!;
    const named = input !== null ? entry.inputs[input]! : variant.state[state!]!;
    const same = JSON.stringify(wanted.sizes) === JSON.stringify(named.sizes) && wanted.dtype === named.dtype;
    require(same, `argument ${k}`);
  });
  for (const output of plan.outputs) {
    if (output.mutates === null) continue;
    const name = entry.arguments[output.mutates]!.state;
    require(name !== null && variant.state[name]!.changes, "outputs");
  }
  const returned = plan.outputs.filter((output) => output.mutates === null).length;
  for (const [name, result] of Object.entries(entry.results)) {
    const given = [result.output, result.input, result.state].filter((value) => value !== null).length;
    require(given === 1, `result ${name}`);
    require(result.output === null || result.output < returned, `result ${name}`);
    require(result.input === null || Object.hasOwn(entry.inputs, result.input), `result ${name}`);
    require(result.state === null || Object.hasOwn(variant.state, result.state), `result ${name}`);
  }
}
