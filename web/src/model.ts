/** `load` and `Model`: a bundle, ready to be called. */

import { list, text } from "./checks.js";
import type { ComposedProgram, Host } from "./composed.js";
import type { Composed } from "./composed-plan.js";
import { type ElementsOf, type NumberList, safetensorsName, decode, encode, itemsize } from "./dtypes.js";
import { BundleError, DeviceLostError, InputError } from "./errors.js";
import { type Fetch, Files, fetched } from "./files.js";
import { type Buffer, type DeviceOptions, Gpu, rounded } from "./gpu.js";
import { type Given, type Input, readInputs } from "./inputs.js";
import { folderOf, keeping, openCache, place } from "./kept.js";
import { numel, rows } from "./layout.js";
import { type Entry, type Manifest, type StateKind, type Variant, checkManifest, stateBytes } from "./manifest.js";
import { type Plan, checkPlan } from "./plan.js";
import { Arena, type Pipeline, Pipelines, Program, type Sized } from "./program.js";
import { Random } from "./random.js";
import { Readback } from "./readback.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import * as shared from "./shared.js";
import type { BundleTypes, CallArguments, EntryName, Inputs, Results, RunOptions, StateName } from "./signatures.js";
import { sizePlan } from "./sized.js";
import { type State, States } from "./states.js";
import { Pool, Tensor } from "./tensor.js";

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

/** What a model has done. `copiedBytes` are those of inputs written, results read, and copies between buffers. */
export interface Statistics { calls: number; dispatches: number; copiedBytes: number; gpuBytes: number }

/** An entry, ready to be called. */
interface Callable {
  entry: Entry;
  program: Program;
  /** Of each argument of the plan: the position of its buffer; -1 where the plan reads none. */
  positions: number[];
  /** Of each output of the plan: the position of its buffer. */
  made: number[];
  /** The outputs that are returned: their numbers. */
  returned: number[];
  /** Outputs that are new values of states. */
  changes: { position: number; state: string; isInPlace: boolean }[];
  /** Positions of the outputs that results are in. */
  held: ReadonlySet<number>;
  /** Buffers for what calls give, by position. */
  inputs: Map<number, Buffer>;
  preparation: Preparation | null;
  /** Buffers by position, filled by each call. */
  given: (Buffer | undefined)[];
  hasChecks: boolean;
  isChecked: boolean;
}

/** What a plan computes from states and constants alone; `versions` are those of the states when it did, if it has. */
interface Preparation { program: Program; states: string[]; versions: number[] | null; given: (Buffer | undefined)[] }

/**
 * Loads a bundle.
 *
 * @param url of its folder, relative to the page.
 * @typeParam B the type that `export` wrote to the bundle's `bundle.d.ts`: names of entries, inputs, results and states are checked.
 * @throws WebGPUUnavailableError, BundleError, OutOfMemoryError; the signal's reason.
 */
export async function load<B extends BundleTypes = BundleTypes>(url: string | URL, options: LoadOptions = {}): Promise<Model<B>> {
  const base = folderOf(url);
  const address = new URL("manifest.json", base);
  const fetcher: Fetch = options.fetch ?? ((input, init) => fetch(input, init));
  const cache = await openCache(options.cache);
  const response = await fetched(fetcher, address, { cache: "no-cache", signal: options.signal ?? null }).catch(async (error) => {
    // Without a network, the bundle is what it was. What else `fetch` rejects with is the signal's reason.
    const kept = error instanceof TypeError && (await cache?.match(place(base.href)));
    if (kept) return kept;
    throw error;
  });
  const copy = response.clone();
  const data: unknown = await response.json().catch((error: Error) => {
    throw new BundleError(`${address.href} is no JSON (${error.message}); check the address`);
  });
  const model = new Model<B>(checkManifest(data), base, fetcher, options);
  await keeping(cache, base, copy, () => model.start(options.device, options.signal));
  return model;
}

/** A loaded bundle. `load` makes it. */
export class Model<B extends BundleTypes = BundleTypes> {
  /** The variant that runs. */
  variant!: Variant;
  private draws: Random;
  private gpu!: Gpu;
  private pool!: Pool;
  private states!: States;
  private readback!: Readback;
  private files!: Files;
  private callables = new Map<string, Callable | ComposedProgram>();
  private saved = new Map<string, Uint8Array<ArrayBuffer>>();
  private restoring: Promise<void> | null = null;
  /** The end of a call that waits between what it runs: others come after it. */
  private composing: Promise<void> | null = null;
  private isDestroyed = false;
  private counted = { calls: 0, dispatches: 0, copiedBytes: 0 };

