/**
 * `ComposedProgram`: composed plans on a device: what runs, how often and on tensors of which sizes, data decide.
 *
 * A module of its own, which pages fetch with the first such plan: most have none.
 */

import { type Composed, type Kernels, type Nested, type Source, type Step, checkComposed, namesOf } from "./composed-plan.js";
import { type DType, decode, itemsize } from "./dtypes.js";
import { BundleError, InputError } from "./errors.js";
import { type Sizes, evaluate } from "./expressions.js";
import { type Buffer, type Gpu, rounded } from "./gpu.js";
import { type Given, type Input, readInputs } from "./inputs.js";
import { type Layout, inRows, numel, rows, span } from "./layout.js";
import type { Entry, StateEntry } from "./manifest.js";
import type { Plan } from "./plan.js";
import type { Program } from "./program.js";
import { type Scalar, asSize, isTrue, pythonNumber } from "./python.js";
import type { Readback } from "./readback.js";
import type { States } from "./states.js";
import { type Pool, type Reader, Tensor } from "./tensor.js";

/** A tensor in memory. */
interface Held { memory: Buffer; dtype: DType; layout: Layout }
/** What a name stands for; null is an output that is nothing. */
type Value = Held | Scalar | null;

/** What the model lends to its composed plans. */
export interface Host {
  gpu: Gpu; pool: Pool; states: States; readback: Readback; reader: Reader;
  counted: { calls: number; dispatches: number; copiedBytes: number };
  draw: (count: number) => Uint8Array<ArrayBuffer>;
  /** The memory of a tensor that is an input, with at least so many bytes. */
  fitting: (what: string, value: Tensor, nbytes: number) => Buffer;
}

const TURNS_QUEUED = 64;

const isHeld = (value: Value): value is Held => typeof value === "object" && value !== null;

/** The elements of a tensor in rows, of the bytes of its memory from its first element on. */
function inOrder(bytes: Uint8Array, { shape, strides }: Layout, wanted: Layout, width: number): Uint8Array<ArrayBuffer> {
  const made = new Uint8Array(span(wanted) * width);
  for (let k = 0; k < numel(shape); k++) {
    let rest = k;
    let from = 0;
    let to = wanted.offset;
    for (let dim = shape.length - 1; dim >= 0; dim--) {
      const place = rest % shape[dim]!;
      from += place * strides[dim]!;
      to += place * wanted.strides[dim]!;
      rest = Math.floor(rest / shape[dim]!);
    }
    made.set(bytes.subarray(from * width, (from + 1) * width), to * width);
  }
  return made;
}

/** Whether layouts of one shape have the elements at the same distances. */
const areAlike = (a: Layout, b: Layout): boolean =>
  !numel(a.shape) || a.shape.every((size, dim) => size === 1 || a.strides[dim] === b.strides[dim]);

/** One call. Memory that it lends is given back when no name is left for it, and all of it at the end. */
class Running {
  dispatches = 0;
  hasChecks = false;
  /** Of memory that is the call's own: how many values are in it. */
  private readonly counts = new Map<Buffer, number>();

  constructor(
    private readonly host: Host, private readonly programs: ReadonlyMap<Plan, Program>, private readonly signal: AbortSignal | undefined,
  ) {}

  // ---- memory

  /** Memory with one value in it. */
  lend(nbytes: number): Buffer {
    const memory = this.host.pool.lend(nbytes);
    this.counts.set(memory, 1);
    return memory;
  }

  hold<T extends Value>(value: T): T {
    const count = isHeld(value) && this.counts.get(value.memory);
    if (count) this.counts.set((value as Held).memory, count + 1);
    return value;
  }

  drop(value: Value | undefined): void {
    const count = value != null && isHeld(value) && this.counts.get(value.memory);
    if (!count) return;
    const { memory } = value as Held;
    if (count > 1) this.counts.set(memory, count - 1);
    else if (this.counts.delete(memory)) this.host.pool.give(memory);
  }

  /** Whether memory is the call's. */
  isOwn({ memory }: Held): boolean {
    return this.counts.has(memory);
  }

  /** Whether nobody else knows of what is in it. */
  isAlone({ memory }: Held): boolean {
    return this.counts.get(memory) === 1;
  }

  /** Leaves memory to somebody else; false where it is not the call's. */
  release(memory: Buffer): boolean {
    return this.counts.delete(memory);
  }

