/** `load` and `Model`: a bundle, ready to be called. */

import { type Elements, type NumberList, SAFETENSORS, decode, encode, itemsize } from "./dtypes.js";
import { BundleError, DeviceLostError, IndexOutOfRangeError, InputError } from "./errors.js";
import { type Expr, type Sizes, evaluate } from "./expressions.js";
import { type Fetch, Files, unreadable } from "./files.js";
import { type Buffer, type DeviceOptions, Gpu, deviceLost, rounded } from "./gpu.js";
import {
  type Entry, type Manifest, type StateEntry, type StateKind, type TensorEntry, type Variant, checkManifest, stateBytes,
} from "./manifest.js";
import { type Check, type Plan, checkPlan } from "./plan.js";
import { Arena, Pipelines, Program } from "./program.js";
import { Random, randomSeed } from "./random.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import { type Layout, Pool, Tensor, inRows } from "./tensor.js";

export interface Progress { loadedBytes: number; totalBytes: number; pipelines: number; totalPipelines: number }

export interface LoadOptions extends DeviceOptions {
  /** Told of every chunk of the files, and of every pipeline. */
  progress?: (progress: Progress) => void;
  /** Ends loading. */
  signal?: AbortSignal;
  /** Whether files are kept in the browser's cache; true by default. */
  cache?: boolean;
  /** Of random numbers; by default another one each time. */
  seed?: bigint | number;
  /** Whether a lost device is replaced at once, with the last checkpoint. */
  autoRestore?: boolean;
  /** Told of a lost device. */
  onLost?: (error: DeviceLostError) => void;
  /** Instead of the browser's. */
  fetch?: Fetch;
}

type Nested = number | bigint | boolean | readonly Nested[];

/** What an input takes: numbers, in rows; the sizes follow from lists in lists, or are given, or from the entry. */
export type Input = Tensor | NumberList | Nested | { data: NumberList; shape: readonly number[] };

/** What a model has done. `copiedBytes` are those of inputs written, results read, and copies between buffers. */
export interface Statistics { calls: number; dispatches: number; copiedBytes: number; gpuBytes: number }

interface StateMemory { entry: StateEntry; buffer: Buffer; version: number }

interface Callable {
  entry: Entry;
  program: Program;
  /** Of each argument of the plan: the position of its buffer; -1 where the plan reads none. */
  positions: number[];
  outputs: { position: number; sizes: Expr[]; strides: Expr[]; offset: Expr }[];
  /** Outputs that are new values of states. */
  changes: { position: number; state: string; isInPlace: boolean }[];
  inputs: Map<string, Buffer>;
  preparation: { program: Program; states: string[]; versions: number[]; made: Map<string, Buffer>; memory: (Buffer | undefined)[] } | null;
  /** Buffers by position, filled by each call. */
  given: (Buffer | undefined)[];
  /** Positions of the outputs that results are in. */
  returned: ReadonlySet<number>;
  hasChecks: boolean;
  isChecked: boolean;
}

const MOST_MANIFEST = 64 << 20;
const STATUS_BYTES = 32;
const CHECK_INTERVAL = 1000;
const QUEUED = 64 << 20; // bytes on their way to the GPU while weights are loaded

/**
 * Loads a bundle.
 *
 * @param url of its folder, relative to the page.
 * @throws WebGPUUnavailableError, BundleError, OutOfMemoryError; the signal's reason.
 */
export async function load(url: string | URL, options: LoadOptions = {}): Promise<Model> {
  const base = new URL(String(url).replace(/\/?$/, "/"), globalThis.document?.baseURI ?? globalThis.location?.href);
  const fetcher: Fetch = options.fetch ?? ((input, init) => fetch(input, init));
  const address = new URL("manifest.json", base);
  const response = await fetcher(address, { cache: "no-cache", signal: options.signal ?? null });
  if (!response.ok) throw unreadable(response);
  const text = await response.text();
  if (text.length > MOST_MANIFEST) throw new BundleError("manifest.json is too large to be one");
  let data: unknown;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new BundleError(`${address.href} is no JSON (${(error as Error).message}); check the address`);
  }
  const model = new Model(checkManifest(data), base, fetcher, options);
  await model.start();
  return model;
}