  /** @internal For `load`. */
  constructor(
    readonly manifest: Manifest, private readonly base: URL, private readonly fetcher: Fetch, private readonly options: LoadOptions,
  ) {
    this.draws = new Random(options.seed);
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
    const { calls, dispatches, copiedBytes } = this.counted;
    return { calls, dispatches, copiedBytes: copiedBytes + this.readback.copiedBytes, gpuBytes: this.gpu.allocated };
  }

  /** Of random numbers. Setting it starts them again. */
  get seed(): bigint {
    return this.draws.seed;
  }

  set seed(seed: bigint | number) {
    this.draws = new Random(seed);
  }

  /** @internal For `load`: opens a device, and puts everything on it. */
  async start(device: GPUDevice | undefined, signal: AbortSignal | undefined): Promise<void> {
    const wanted = this.variant?.name ?? this.options.variant;
    const [gpu, variant] = await Gpu.open(
      this.manifest.variants, { ...this.options, device, variant: wanted }, (error) => this.lost(gpu, error));
    try {
      await until(this.install(gpu, variant, signal), signal);
    } catch (error) {
      gpu.destroy();
      throw error;
    }
  }

  private async install(gpu: Gpu, variant: Variant, signal: AbortSignal | undefined): Promise<void> {
    const { progress, cache } = this.options;
    const state: Progress = { loadedBytes: 0, totalBytes: bytesToLoad(this.manifest, variant), pipelines: 0, totalPipelines: 0 };
    const tell = (change: () => void): void => {
      change();
      progress?.({ ...state });
    };
    const files = new Files(
      this.manifest, this.base, this.fetcher, await openCache(cache), (count) => tell(() => (state.loadedBytes += count)), signal);
    // All that is untrusted is checked before anything is made of it.
    const wgsl = list(text)(await files.parsed(variant.kernels), variant.kernels);
    const plans = await Promise.all(Object.entries(variant.entries).map(async ([name, entry]): Promise<[string, Entry, Plan | Composed]> => {
      const data = await files.parsed(entry.plan);
      if ((data as Partial<Composed> | null)?.plans) {
        return [name, entry, (await composer()).checkComposed(data, entry.plan, entry, variant, wgsl.length)];
      }
      const plan = checkPlan(data, entry.plan, entry, variant, wgsl.length);
      for (const part of [plan, plan.preparation]) {
        if (part && (part !== plan || !Object.keys(entry.sizes).length)) sizePlan(part, {}, part.steps.map(() => 0), gpu.device.limits);
      }
      return [name, entry, plan];
    }));
    const pool = new Pool(gpu);
    const readback = new Readback(gpu);
    const states = new States(gpu, variant.state);
    await gpu.settled(); // before anything is downloaded for memory that is not there
    const pipelines = new Pipelines(gpu, wgsl, () => tell(() => state.pipelines++));
    const arena = new Arena(gpu);
    const made = (label: string, part: Plan, kernels: Pipeline[]): Program =>
      new Program(gpu, part, label, kernels, readback.numbered(part), arena, readback.status);
    const composed = plans.some(([, , plan]) => "plans" in plan) ? await composer() : null;
    const host: Host = {
      gpu, pool, states, readback, reader: this, counted: this.counted, draw: (count) => this.drawn(count),
      fitting: (what, value, nbytes) => this.fitting(what, value, nbytes),
    };
    const compiled = Promise.all(plans.map(async ([name, entry, plan]): Promise<[string, Callable | ComposedProgram]> => {
      if ("plans" in plan) {
        return [name, await composed!.ComposedProgram.create(
          name, entry, variant.state, plan, host, async (part, label) => made(label, part, await pipelines.of(part)))];
      }
      const { preparation } = plan;
      const [own, prepared] = await Promise.all([pipelines.of(plan), preparation && pipelines.of(preparation)]);
      return [name, callable(entry, made(name, plan, own), preparation && made(`${name} preparation`, preparation, prepared!))];
    }));
    compiled.catch(() => undefined); // awaited below, after the weights
    state.totalPipelines = pipelines.count;
    await states.loadAll(Object.keys(variant.state), files);
    const callables = new Map(await compiled);
    await gpu.settled();
    signal?.throwIfAborted();
    files.signal = undefined;
    Object.assign(this, { gpu, variant, pool, readback, states, files, callables });
  }

  // ---- state

  /** The names of all states, with what they are. */
  get stateKinds(): Record<string, StateKind> {
    return Object.fromEntries(Object.entries(this.variant.state).map(([name, { kind }]) => [name, kind]));
  }

  private state(name: string): State {
    this.usable();
    return this.states.get(name);
  }