  end(): void {
    for (const memory of this.counts.keys()) this.host.pool.give(memory);
    this.counts.clear();
  }

  uploaded(data: Uint8Array, dtype: DType, layout: Layout): Held {
    const memory = this.lend(rounded(data.length));
    this.host.gpu.upload(memory, data);
    this.host.counted.copiedBytes += data.length;
    return { memory, dtype, layout };
  }

  /** The same in new memory, of so many bytes. In the place of `value`, which is dropped. */
  copied(value: Held, nbytes = value.memory.nbytes): Held {
    const memory = this.lend(nbytes);
    this.copy(value.memory, 0, memory, 0, Math.min(nbytes, value.memory.nbytes));
    this.drop(value);
    return { ...value, memory };
  }

  copy(source: Buffer, from: number, target: Buffer, to: number, nbytes: number): void {
    if (nbytes) this.host.gpu.submit((encoder) => encoder.copyBufferToBuffer(source.gpu, from, target.gpu, to, nbytes));
    this.host.counted.copiedBytes += nbytes;
  }

  /** The same in another layout of the same shape. In the place of `value`, which is dropped. */
  async laidOut(value: Held, layout: Layout): Promise<Held> {
    const width = itemsize(value.dtype);
    const { offset } = value.layout;
    if (areAlike(value.layout, layout) && (offset === layout.offset || !numel(layout.shape))) return { ...value, layout };
    const nbytes = (span(value.layout) - offset) * width;
    const [from, to] = [offset * width, layout.offset * width];
    let found: Held;
    if (areAlike(value.layout, layout) && from % 4 === 0 && to % 4 === 0) {
      found = { ...value, memory: this.lend(rounded(to + nbytes)), layout };
      this.copy(value.memory, from, found.memory, to, Math.ceil(nbytes / 4) * 4);
    } else {
      const bytes = await this.host.reader.readBytes(value.memory, from, nbytes);
      found = this.uploaded(inOrder(bytes, value.layout, layout, width), value.dtype, layout);
    }
    this.drop(value);
    return found;
  }

  // ---- numbers

  /** A number, or the one in a tensor of one element, for which it waits. */
  async number(value: Value | undefined): Promise<Scalar> {
    if (value == null) throw new BundleError("a number is not there; export the model again");
    if (!isHeld(value)) return value;
    const { memory, dtype, layout } = value;
    if (numel(layout.shape) !== 1 || dtype.startsWith("float8")) {
      throw new BundleError(`a number is read from ${dtype} [${layout.shape}]; export the model again`);
    }
    this.goesOn();
    const width = itemsize(dtype);
    const [element] = decode(dtype, await this.host.reader.readBytes(memory, layout.offset * width, width));
    return /float/.test(dtype) ? Number(element) : BigInt(element!);
  }

  private goesOn(): void {
    this.signal?.throwIfAborted();
    this.host.gpu.check();
  }

  /** The value of a size symbol. */
  private at({ position, field, dim, coefficient, constant }: Source, given: readonly Value[]): Scalar {
    const value = given[position]!;
    if (!isHeld(value)) {
      if (field) throw new BundleError("a number is given for a tensor; export the model again");
      return coefficient === 1 && !constant ? value : (BigInt(asSize(value)) - BigInt(constant)) / BigInt(coefficient);
    }
    const { shape, strides, offset } = value.layout;
    const found = field === "size" ? shape[dim] : field === "stride" ? strides[dim] : offset;
    if (found === undefined) throw new BundleError("a tensor has other dimensions than its plan says; export the model again");
    return BigInt(Math.floor((found - constant) / coefficient));
  }

  // ---- plans. They take over the values that they are given, and give what is the caller's.

  private run(nested: Nested, given: Value[]): Promise<Value[]> {
    return "plan" in nested ? this.kernels(nested, given) : this.composed(nested, given);
  }