/** A loaded bundle. `load` makes it. */
export class Model {
  /** The variant that runs. */
  variant!: Variant;
  readonly random: Random;
  private gpu!: Gpu;
  private pool!: Pool;
  private status!: Buffer;
  private files!: Files;
  private checks: Check[] = [];
  private states = new Map<string, StateMemory>();
  private callables = new Map<string, Callable>();
  private staging = new Map<number, GPUBuffer[]>();
  private saved = new Map<string, Uint8Array<ArrayBuffer>>();
  private restoring: Promise<void> | null = null;
  private isDestroyed = false;
  private hasReports = false;
  private lastCheck = 0;
  private counted = { calls: 0, dispatches: 0, copiedBytes: 0 };

  /** For `load`. */
  constructor(
    readonly manifest: Manifest, private readonly base: URL, private readonly fetcher: Fetch, private readonly options: LoadOptions,
  ) {
    this.random = new Random(options.seed ?? randomSeed());
  }

  get device(): GPUDevice {
    return this.gpu.device;
  }

  /** What the browser says of the GPU; null with a device of the caller's. */
  get adapterInfo(): GPUAdapterInfo | null {
    return this.gpu.info;
  }

  get entries(): Record<string, Entry> {
    return this.variant.entries;
  }

  get statistics(): Statistics {
    return { ...this.counted, gpuBytes: this.gpu.allocated };
  }

  /** For `load`: opens a device, and puts everything on it. */
  async start(): Promise<void> {
    const { signal, progress } = this.options;
    const [gpu, variant] = await Gpu.open(this.manifest.variants, this.options, (error) => this.lost(gpu, error));
    this.gpu = gpu;
    this.variant = variant;
    try {
      const state: Progress = { loadedBytes: 0, totalBytes: this.bytesToLoad(), pipelines: 0, totalPipelines: 0 };
      const tell = (change: (progress: Progress) => void): void => {
        change(state);
        progress?.({ ...state });
      };
      this.files = await Files.open(this.manifest, this.base, this.fetcher, this.options.cache ?? true, signal, (count) =>
        tell((p) => (p.loadedBytes += count)));
      const wgsl = await this.files.json(variant.kernels);
      if (!Array.isArray(wgsl) || !wgsl.every((text) => typeof text === "string")) {
        throw new BundleError(`${variant.kernels} has no kernels; export the model again`);
      }
      this.pool = new Pool(gpu);
      this.status = gpu.allocate(STATUS_BYTES);
      this.checks = [];
      this.staging = new Map();
      this.states = new Map(Object.entries(variant.state).map(([name, entry]) =>
        [name, { entry, buffer: gpu.allocate(stateBytes(entry)), version: 0 }]));
      await gpu.settled(); // before anything is downloaded for memory that is not there
      const pipelines = new Pipelines(gpu, wgsl as string[], () => tell((p) => (p.pipelines += 1)));
      const arena = new Arena(gpu);
      const made = Object.entries(variant.entries).map(async ([name, entry]): Promise<[string, Callable]> => {
        const plan = checkPlan(await this.files.json(entry.plan), entry.plan, entry, variant, wgsl.length);
        const compiled = Promise.all([pipelines.of(plan), plan.preparation ? pipelines.of(plan.preparation) : []]);
        state.totalPipelines = pipelines.count;
        const [own, prepared] = await compiled;
        return [name, this.callable(name, entry, plan, own, prepared, arena)];
      });
      const all = Promise.all(made);
      all.catch(() => undefined); // awaited below, after the weights
      await this.loadStates(Object.keys(variant.state));
      this.callables = new Map(await all);
      await gpu.settled();
      signal?.throwIfAborted();
    } catch (error) {
      gpu.destroy();
      throw error;
    }
  }