  /** The elements of a state. */
  async readState<N extends StateName<B>>(name: N): Promise<ElementsOf<B["states"][N]>> {
    const { entry, buffer } = this.state(name);
    return decode(entry.dtype, await this.readBytes(buffer, 0, stateBytes(entry))) as ElementsOf<B["states"][N]>;
  }

  /** Gives a state other elements; bytes as they are for a dtype that JavaScript has no numbers for. */
  writeState(name: StateName<B>, data: NumberList): void {
    const { entry } = this.state(name);
    const isBytes = data instanceof Uint8Array && data.length === stateBytes(entry);
    this.states.put(name, isBytes ? data : encode(entry.dtype, data, name));
  }

  /** Bytes of states as they are between two calls. */
  private bytesOf(names: readonly string[]): Promise<[string, Uint8Array<ArrayBuffer>][]> {
    return Promise.all(names.map(async (name) => {
      const { entry, buffer } = this.state(name);
      return [name, await this.readBytes(buffer, 0, stateBytes(entry))];
    }));
  }

  /** A safetensors file with states of these kinds; PyTorch's `load_state_dict` takes parameters and buffers. */
  async save(kinds: readonly StateKind[] = ["parameter", "buffer"]): Promise<Uint8Array<ArrayBuffer>> {
    const found = await this.bytesOf(this.states.names(({ entry }) => kinds.includes(entry.kind)));
    return writeSafetensors(Object.fromEntries(found.map(([name, data]) => {
      const { dtype, sizes } = this.variant.state[name]!;
      return [name, { dtype, sizes, data }];
    })));
  }

  /** Takes states from a safetensors file; others stay as they are. Throws before anything is changed. */
  loadState(file: Uint8Array): void {
    const tensors = readSafetensors(file);
    for (const [name, { dtype, sizes, data }] of Object.entries(tensors)) {
      const { entry } = this.state(name);
      if (safetensorsName(entry.dtype) !== dtype || String(sizes) !== String(entry.sizes) || data.length !== stateBytes(entry)) {
        throw new InputError(`${name} is ${dtype} [${sizes}] in the file, not ${entry.dtype} [${entry.sizes}]; take another one`);
      }
    }
    for (const [name, { data }] of Object.entries(tensors)) this.states.put(name, data);
  }

  /** Gives what was changed, by calls or by the page, its first values again. */
  async resetState(): Promise<void> {
    this.usable();
    await this.states.loadAll(this.states.changed(), this.files);
  }

  /** Keeps what was changed, by calls or by the page, in the page's memory, for `restore`. */
  async checkpoint(): Promise<void> {
    this.usable();
    this.saved = new Map(await this.bytesOf(this.states.changed()));
  }

  /**
   * Goes on after the device was lost, or failed: with another one, and the state of the last checkpoint.
   *
   * @param device to use, instead of one of its own.
   */
  restore({ device, signal }: { device?: GPUDevice; signal?: AbortSignal } = {}): Promise<void> {
    this.alive();
    this.restoring ??= (async () => {
      try {
        this.gpu.destroy();
        await this.start(device, signal);
        if (this.isDestroyed) return this.gpu.destroy();
        for (const [name, data] of this.saved) this.states.put(name, data);
      } finally {
        this.restoring = null;
      }
    })();
    return this.restoring;
  }

  private lost(gpu: Gpu, error: DeviceLostError): void {
    if (gpu !== this.gpu) return;
    this.options.onLost?.(error);
    // A device of the caller's is not replaced by itself.
    if (this.options.autoRestore && !this.options.device) this.restore().catch(() => undefined); // calls say why
  }

  /** Frees everything. */
  destroy(): void {
    this.isDestroyed = true;
    this.gpu.destroy();
  }

  private alive(): void {
    if (this.isDestroyed) throw new InputError("the model was destroyed; load it again");
  }

  private usable(): void {
    this.alive();
    this.gpu.check();
  }

  // ---- calls

  /**
   * Calls an entry. It is submitted when this returns; results are waited for where they are read.
   *
   * @param inputs by name.
   * @throws InputError, DeviceLostError, OutOfMemoryError; the signal's reason.
   */
  run<N extends EntryName<B>>(name: N, ...call: CallArguments<Inputs<B, N>>): Promise<Results<B, N>>;
  async run(name: string, inputs: Record<string, Input> = {}, { signal }: RunOptions = {}): Promise<Record<string, Tensor>> {
    while (this.restoring ?? this.composing) await (this.restoring ?? this.composing);
    signal?.throwIfAborted();
    this.usable();
    const callable = this.callables.get(name);
    if (!callable) throw new InputError(`there is no entry ${name}; there are ${[...this.callables.keys()]}`);
    if (!("call" in callable)) return this.call(name, callable, inputs);
    const results = callable.call(inputs, signal);
    const end = (): void => void (this.composing = null);
    this.composing = results.then(end, end);
    return results;
  }

