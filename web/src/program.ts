/** `Program`: a plan on a device. What a call does over and over is made once and kept in arrays. */

import { refuse } from "./checks.js";
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
        pipeline = this.compileOne(name, wgsl, signature);
        pipeline.catch(() => undefined); // whoever awaits them all gets it
        this.made.set(key, pipeline);
      }
      return pipeline;
    }));
  }

  private async compileOne(name: string, number: number, signature: string): Promise<Pipeline> {
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
      return refuse(`kernel ${name}`, `was refused: ${(error as Error).message}`);
    }
  }
}

export interface Pipeline { pipeline: GPUComputePipeline; layout: GPUBindGroupLayout }

/** Buffers that hold nothing between calls, by slot: every program of a model uses the same. */
export class Arena {
  /** Changes whenever a buffer does. */
  generation = 0;
  readonly slots = new Map<string, Buffer>();

  constructor(private readonly gpu: Gpu) {}

  /** Gives a slot room for so many bytes. */
  reserve(slot: string, nbytes: number): void {
    const old = this.slots.get(slot);
    if (old && old.nbytes >= nbytes) return;
    if (old) this.gpu.release(old);
    this.slots.set(slot, this.gpu.allocate(nbytes));
    this.generation++;
  }
}

/** A plan at some sizes, with its parameters on the GPU. */
export interface Sized {
  plan: SizedPlan;
  uniform: Buffer;
  /** The arena's generation when it had room. */
  generation: number;
  /** By the numbers of the buffers of inputs and outputs. */
  bound: Map<string, Bound>;
  /** The one that was made last. */
  last: Bound | null;
}

/** Buffers, and bind groups of the steps with them. */
interface Bound { buffers: readonly Buffer[]; groups: GPUBindGroup[] }

export class Program {
  readonly names: readonly string[];
  readonly roles: readonly Role[];
  /** Memory of constants, by position. */
  readonly constants = new Map<number, Buffer>();
  private readonly sized = new Map<string, Sized>();
  private readonly outer: number[];
  /** In the arena, of intermediates. */
  private readonly slots: string[];

  /**
   * @param label of its own in the model.
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
    this.slots = this.names.map((name, k) =>
      this.roles[k] === "intermediate" ? String(plan.buffers[name]!.slot ?? `${label} ${k}`) : "");
    this.names.forEach((name, k) => {
      if (this.roles[k] !== "constant") return;
      const data = plan.constants[name]!;
      const buffer = gpu.allocate(data.length);
      gpu.upload(buffer, data);
      this.constants.set(k, buffer);
    });
  }

  /** The plan at these sizes; those of the last few calls are kept. */
  sizedAt(sizes: Sizes): Sized {
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
    this.gpu.upload(uniform, plan.uniform);
    found = { plan, uniform, generation: -1, bound: new Map(), last: null };
    this.sized.set(key, found);
    if (this.sized.size > MOST_SIZES) {
      const [oldest, { uniform: unused }] = this.sized.entries().next().value!;
      this.sized.delete(oldest);
      this.gpu.release(unused);
    }
    return found;
  }

  /** Adds the plan's commands; `given` are the buffers of inputs, outputs and what is prepared, by position. */
  encode(encoder: GPUCommandEncoder, sized: Sized, given: readonly (Buffer | undefined)[]): void {
    const { groups } = this.boundTo(sized, given);
    const { steps } = sized.plan;
    if (!steps.length) return;
    const pass = encoder.beginComputePass();
    let last: GPUComputePipeline | null = null;
    for (let k = 0; k < steps.length; k++) {
      const { kernel, grid } = steps[k]!;
      const { pipeline } = this.pipelines[kernel]!;
      if (pipeline !== last) pass.setPipeline((last = pipeline));
      pass.setBindGroup(0, groups[k]!);
      pass.dispatchWorkgroups(grid[0]!, grid[1], grid[2]);
    }
    pass.end();
  }

  /** Makes room in the arena: before anything is encoded, as what it replaces is gone at once. */
  reserve(sized: Sized): void {
    if (sized.generation === this.arena.generation) return;
    this.slots.forEach((slot, k) => slot && this.arena.reserve(slot, sized.plan.nbytes[k]!));
    sized.generation = this.arena.generation;
    sized.bound.clear();
  }

  private boundTo(sized: Sized, given: readonly (Buffer | undefined)[]): Bound {
    let key = "";
    for (const k of this.outer) key += `,${given[k]!.id}`;
    let bound = sized.bound.get(key);
    if (!bound) {
      const buffers = this.names.map((_, k) =>
        this.roles[k] === "status" ? this.status : (this.arena.slots.get(this.slots[k]!) ?? this.constants.get(k) ?? given[k]!));
      bound = sized.last = { buffers, groups: sized.plan.steps.map((step, k) => this.group(step, k, sized, buffers)) };
      sized.bound.set(key, bound);
      if (sized.bound.size > MOST_BOUND) sized.bound.delete(sized.bound.keys().next().value!);
    }
    return bound;
  }

  /** The bind group of step `k`: mostly, a call has few buffers that the one before did not have. */
  private group(step: SizedDispatch, k: number, { uniform, last }: Sized, buffers: readonly Buffer[]): GPUBindGroup {
    if (last && step.bindings.every(([position]) => last.buffers[position] === buffers[position])) return last.groups[k]!;
    const entries: GPUBindGroupEntry[] = step.bindings.map(([position, offset, size], binding) => ({
      binding, resource: { buffer: buffers[position]!.gpu, offset, size },
    }));
    if (step.parameters >= 0) {
      entries.push({ binding: entries.length, resource: { buffer: uniform.gpu, offset: step.parameters, size: step.parametersSize } });
    }
    return this.gpu.device.createBindGroup({ layout: this.pipelines[step.kernel]!.layout, entries });
  }
}