  private bytesToLoad(): number {
    const paths = new Set([this.variant.kernels]);
    for (const { plan } of Object.values(this.variant.entries)) paths.add(plan);
    for (const { file } of Object.values(this.variant.state)) if (file !== null) paths.add(file);
    return [...paths].reduce((sum, path) => sum + this.manifest.files[path]!.nbytes, 0);
  }

  private callable(
    name: string, entry: Entry, plan: Plan, pipelines: Awaited<ReturnType<Pipelines["of"]>>,
    prepared: Awaited<ReturnType<Pipelines["of"]>>, arena: Arena,
  ): Callable {
    const { gpu, status } = this;
    const program = new Program(gpu, plan, name, pipelines, this.numbered(plan), arena, status);
    const at = (buffer: string | null): number => (buffer === null ? -1 : program.names.indexOf(buffer));
    const positions = plan.inputs.map(({ buffer }) => at(buffer));
    const outputs = plan.outputs.map((output) => ({ ...output, position: at(output.buffer), offset: output.offset ?? 0 }));
    const changes = outputs.flatMap(({ position, mutates, sizes, strides, offset }) => {
      if (mutates === null) return [];
      const state = entry.arguments[mutates]!.state!;
      const isInPlace = position === positions[mutates];
      const layout = { shape: sizes, strides, offset } as unknown as Layout;
      if (!isInPlace && (program.roles[position] !== "output" || offset !== 0 || !inRows(layout))) {
        throw new BundleError(`${entry.plan}: ${state} changes its layout; export the model again`);
      }
      return [{ position, state, isInPlace }];
    });
    let preparation: Callable["preparation"] = null;
    if (plan.preparation) {
      const inner = plan.preparation;
      const innerProgram = new Program(gpu, inner, `${name} preparation`, prepared, this.numbered(inner), arena, status);
      const states = inner.inputs.map(({ buffer }) => entry.arguments[positions.indexOf(at(buffer))]!.state!);
      preparation = { program: innerProgram, states, versions: [], made: new Map(), memory: [] };
    }
    const kept = outputs.filter(({ mutates }) => mutates === null);
    const returned = new Set(Object.values(entry.results).flatMap(({ output }) => (output === null ? [] : [kept[output]!.position])));
    return {
      entry, program, positions, outputs: kept, changes, inputs: new Map(), preparation, given: [], returned, hasChecks: program.roles.includes("status"), isChecked: false,
    };
  }

  /** Gives the checks of a plan their numbers: the first of each step. */
  private numbered(plan: Plan): number[] {
    return plan.steps.map((step) => {
      const first = this.checks.length;
      if ("Dispatch" in step) this.checks.push(...step.Dispatch.checks);
      return first;
    });
  }

  // ---- state

  /** Fills states with what their files say. */
  private async loadStates(names: readonly string[]): Promise<void> {
    const { queue } = this.gpu.device;
    const byFile = new Map<string, { memory: StateMemory; start: number; end: number; carried: Uint8Array; at: number }[]>();
    for (const name of names) {
      const memory = this.states.get(name)!;
      const { file, offset } = memory.entry;
      memory.version++;
      if (file === null) {
        this.submit((encoder) => encoder.clearBuffer(memory.buffer.gpu));
        continue;
      }
      const row = { memory, start: offset, end: offset + stateBytes(memory.entry), carried: new Uint8Array(0), at: 0 };
      byFile.set(file, [...(byFile.get(file) ?? []), row]);
    }
    let queued = 0;
    for (const [file, rows] of byFile) {
      const ranges = rows.map(({ start, end }): [number, number] => [start, end]);
      await this.files.read(file, ranges, async (start, chunk) => {
        for (const row of rows) {
          const from = Math.max(start, row.start) - start;
          const to = Math.min(start + chunk.length, row.end) - start;
          if (from >= to) continue;
          let piece: Uint8Array<ArrayBuffer> = chunk.subarray(from, to);
          const isLast = start + to === row.end;
          if (row.carried.length || piece.length % 4) {
            // Whole words only: what is left of one waits for the next chunk, or is filled up at the end.
            const all = row.carried.length + piece.length;
            const joined = new Uint8Array(Math.ceil(all / 4) * 4);
            joined.set(row.carried);
            joined.set(piece, row.carried.length);
            const whole = isLast ? joined.length : all - (all % 4);
            row.carried = joined.slice(whole, all);
            piece = joined.subarray(0, whole);
          }
          if (piece.length) queue.writeBuffer(row.memory.buffer.gpu, row.at, piece);
          row.at += piece.length;
        }
        queued += chunk.length;
        if (queued >= QUEUED) {
          queued = 0;
          await this.gpu.settled();
        }
      });
    }
  }