  private call(name: string, callable: Callable, inputs: Record<string, Input>): Record<string, Tensor> {
    const { entry, program, positions, given, preparation } = callable;
    const call = readInputs(name, entry, inputs);
    const sized = program.sizedAt(call.sizes);
    const { nbytes } = sized.plan;
    entry.arguments.forEach(({ input, state, seeds }, k) => {
      const position = positions[k]!;
      if (position < 0) return;
      const value = input === null ? null : call.values[input]!;
      if (state !== null) given[position] = this.states.get(state).buffer;
      else if (value instanceof Tensor) given[position] = this.fitting(`${name}: ${input}`, value, nbytes[position]!);
      else given[position] = this.write(callable, position, nbytes[position]!, value ?? this.drawn(seeds!));
    });
    const inner = preparation?.program;
    const innerSized = inner?.sizedAt({});
    // Twice, as the second may replace what the first has.
    for (let k = 0; k < 2; k++) {
      inner?.reserve(innerSized!);
      program.reserve(sized);
    }
    program.roles.forEach((role, k) => {
      if (role === "output") given[k] = this.pool.lend(nbytes[k]!);
    });
    let results!: Record<string, Tensor>;
    this.gpu.submit((encoder) => {
      if (preparation) this.prepare(callable, preparation, innerSized!, encoder);
      program.encode(encoder, sized, given);
      this.change(callable, encoder);
      results = this.results(callable, sized, call, encoder);
    });
    this.counted.calls++;
    this.counted.dispatches += sized.plan.steps.length;
    this.pool.count();
    if (callable.hasChecks) {
      this.readback.expect(!callable.isChecked);
      callable.isChecked = true;
    }
    return results;
  }

  /** Bytes of new seeds. */
  private drawn(count: number): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.draws.draw(count).buffer);
  }

  /** The memory of a tensor that is an input. */
  private fitting(what: string, value: Tensor, nbytes: number): Buffer {
    const memory = value.held();
    if (memory.device !== this.gpu.device) throw new InputError(`${what} is on another device; read it there`);
    if (!value.isContiguous || memory.nbytes < nbytes) {
      throw new InputError(`${what} is a part of a tensor; read it`);
    }
    return memory;
  }

  /** The buffer of an input that is not on the GPU, with these bytes. */
  private write({ inputs }: Callable, position: number, nbytes: number, data: Uint8Array<ArrayBuffer>): Buffer {
    let buffer = inputs.get(position);
    if (!buffer || buffer.nbytes < nbytes) {
      if (buffer) this.gpu.release(buffer);
      inputs.set(position, (buffer = this.gpu.allocate(nbytes)));
    }
    this.upload(buffer, data);
    return buffer;
  }

  private upload(buffer: Buffer, data: Uint8Array): void {
    this.gpu.upload(buffer, data);
    this.counted.copiedBytes += data.length;
  }

  private copy(encoder: GPUCommandEncoder, source: Buffer, { gpu, nbytes }: Buffer): void {
    const size = Math.min(source.nbytes, nbytes);
    encoder.copyBufferToBuffer(source.gpu, 0, gpu, 0, size);
    this.counted.copiedBytes += size;
  }

  /** Prepares what a plan computes from states alone, if they have changed since. */
  private prepare({ program, given }: Callable, preparation: Preparation, sized: Sized, encoder: GPUCommandEncoder): void {
    const { states, program: inner, given: memory, versions } = preparation;
    const found = states.map((name) => this.states.get(name));
    if (!versions || found.some(({ version }, k) => version !== versions[k])) {
      inner.roles.forEach((role, k) => {
        if (role === "output") memory[k] ??= this.gpu.allocate(sized.plan.nbytes[k]!);
      });
      inner.plan.inputs.forEach(({ buffer }, k) => (memory[inner.names.indexOf(buffer!)] = found[k]!.buffer));
      inner.encode(encoder, sized, memory);
      this.counted.dispatches += sized.plan.steps.length;
      preparation.versions = found.map(({ version }) => version);
    }
    program.roles.forEach((role, k) => {
      if (role === "prepared") given[k] = memory[inner.names.indexOf(program.names[k]!)];
    });
  }

  /** Makes what a call computed of states their contents. */
  private change({ changes, given, held, program }: Callable, encoder: GPUCommandEncoder): void {
    const taken = new Set<number>();
    for (const { position, state, isInPlace } of changes) {
      const memory = this.states.get(state);
      memory.version++;
      if (isInPlace) continue;
      const made = given[position]!;
      if (!held.has(position) && !taken.has(position) && made.nbytes === memory.buffer.nbytes) {
        this.pool.give(memory.buffer); // what was submitted before still reads it, and comes first
        memory.buffer = made;
        taken.add(position);
        continue;
      }
      this.copy(encoder, made, memory.buffer);
    }
    program.roles.forEach((role, k) => {
      if (role === "output" && !held.has(k) && !taken.has(k)) this.pool.give(given[k]!);
    });
  }

  private results(
    { entry, made, returned, given }: Callable, { plan }: Sized, { shapes, values }: Given, encoder: GPUCommandEncoder,
  ): Record<string, Tensor> {
    const results: Record<string, Tensor> = {};
    for (const [name, { tensor, output, input, state }] of Object.entries(entry.results)) {
      if (output !== null) {
        const k = returned[output]!;
        results[name] = new Tensor(name, tensor.dtype, plan.layouts[k]!, this, this.pool, given[made[k]!]!);
        continue;
      }
      // What stays somewhere else is copied: its owner may change it while the tensor is held.
      const shape = input !== null ? shapes[input]! : this.variant.state[state!]!.sizes;
      const memory = this.pool.lend(rounded(numel(shape) * itemsize(tensor.dtype)));
      const value = input === null ? this.states.get(state!).buffer : values[input]!;
      if (value instanceof Uint8Array) this.upload(memory, value);
      else this.copy(encoder, value instanceof Tensor ? value.held() : value, memory);
      results[name] = new Tensor(name, tensor.dtype, rows(shape), this, this.pool, memory);
    }
    return results;
  }

  // ---- what is read

  /** Waits for all calls so far. Throws what went wrong in them. */
  async check(): Promise<void> {
    this.usable();
    this.readback.urge();
    await this.readBytes(this.readback.status, 0, 0);
  }

  /** @internal For `Tensor`: bytes of a buffer, as they are after all that was submitted so far. */
  async readBytes(buffer: Buffer, start: number, nbytes: number): Promise<Uint8Array<ArrayBuffer>> {
    this.usable();
    return this.readback.read(buffer, start, nbytes);
  }
}