  private async kernels(nested: Kernels, given: Value[]): Promise<Value[]> {
    const { plan, inputs, sources } = nested;
    const { gpu } = this.host;
    const program = this.programs.get(plan)!;
    const sizes: Record<string, number> = Object.create(null);
    for (const source of sources) sizes[source.symbol] = asSize(this.at(source, given));
    const sized = program.sizedAt(sizes);
    const buffers: (Buffer | undefined)[] = [];
    for (const [k, name] of inputs.entries()) {
      if (name === null) continue;
      const value = given[k] = await this.placed(nested, k, given[k]!, sizes);
      buffers[program.names.indexOf(name)] = value.memory;
    }
    program.reserve(sized);
    const made: Held[] = [];
    program.roles.forEach((role, k) => {
      if (role !== "output") return;
      const memory = buffers[k] = this.lend(sized.plan.nbytes[k]!);
      made.push({ memory } as Held);
    });
    gpu.submit((encoder) => program.encode(encoder, sized, buffers));
    this.dispatches += sized.plan.steps.length;
    this.hasChecks ||= program.roles.includes("status");
    const results = nested.results.map(({ output, size, constant }): Value => {
      if (output === null) return size === null ? constant : BigInt(evaluate(size, sizes));
      const { buffer } = plan.outputs[output]!;
      const k = program.names.indexOf(buffer);
      const memory = buffers[k] ?? program.constants.get(k)!;
      return this.hold({ memory, dtype: plan.buffers[buffer]!.dtype, layout: sized.plan.layouts[output]! });
    });
    [...given, ...made].forEach((value) => this.drop(value));
    return results;
  }

  /** Argument `k` of a plan, laid out as it takes it; alone in its memory, if the plan changes it. */
  private async placed({ plan, inputs, name, changed }: Kernels, k: number, value: Value, sizes: Sizes): Promise<Held> {
    const { dtype, ...parts } = plan.buffers[inputs[k]!]!;
    const [shape, strides] = [parts.sizes, parts.strides].map((exprs) => exprs.map((expr) => evaluate(expr, sizes)));
    const wanted = { shape: shape!, strides: strides!, offset: evaluate(parts.offset, sizes) };
    if (!isHeld(value) || value.dtype !== dtype || String(value.layout.shape) !== String(shape)) {
      const found = isHeld(value) ? `${value.dtype} [${value.layout.shape}]` : "a number";
      throw new BundleError(`${name} is given ${found} for ${dtype} [${shape}]; export the model again`);
    }
    const found = await this.laidOut(value, wanted);
    return changed.has(k) && !this.isAlone(found) ? this.copied(found) : found;
  }

  async composed(plan: Composed, given: Value[]): Promise<Value[]> {
    const values = new Map<string, Value>();
    for (const source of plan.sources) values.set(source.symbol, this.at(source, given));
    plan.inputs.forEach((name, k) => (name === null ? this.drop(given[k]) : values.set(name, given[k]!)));
    for (const [k, step] of plan.steps.entries()) {
      const dead = plan.dead[k]!;
      const made = await this.step(plan, step, values, new Set(dead));
      namesOf(step)[1].forEach((name, n) => (name ? values.set(name, made[n]!) : this.drop(made[n])));
      for (const name of dead) {
        this.drop(values.get(name));
        values.delete(name);
      }
    }
    const results = plan.returned.map((name, k) => (name === null ? plan.results[k]!.constant : this.hold(values.get(name)!)));
    values.forEach((value) => this.drop(value));
    return results;
  }

  private async step(plan: Composed, step: Step, values: Map<string, Value>, dead: ReadonlySet<string>): Promise<Value[]> {
    const { plans } = plan;
    const scalar = (name: string): Scalar => values.get(name) as Scalar;
    /** Values for another plan; those that nobody else reads leave this one. */
    const take = (names: readonly string[]): Value[] => names.map((name, k) => {
      const value = values.get(name)!;
      if (dead.has(name) && names.lastIndexOf(name) === k) values.delete(name);
      else this.hold(value);
      return value;
    });
    switch (step.kind) {
      case "Run": return this.run(plans[step.plan]!, take(step.arguments));
      case "Branch": {
        const index = await this.number(values.get(step.index));
        const chosen = step.plans[Number(index)];
        if (chosen === undefined) throw new InputError(`there is no branch ${index} of ${step.plans.length}; use other inputs`);
        return this.run(plans[chosen]!, take(step.arguments));
      }
      case "Loop": return this.loop(plan, step, take([...step.carried, ...step.others]), step.count === null ? Infinity : Number(scalar(step.count)));
      case "ReadNumber": return [await this.number(values.get(step.buffer))];
      case "SizeOf": {
        const { shape, strides } = (values.get(step.buffer) as Held).layout;
        const found = (step.field === "size" ? shape : strides)[step.dim];
        if (found === undefined) throw new BundleError(`${step.buffer} has no dimension ${step.dim}; export the model again`);
        return [BigInt(found)];
      }
      case "Compute": return [pythonNumber(step.value, scalar)];
      case "Floats": {
        const data = Float32Array.from(step.numbers, (name) => Number(scalar(name)));
        return [this.uploaded(new Uint8Array(data.buffer), "float32", rows([data.length]))];
      }
      case "Seeds": return [this.uploaded(this.host.draw(step.count), "int32", rows([step.count, 2]))];
      case "Check":
        if (!isTrue(scalar(step.condition))) throw new InputError(step.message);
        return [];
    }
  }

