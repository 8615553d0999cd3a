/** `Program`: a plan on a device. What a call does over and over is made once and kept in arrays. */

import { BundleError } from "./errors.js";
import type { Sizes } from "./expressions.js";
import type { Buffer, Gpu } from "./gpu.js";
import { type Plan, type Role } from "./plan.js";
import { type SizedDispatch, type SizedPlan, sizePlan } from "./sized.js";

const MOST_SIZES = 16;
const MOST_BOUND = 32;

/** A pipeline for each distinct kernel of a bundle. */
export class Pipelines {
  private readonly layouts = new Map<string, GPUBindGroupLayout>();
  private readonly modules = new Map<number, GPUShaderModule>();
  private readonly made = new Map<string, Promise<Pipeline>>();

  constructor(
    private readonly gpu: Gpu, private readonly wgsl: readonly string[], private readonly onPipeline: () => void,
  ) {}

  get count(): number {
    return this.made.size;
  }

  /** Those of a plan's kernels, in order; all compile at the same time. */
  of(plan: Plan): Promise<Pipeline[]> {
    return Promise.all(plan.kernels.map(({ name, wgsl, bindings, parameter_count: parameters }) => {
      const signature = bindings.map(({ writable }) => (writable ? "w" : "r")).join("") + (parameters ? "u" : "");
      const key = `${wgsl} ${signature}`;
      let pipeline = this.made.get(key);
      if (!pipeline) {
        pipeline = this.compile(name, wgsl, signature);
        pipeline.catch(() => undefined); // whoever awaits them all gets it
        this.made.set(key, pipeline);
      }
      return pipeline;
    }));
  }

  private async compile(name: string, number: number, signature: string): Promise<Pipeline> {
    const { device } = this.gpu;
    let layout = this.layouts.get(signature);
    if (!layout) {
      const types: Record<string, GPUBufferBindingType> = { r: "read-only-storage", w: "storage", u: "uniform" };
      layout = device.createBindGroupLayout({
        entries: [...signature].map((letter, binding) => ({
          binding, visibility: GPUShaderStage.COMPUTE, buffer: { type: types[letter]! },
        })),
      });
      this.layouts.set(signature, layout);
    }
    let module = this.modules.get(number);
    if (!module) this.modules.set(number, (module = device.createShaderModule({ code: this.wgsl[number]!, label: name })));
    try {
      const pipeline = await device.createComputePipelineAsync({
        label: name, layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }), compute: { module, entryPoint: "main" },
      });
      this.onPipeline();
      return { pipeline, layout };
    } catch (error) {
      this.gpu.check();
      throw new BundleError(`kernel ${name} was refused: ${(error as Error).message}; export the model again`);
    }
  }
}

interface Pipeline { pipeline: GPUComputePipeline; layout: GPUBindGroupLayout }

/** Buffers that hold nothing between calls: every program of a model uses the same. */
export class Arena {
  /** Changes whenever a buffer does. */
  generation = 0;
  private readonly buffers = new Map<string, Buffer>();

  constructor(private readonly gpu: Gpu) {}

  /** The buffer of a slot, with room for so many bytes. */
  get(slot: string, nbytes: number): Buffer {
    const old = this.buffers.get(slot);
    if (old && old.nbytes >= nbytes) return old;
    if (old) this.gpu.release(old);
    const made = this.gpu.allocate(nbytes);
    this.buffers.set(slot, made);
    this.generation++;
    return made;
  }
}

/** A plan at some sizes, with its parameters on the GPU. */
export interface Sized {
  plan: SizedPlan;
  uniform: Buffer;
  /** Bytes that it needs of each slot of the arena. */
  slots: Map<string, number>;
  /** The arena's generation when it had them. */
  generation: number;
  bound: Map<string, Bound>;
}

/** Commands: runs of dispatches in a compute pass of their own, and copies between them. */
interface Bound { parts: (DispatchRun | { source: Buffer; destination: Buffer; nbytes: number })[]; dispatches: number }
interface DispatchRun { pipelines: GPUComputePipeline[]; groups: GPUBindGroup[]; grids: number[] }

export class Program {
  readonly names: readonly string[];
  readonly roles: readonly Role[];
  private readonly constants = new Map<number, Buffer>();
  private readonly sized = new Map<string, Sized>();
  private readonly outer: number[];
  private readonly slots: (string | null)[];
  private readonly groups: Map<string, GPUBindGroup>[];

  /**
   * @param pipelines of the plan's kernels.
   * @param firstChecks the number of the first check of each step.
   * @param status the buffer in which kernels report.
   */
  constructor(
    private readonly gpu: Gpu,
    readonly plan: Plan,
    label: string,
    private readonly pipelines: readonly Pipeline[],
    private readonly firstChecks: readonly number[],
    private readonly arena: Arena,
    private readonly status: Buffer,
  ) {
    this.names = Object.keys(plan.buffers);
    this.roles = this.names.map((name) => plan.buffers[name]!.role);
    this.outer = this.names.flatMap((_, k) => (["input", "output", "prepared"].includes(this.roles[k]!) ? [k] : []));
    this.slots = this.names.map((name, k) => {
      if (this.roles[k] !== "intermediate") return null;
      const { slot } = plan.buffers[name]!;
      return slot === null ? `${label} ${k}` : `slot ${slot}`;
    });
    this.groups = plan.steps.map(() => new Map());
    this.names.forEach((name, k) => {
      if (this.roles[k] !== "constant") return;
      const data = Uint8Array.from(atob(plan.constants[name]!), (letter) => letter.charCodeAt(0));
      const buffer = gpu.allocate(data.length);
      const padded = new Uint8Array(buffer.nbytes);
      padded.set(data);
      gpu.device.queue.writeBuffer(buffer.gpu, 0, padded);
      this.constants.set(k, buffer);
    });
  }