  /** The names of all states, with what they are. */
  get stateKinds(): Record<string, StateKind> {
    return Object.fromEntries(Object.entries(this.variant.state).map(([name, { kind }]) => [name, kind]));
  }

  private state(name: string): StateMemory {
    this.usable();
    const found = this.states.get(name);
    if (!found) throw new InputError(`there is no state ${name}; there are ${[...this.states.keys()].slice(0, 20)}`);
    return found;
  }

  /** The elements of a state. */
  async readState(name: string): Promise<Elements> {
    const { entry, buffer } = this.state(name);
    return decode(entry.dtype, await this.readBytes(buffer, 0, stateBytes(entry)));
  }

  /** Gives a state other elements; bytes as they are for a dtype that JavaScript has no numbers for. */
  writeState(name: string, data: NumberList): void {
    const { entry } = this.state(name);
    const isBytes = data instanceof Uint8Array && data.length === stateBytes(entry);
    this.putState(name, isBytes ? Uint8Array.from(data) : encode(entry.dtype, data, name));
  }

  private putState(name: string, bytes: Uint8Array): void {
    const memory = this.state(name);
    const wanted = stateBytes(memory.entry);
    if (bytes.length !== wanted) throw new InputError(`${name} has ${wanted} bytes, not ${bytes.length}; its sizes are ${memory.entry.sizes}`);
    const padded = new Uint8Array(Math.ceil(wanted / 4) * 4);
    padded.set(bytes);
    this.gpu.device.queue.writeBuffer(memory.buffer.gpu, 0, padded);
    memory.version++;
  }

  private named(test: (entry: StateEntry) => boolean): string[] {
    return Object.keys(this.variant.state).filter((name) => test(this.variant.state[name]!));
  }

  private async bytesOf(names: readonly string[]): Promise<[string, Uint8Array<ArrayBuffer>][]> {
    return Promise.all(names.map(async (name) => {
      const { entry, buffer } = this.state(name);
      return [name, await this.readBytes(buffer, 0, stateBytes(entry))];
    }));
  }

  /** A safetensors file with states of these kinds; PyTorch's `load_state_dict` takes parameters and buffers. */
  async save(kinds: readonly StateKind[] = ["parameter", "buffer"]): Promise<Uint8Array<ArrayBuffer>> {
    const rows = await this.bytesOf(this.named(({ kind }) => kinds.includes(kind)));
    return writeSafetensors(Object.fromEntries(rows.map(([name, data]) => {
      const { dtype, sizes } = this.variant.state[name]!;
      return [name, { dtype, sizes, data }];
    })));
  }

  /** Takes states from a safetensors file; others stay as they are. Throws before anything is changed. */
  loadState(file: Uint8Array): void {
    const tensors = readSafetensors(file);
    for (const [name, { dtype, sizes }] of Object.entries(tensors)) {
      const { entry } = this.state(name);
      if (SAFETENSORS[entry.dtype] !== dtype || String(sizes) !== String(entry.sizes)) {
        throw new InputError(`${name} is ${dtype} [${sizes}] in the file, and ${entry.dtype} [${entry.sizes}] here; take the file of this model`);
      }
    }
    for (const [name, { data }] of Object.entries(tensors)) this.putState(name, data);
  }

  /** Gives what calls have changed its first values again. */
  async resetState(): Promise<void> {
    this.usable();
    await this.loadStates(this.named(({ changes }) => changes));
  }