  private async loop({ plans }: Composed, step: Step & { kind: "Loop" }, given: Value[], most: number): Promise<Value[]> {
    let carried = given.slice(0, step.carried.length);
    const others = given.slice(step.carried.length);
    let turn = 0;
    for (; turn < most; turn++) {
      if (step.condition !== null) {
        const [found] = await this.run(plans[step.condition]!, [...carried, ...others].map((value) => this.hold(value)));
        const holds = isTrue(await this.number(found));
        this.drop(found);
        if (!holds) break;
      } else if (turn % TURNS_QUEUED === TURNS_QUEUED - 1) await this.host.gpu.settled();
      this.goesOn();
      for (const k of step.stacked) {
        const { layout, memory, dtype } = carried[k] as Held;
        const count = layout.shape[0];
        if (!count || !inRows(layout) || layout.offset) throw new BundleError("a loop has no rows to write; export the model again");
        if (turn < count) continue;
        const grown = { ...layout, shape: [2 * count, ...layout.shape.slice(1)] };
        const larger = rounded(span(grown) * itemsize(dtype));
        carried[k] = { ...this.copied(carried[k] as Held, Math.max(larger, memory.nbytes)), layout: grown };
      }
      carried = await this.run(plans[step.body]!, [...carried, ...others.map((value) => this.hold(value))]);
    }
    others.forEach((value) => this.drop(value));
    for (const k of step.stacked) {
      const { layout, ...others } = carried[k] as Held;
      carried[k] = { ...others, layout: { ...layout, shape: [Math.max(1, turn), ...layout.shape.slice(1)] } };
    }
    return carried;
  }
}

/** An entry with a composed plan, ready to be called. */
export class ComposedProgram {
  private isChecked = false;

  private constructor(
    private readonly name: string, private readonly entry: Entry, private readonly stateEntries: Record<string, StateEntry>,
    private readonly plan: Composed, private readonly programs: ReadonlyMap<Plan, Program>, private readonly host: Host,
  ) {}

  /** Compiles what a plan runs. */
  static async create(
    name: string, entry: Entry, states: Record<string, StateEntry>, plan: Composed, host: Host,
    compiled: (plan: Plan, label: string) => Promise<Program>,
  ): Promise<ComposedProgram> {
    const programs: Promise<[Plan, Program]>[] = [];
    const visit = (nested: Nested, label: string): void => {
      if ("plan" in nested) programs.push(compiled(nested.plan, label).then((program) => [nested.plan, program]));
      else nested.plans.forEach((inner, k) => visit(inner, `${label}.${k}`));
    };
    visit(plan, name);
    return new ComposedProgram(name, entry, states, plan, new Map(await Promise.all(programs)), host);
  }

  /** Calls the entry; the caller waits until it is done. States change when nothing can fail any more. */
  async call(inputs: Record<string, Input>, signal?: AbortSignal): Promise<Record<string, Tensor>> {
    const { name, entry, plan, host } = this;
    const { pool, counted } = host;
    const call = readInputs(name, entry, inputs);
    const run = new Running(host, this.programs, signal);
    const lent = Object.values(call.values).flatMap((value) => (value instanceof Tensor ? value.held() : []));
    lent.forEach((memory) => pool.hold(memory)); // until the end, whoever disposes of them
    try {
      const made = await run.composed(plan, this.arguments(run, call));
      const changes = await this.changes(run, made);
      const results = this.results(run, made, call);
      this.change(run, changes);
      counted.calls++;
      counted.dispatches += run.dispatches;
      return this.tensors(run, results, call);
    } finally {
      run.end();
      lent.forEach((memory) => pool.leave(memory));
      pool.count();
      if (run.hasChecks) host.readback.expect(!this.isChecked);
      this.isChecked ||= run.hasChecks;
    }
  }