/** What runs composed plans: a module of its own, to which this one lends what both need. */
async function composer(): Promise<typeof import("./composed.js")> {
  try {
    const { default: made } = await import("./composed.js") as unknown as { default: (own: typeof shared) => typeof import("./composed.js") };
    return made(shared);
  } catch (error) {
    throw new BundleError(`loops, branches and sizes from data need torch-webgpu-composed.js beside the runtime (${(error as Error).message}); copy it there`);
  }
}

/** Bytes of all files of a variant. */
function bytesToLoad({ files }: Manifest, { kernels, entries, state }: Variant): number {
  const paths = new Set([kernels, ...Object.values(entries).map(({ plan }) => plan), ...Object.values(state).flatMap(({ file }) => file ?? [])]);
  return [...paths].reduce((sum, path) => sum + files[path]!.nbytes, 0);
}

function callable(entry: Entry, program: Program, prepares: Program | null): Callable {
  const { inputs, outputs } = program.plan;
  const at = (name: string | null): number => program.names.indexOf(name ?? "");
  const positions = inputs.map(({ buffer }) => (buffer === null ? -1 : at(buffer)));
  const made = outputs.map(({ buffer }) => at(buffer));
  const returned = [...outputs.keys()].filter((k) => outputs[k]!.mutates === null);
  const changes = outputs.flatMap(({ mutates }, k) => mutates === null ? [] : {
    position: made[k]!, state: entry.arguments[mutates]!.state!, isInPlace: made[k] === positions[mutates],
  });
  const held = new Set(Object.values(entry.results).flatMap(({ output }) => (output === null ? [] : made[returned[output]!]!)));
  const preparation = prepares && {
    program: prepares, versions: null, given: [],
    states: prepares.plan.inputs.map(({ buffer }) => entry.arguments[positions.indexOf(at(buffer))]!.state!),
  };
  const hasChecks = program.roles.includes("status");
  return { entry, program, positions, made, returned, changes, held, inputs: new Map(), preparation, given: [], hasChecks, isChecked: false };
}

/** What a promise gives, unless the signal is first. */
function until<T>(promise: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  return Promise.race([promise, new Promise<never>((_, reject) => {
    signal?.throwIfAborted();
    signal?.addEventListener("abort", () => reject(signal.reason as Error));
  })]);
}