  /** Keeps what calls have changed, in the page's memory, for `restore`. */
  async checkpoint(): Promise<void> {
    this.saved = new Map(await this.bytesOf(this.named(({ changes }) => changes)));
  }

  /** Goes on after the device was lost: with another one, and the state of the last checkpoint. */
  restore(): Promise<void> {
    this.restoring ??= (async () => {
      try {
        this.gpu.destroy();
        await this.start();
        for (const [name, data] of this.saved) this.putState(name, data);
      } finally {
        this.restoring = null;
      }
    })();
    return this.restoring;
  }

  private lost(gpu: Gpu, error: DeviceLostError): void {
    if (this.isDestroyed || (this.gpu && gpu !== this.gpu)) return;
    this.options.onLost?.(error);
    // A device of the caller's is not replaced by itself.
    if (this.options.autoRestore && !this.options.device && this.callables.size) this.restore().catch(() => undefined);
  }

  /** Frees everything. */
  destroy(): void {
    this.isDestroyed = true;
    for (const buffers of this.staging.values()) for (const buffer of buffers) buffer.destroy();
    this.gpu.destroy();
  }

  private usable(): void {
    if (this.isDestroyed) throw new InputError("the model was destroyed; load it again");
    this.gpu.check();
  }

  // ---- calls

  /**
   * Calls an entry. It is submitted when this returns; results are waited for where they are read.
   *
   * @param inputs by name.
   * @throws InputError, DeviceLostError, OutOfMemoryError; the signal's reason.
   */
  async run(name: string, inputs: Record<string, Input> = {}, { signal }: { signal?: AbortSignal } = {}): Promise<Record<string, Tensor>> {
    if (this.restoring) await this.restoring;
    signal?.throwIfAborted();
    this.usable();
    const callable = this.callables.get(name);
    if (!callable) throw new InputError(`there is no entry ${name}; there are ${[...this.callables.keys()]}`);
    return this.call(name, callable, inputs);
  }

  private call(name: string, callable: Callable, inputs: Record<string, Input>): Record<string, Tensor> {
    const { entry, program, positions, given } = callable;
    const { shapes, values } = readInputs(name, entry, inputs);
    const sizes = sizesOf(name, entry, shapes);
    const sized = program.at(sizes);
    const { queue } = this.gpu.device;
    const nbytes = sized.plan.nbytes;
    entry.arguments.forEach(({ input, state, seeds }, k) => {
      const position = positions[k]!;
      if (position < 0) return;
      if (state !== null) given[position] = this.states.get(state)!.buffer;
      else if (seeds !== null) given[position] = this.write(callable, "", nbytes[position]!, new Uint8Array(this.random.draw(seeds).buffer));
      else {
        const value = values[input!]!;
        given[position] = value instanceof Tensor
          ? fitting(name, input!, value, nbytes[position]!)
          : this.write(callable, input!, nbytes[position]!, encode(entry.inputs[input!]!.dtype, value, `${name}: ${input}`));
      }
    });
    program.roles.forEach((role, k) => {
      if (role === "output") given[k] = this.pool.take(nbytes[k]!);
    });
    const encoder = this.gpu.device.createCommandEncoder();
    this.prepare(callable, encoder);
    this.counted.dispatches += program.encode(encoder, sized, given);
    this.counted.calls++;
    this.change(callable, encoder);
    const results = this.results(callable, sizes, shapes, values, encoder);
    queue.submit([encoder.finish()]);
    if (callable.hasChecks) {
      this.hasReports = true;
      if (!callable.isChecked) this.lastCheck = 0; // the next read looks at once
      callable.isChecked = true;
    }
    return results;
  }

  /** An input's own buffer with other bytes. */
  private write({ inputs }: Callable, name: string, nbytes: number, data: Uint8Array<ArrayBuffer>): Buffer {
    let buffer = inputs.get(name);
    if (!buffer || buffer.nbytes < nbytes) {
      if (buffer) this.gpu.release(buffer);
      inputs.set(name, (buffer = this.gpu.allocate(nbytes)));
    }
    let whole = data;
    if (data.length % 4) (whole = new Uint8Array(Math.ceil(data.length / 4) * 4)).set(data);
    this.gpu.device.queue.writeBuffer(buffer.gpu, 0, whole);
    this.counted.copiedBytes += data.length;
    return buffer;
  }