  private arguments(run: Running, { values, shapes }: Given): Value[] {
    const { entry, host } = this;
    return entry.arguments.map(({ input, state, seeds }) => {
      if (state !== null) return this.stateAs(state, host.states.get(state).buffer);
      if (input === null) return run.uploaded(host.draw(seeds!), "int32", rows([seeds!, 2]));
      const [value, { dtype }, layout] = [values[input]!, entry.inputs[input]!, rows(shapes[input]!)];
      if (!(value instanceof Tensor)) return run.uploaded(value, dtype, layout);
      return { memory: host.fitting(`${this.name}: ${input}`, value, rounded(value.size * itemsize(dtype))), dtype, layout };
    });
  }

  private stateAs(name: string, memory: Buffer): Held {
    const { dtype, sizes } = this.stateEntries[name]!;
    return { memory, dtype, layout: rows(sizes) };
  }

  private damaged(what: string): BundleError {
    return new BundleError(`${this.name} gives ${what}; export the model again`);
  }

  /** What the call makes of states, in rows. */
  private async changes(run: Running, made: Value[]): Promise<[string, Held][]> {
    const found: [string, Held][] = [];
    for (const [k, { mutates }] of this.plan.results.entries()) {
      if (mutates === null) continue;
      const name = this.entry.arguments[mutates]!.state!;
      const { dtype, layout } = this.stateAs(name, null!);
      const value = made[k] as Held;
      if (value.dtype !== dtype || String(value.layout.shape) !== String(layout.shape)) {
        throw this.damaged(`${value.dtype} [${value.layout.shape}] for the state ${name}`);
      }
      const isApart = run.isOwn(value) || value.memory === this.host.states.get(name).buffer;
      found.push([name, (made[k] = await run.laidOut(isApart ? value : run.copied(value), layout))]);
    }
    return found;
  }

  /** What the plan returns for results by name, in memory that is nobody else's. */
  private results(run: Running, made: Value[], { sizes }: Given): Record<string, Held> {
    const returned = [...made.keys()].filter((k) => this.plan.results[k]!.mutates === null);
    const found: Record<string, Held> = {};
    for (const [name, { tensor, output }] of Object.entries(this.entry.results)) {
      if (output === null) continue;
      const k = returned[output]!;
      const value = made[k] as Held;
      const isLike = value.layout.shape.length === tensor.sizes.length && tensor.sizes.every((size, dim) =>
        size === null || evaluate(size, sizes) === value.layout.shape[dim]);
      if (value.dtype !== tensor.dtype || !isLike) throw this.damaged(`${value.dtype} [${value.layout.shape}] for the result ${name}`);
      found[name] = made[k] = run.isOwn(value) ? value : run.copied(value);
    }
    return found;
  }

  private change(run: Running, changes: readonly [string, Held][]): void {
    const { states, pool } = this.host;
    for (const [name, value] of changes) {
      const state = states.get(name);
      state.version++;
      if (value.memory === state.buffer) continue;
      if (run.isAlone(value) && value.memory.nbytes === state.buffer.nbytes) {
        pool.give(state.buffer); // what was submitted before still reads it, and comes first
        state.buffer = value.memory;
        run.release(value.memory);
      } else run.copy(value.memory, 0, state.buffer, 0, Math.min(state.buffer.nbytes, value.memory.nbytes));
    }
  }

  private tensors(run: Running, made: Record<string, Held>, { shapes, values }: Given): Record<string, Tensor> {
    const { host: { reader, pool, states }, entry } = this;
    const results: Record<string, Tensor> = {};
    for (const [name, { tensor, input, state }] of Object.entries(entry.results)) {
      const given = input === null ? null : values[input]!;
      let value = made[name];
      if (given instanceof Uint8Array) value = run.uploaded(given, tensor.dtype, rows(shapes[input!]!));
      else if (given) value = run.copied({ memory: given.held(), dtype: tensor.dtype, layout: rows(shapes[input!]!) });
      else if (state !== null) value = run.copied(this.stateAs(state, states.get(state).buffer));
      results[name] = new Tensor(name, tensor.dtype, value!.layout, reader, pool, value!.memory);
      run.release(value!.memory);
    }
    return results;
  }
}

export { checkComposed };