  /** The plan at these sizes; those of the last few calls are kept. */
  at(sizes: Sizes): Sized {
    const key = Object.values(sizes).join();
    let found = this.sized.get(key);
    if (found) {
      if (this.sized.size > 1) {
        this.sized.delete(key);
        this.sized.set(key, found);
      }
      return found;
    }
    const plan = sizePlan(this.plan, sizes, this.firstChecks, this.gpu.device.limits);
    const uniform = this.gpu.allocate(plan.uniform.length, GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST);
    this.gpu.device.queue.writeBuffer(uniform.gpu, 0, plan.uniform);
    const slots = new Map<string, number>();
    this.slots.forEach((slot, k) => {
      if (slot !== null) slots.set(slot, Math.max(slots.get(slot) ?? 0, plan.nbytes[k]!));
    });
    found = { plan, uniform, slots, generation: -1, bound: new Map() };
    this.sized.set(key, found);
    if (this.sized.size > MOST_SIZES) {
      const [oldest, { uniform: unused }] = this.sized.entries().next().value!;
      this.sized.delete(oldest);
      this.gpu.release(unused);
      for (const groups of this.groups) groups.clear();
    }
    return found;
  }

  /** Adds the plan's commands; `given` are the buffers of inputs, outputs and what is prepared, by position. */
  encode(encoder: GPUCommandEncoder, sized: Sized, given: readonly (Buffer | undefined)[]): number {
    const bound = this.bind(sized, given);
    for (const part of bound.parts) {
      if ("nbytes" in part) {
        encoder.copyBufferToBuffer(part.source.gpu, 0, part.destination.gpu, 0, part.nbytes);
        continue;
      }
      const pass = encoder.beginComputePass();
      const { pipelines, groups, grids } = part;
      let last: GPUComputePipeline | undefined;
      for (let k = 0, at = 0; k < pipelines.length; k++, at += 3) {
        const pipeline = pipelines[k]!;
        if (pipeline !== last) pass.setPipeline((last = pipeline));
        pass.setBindGroup(0, groups[k]!);
        pass.dispatchWorkgroups(grids[at]!, grids[at + 1], grids[at + 2]);
      }
      pass.end();
    }
    return bound.dispatches;
  }

  private bind(sized: Sized, given: readonly (Buffer | undefined)[]): Bound {
    if (sized.generation !== this.arena.generation) {
      for (const [slot, nbytes] of sized.slots) this.arena.get(slot, nbytes);
      sized.generation = this.arena.generation;
      sized.bound.clear();
    }
    let key = "";
    for (const k of this.outer) key += `,${given[k]!.id}`;
    let bound = sized.bound.get(key);
    if (!bound) {
      const buffers = this.names.map((_, k) =>
        this.roles[k] === "status" ? this.status : (this.own(k, sized) ?? this.constants.get(k) ?? given[k]!));
      bound = this.build(sized, buffers);
      sized.bound.set(key, bound);
      if (sized.bound.size > MOST_BOUND) sized.bound.delete(sized.bound.keys().next().value!);
    }
    return bound;
  }

  private own(position: number, { slots }: Sized): Buffer | undefined {
    const slot = this.slots[position] ?? null;
    return slot === null ? undefined : this.arena.get(slot, slots.get(slot)!);
  }

  private build({ plan, uniform }: Sized, buffers: readonly Buffer[]): Bound {
    const bound: Bound = { parts: [], dispatches: 0 };
    let run: DispatchRun | undefined;
    plan.steps.forEach((step, number) => {
      if (!("kernel" in step)) {
        bound.parts.push({ source: buffers[step.source]!, destination: buffers[step.destination]!, nbytes: step.nbytes });
        run = undefined;
        return;
      }
      if (!run) bound.parts.push((run = { pipelines: [], groups: [], grids: [] }));
      run.pipelines.push(this.pipelines[step.kernel]!.pipeline);
      run.groups.push(this.group(number, step, uniform, buffers));
      run.grids.push(...step.grid);
      bound.dispatches++;
    });
    return bound;
  }

  private group(number: number, step: SizedDispatch, uniform: Buffer, buffers: readonly Buffer[]): GPUBindGroup {
    let key = String(uniform.id);
    for (const [position] of step.bindings) key += `,${buffers[position]!.id}`;
    const groups = this.groups[number]!;
    let group = groups.get(key);
    if (!group) {
      const entries: GPUBindGroupEntry[] = step.bindings.map(([position, offset, size], binding) => ({
        binding, resource: { buffer: buffers[position]!.gpu, offset, size },
      }));
      if (step.parameters >= 0) {
        const resource = { buffer: uniform.gpu, offset: step.parameters, size: step.parametersSize };
        entries.push({ binding: entries.length, resource });
      }
      group = this.gpu.device.createBindGroup({ layout: this.pipelines[step.kernel]!.layout, entries });
      groups.set(key, group);
      if (groups.size > 4 * MOST_BOUND) groups.delete(groups.keys().next().value!);
    }
    return group;
  }
}