  /** Prepares what a plan computes from states alone, if they have changed since. */
  private prepare({ preparation, program, given }: Callable, encoder: GPUCommandEncoder): void {
    if (!preparation) return;
    const { states, made, memory } = preparation;
    const inner = preparation.program;
    const versions = states.map((name) => this.states.get(name)!.version);
    if (versions.some((version, k) => version !== preparation.versions[k])) {
      const sized = inner.at({});
      inner.names.forEach((name, k) => {
        if (inner.roles[k] === "output" && !made.has(name)) made.set(name, this.gpu.allocate(sized.plan.nbytes[k]!));
        memory[k] = made.get(name);
      });
      inner.plan.inputs.forEach(({ buffer }, k) => {
        memory[inner.names.indexOf(buffer!)] = this.states.get(states[k]!)!.buffer;
      });
      this.counted.dispatches += inner.encode(encoder, sized, memory);
      preparation.versions = versions;
    }
    program.roles.forEach((role, k) => {
      if (role === "prepared") given[k] = made.get(program.names[k]!);
    });
  }

  /** Makes what a call computed of states their contents. */
  private change({ changes, given, returned, program }: Callable, encoder: GPUCommandEncoder): void {
    const taken = new Set<number>();
    for (const { position, state, isInPlace } of changes) {
      const memory = this.states.get(state)!;
      memory.version++;
      if (isInPlace) continue;
      const made = given[position]!;
      if (!returned.has(position) && !taken.has(position) && made.nbytes === memory.buffer.nbytes) {
        this.pool.give(memory.buffer); // what was submitted before still reads it, and comes first
        memory.buffer = made;
        taken.add(position);
        continue;
      }
      const size = Math.ceil(stateBytes(memory.entry) / 4) * 4;
      encoder.copyBufferToBuffer(made.gpu, 0, memory.buffer.gpu, 0, size);
      this.counted.copiedBytes += size;
    }
    program.roles.forEach((role, k) => {
      if (role === "output" && !returned.has(k) && !taken.has(k)) this.pool.give(given[k]!);
    });
  }

  private results(
    { entry, outputs, given }: Callable, sizes: Sizes, shapes: Record<string, readonly number[]>,
    values: Record<string, Tensor | NumberList>, encoder: GPUCommandEncoder,
  ): Record<string, Tensor> {
    const at = (exprs: readonly Expr[]): number[] => exprs.map((expr) => evaluate(expr, sizes));
    const results: Record<string, Tensor> = {};
    for (const [name, { tensor, output, input, state }] of Object.entries(entry.results)) {
      if (output !== null) {
        const { position, sizes: shape, strides, offset } = outputs[output]!;
        const layout = { shape: at(shape), strides: at(strides), offset: evaluate(offset, sizes) };
        results[name] = new Tensor(name, tensor.dtype, layout, this, this.pool, given[position]!);
        continue;
      }
      // What stays somewhere else is copied: its owner may change it while the tensor is held.
      const shape = input !== null ? shapes[input]! : this.variant.state[state!]!.sizes;
      const count = shape.reduce((a, b) => a * b, 1);
      const memory = this.pool.take(rounded(count * itemsize(tensor.dtype)));
      const value = input === null ? null : values[input]!;
      if (value !== null && !(value instanceof Tensor)) {
        const whole = new Uint8Array(memory.nbytes);
        whole.set(encode(tensor.dtype, value, name));
        this.gpu.device.queue.writeBuffer(memory.gpu, 0, whole);
      } else {
        const source = value === null ? this.states.get(state!)!.buffer : value.held();
        encoder.copyBufferToBuffer(source.gpu, 0, memory.gpu, 0, Math.min(source.nbytes, memory.nbytes));
      }
      this.counted.copiedBytes += memory.nbytes;
      const strides: number[] = [];
      for (let dim = shape.length - 1, step = 1; dim >= 0; step *= Math.max(1, shape[dim--]!)) strides[dim] = step;
      results[name] = new Tensor(name, tensor.dtype, { shape, strides, offset: 0 }, this, this.pool, memory);
    }
    return results;
  }

  // ---- what is read

  private submit(record: (encoder: GPUCommandEncoder) => void): void {
    const encoder = this.gpu.device.createCommandEncoder();
    record(encoder);
    this.gpu.device.queue.submit([encoder.finish()]);
  }

  /** Waits for all calls so far. Throws what went wrong in them. */
  async check(): Promise<void> {
    this.usable();
    this.lastCheck = 0;
    await this.readBytes(this.status, 0, 4);
  }

  /** For `Tensor`: bytes of a buffer, as they are after all that was submitted so far. */
  async readBytes(buffer: Buffer, start: number, nbytes: number): Promise<Uint8Array<ArrayBuffer>> {
    this.usable();
    const { gpu } = this;
    const first = start - (start % 4);
    const size = Math.ceil((start - first + nbytes) / 4) * 4;
    const now = performance.now();
    // A loop that reads a token at a time copies nothing but tokens: reports can wait a second.
    const withReports = this.hasReports && (!this.lastCheck || now - this.lastCheck > CHECK_INTERVAL);
    const room = 2 ** Math.ceil(Math.log2(size + STATUS_BYTES));
    const free = this.staging.get(room) ?? [];
    this.staging.set(room, free);
    const staging = free.pop() ??
      gpu.device.createBuffer({ size: room, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
    this.submit((encoder) => {
      if (size) encoder.copyBufferToBuffer(buffer.gpu, first, staging, 0, size);
      if (withReports) {
        encoder.copyBufferToBuffer(this.status.gpu, 0, staging, size, STATUS_BYTES);
        encoder.clearBuffer(this.status.gpu);
      }
    });
    if (withReports) {
      this.hasReports = false;
      this.lastCheck = now;
    }
    this.counted.copiedBytes += nbytes + (withReports ? STATUS_BYTES : 0);
    try {
      await staging.mapAsync(GPUMapMode.READ, 0, size + STATUS_BYTES);
    } catch (error) {
      await Promise.resolve();
      gpu.check();
      throw deviceLost((error as Error).message);
    }
    const bytes = new Uint8Array(staging.getMappedRange(0, size + STATUS_BYTES).slice(0));
    staging.unmap();
    free.push(staging);
    gpu.check();
    if (withReports) this.report(new DataView(bytes.buffer, size));
    return bytes.slice(start - first, start - first + nbytes);
  }

  private report(words: DataView): void {
    if (!words.getUint32(0, true)) return;
    const { op, source, dim } = this.checks[words.getUint32(4, true)]!;
    const index = words.getBigInt64(8, true);
    const size = words.getUint32(16, true);
    const where = dim === null ? `a tensor of ${size} elements` : `dimension ${dim} with size ${size}`;
    const at = source ? `; at ${source}` : "";
    throw new IndexOutOfRangeError(`${op}: index ${index} is out of bounds for ${where}; correct the tensor of indices${at}`);
  }
}

// ---- inputs

/** The numbers of a call's inputs by name, and their sizes; null where only the number of elements is known. */
function readInputs(
  name: string, entry: Entry, inputs: Record<string, Input>,
): { shapes: Record<string, readonly number[]>; values: Record<string, Tensor | NumberList> } {
  const unknown = Object.keys(inputs).find((key) => !Object.hasOwn(entry.inputs, key));
  if (unknown !== undefined) throw new InputError(`${name} has no input ${unknown}; it takes ${Object.keys(entry.inputs)}`);
  const shapes: Record<string, readonly number[] | null> = {};
  const values: Record<string, Tensor | NumberList> = {};
  for (const [key, spec] of Object.entries(entry.inputs)) {
    const given = inputs[key];
    if (given === undefined) throw new InputError(`${name} needs the input ${key}: ${spec.dtype}, ${spec.sizes.length} dimensions`);
    [shapes[key], values[key]] = readInput(`${name}: ${key}`, spec, given);
  }
  inferShapes(name, entry, shapes, values);
  return { shapes: shapes as Record<string, readonly number[]>, values };
}

function readInput(what: string, spec: TensorEntry, given: Input): [readonly number[] | null, Tensor | NumberList] {
  if (given instanceof Tensor) {
    if (given.dtype !== spec.dtype) throw new InputError(`${what} is ${given.dtype}, it has to be ${spec.dtype}; read and convert it`);
    return [given.shape, given];
  }
  if (typeof given !== "object") return [[], [given]];
  if ("data" in given) return [given.shape, given.data];
  if (ArrayBuffer.isView(given) || !Array.isArray(given)) return [null, given as NumberList];
  const shape: number[] = [];
  let flat: readonly Nested[] = given;
  shape.push(flat.length);
  while (Array.isArray(flat[0])) {
    const length: number = flat[0].length;
    if (!flat.every((row) => Array.isArray(row) && row.length === length)) {
      throw new InputError(`${what} has rows of several lengths; pad them`);
    }
    shape.push(length);
    flat = (flat as (readonly Nested[])[]).flat();
  }
  // A list of numbers for something with other dimensions is its elements in rows.
  return [shape.length === 1 && spec.sizes.length !== 1 ? null : shape, flat as NumberList];
}

/** Sizes of inputs of which only the number of elements is known: at most one of their sizes is still free. */
function inferShapes(
  name: string, entry: Entry, shapes: Record<string, readonly number[] | null>, values: Record<string, Tensor | NumberList>,
): void {
  const known: Record<string, number> = {};
  for (const [symbol, { input, dim }] of Object.entries(entry.sizes)) {
    const size = shapes[input]?.[dim];
    if (size !== undefined) known[symbol] = size;
  }
  for (const [key, spec] of Object.entries(entry.inputs)) {
    if (shapes[key]) continue;
    const count = (values[key] as NumberList).length;
    const free = Object.keys(entry.sizes).filter((symbol) => !(symbol in known) && entry.sizes[symbol]!.input === key);
    const sizes = { ...Object.fromEntries(free.map((symbol) => [symbol, 1])), ...known };
    const rest = spec.sizes.reduce<number>((product, size) => product * evaluate(size, sizes), 1);
    if (free.length > 1) throw new InputError(`${name}: ${key} needs its sizes: give {data, shape}, or lists in lists`);
    if (free.length) known[free[0]!] = sizes[free[0]!] = rest ? Math.floor(count / rest) : 0;
    shapes[key] = spec.sizes.map((size) => evaluate(size, sizes));
  }
}

/** The size symbols' values. Throws `InputError` where the inputs' sizes do not fit the entry, or each other. */
function sizesOf(name: string, entry: Entry, shapes: Record<string, readonly number[]>): Sizes {
  const sizes: Record<string, number> = {};
  for (const [symbol, { name: label, low, high, input, dim }] of Object.entries(entry.sizes)) {
    const size = shapes[input]![dim];
    if (size === undefined || size < low || size > high) {
      throw new InputError(`${name}: ${label} is ${size} (dimension ${dim} of ${input}), it has to be ${low} to ${high}`);
    }
    sizes[symbol] = size;
  }
  for (const [key, spec] of Object.entries(entry.inputs)) {
    const wanted = spec.sizes.map((size) => evaluate(size, sizes));
    const given = shapes[key]!;
    const isScalar = given.length === 0 && wanted.every((size) => size === 1);
    if (!isScalar && String(given) !== String(wanted)) {
      throw new InputError(`${name}: ${key} has the sizes [${given}], it has to have [${wanted}]`);
    }
  }
  return sizes;
}

/** The memory of a tensor that is an input. */
function fitting(name: string, input: string, value: Tensor, nbytes: number): Buffer {
  const memory = value.held();
  if (!value.isContiguous || memory.nbytes < nbytes) {
    throw new InputError(`${name}: ${input} is a part of another tensor; read it and give its elements`);
  }
  return memory;
}
