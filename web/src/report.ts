/**
 * What a model does with the GPU: which kernels take how long, what is in its memory, and why this variant runs.
 *
 *     import { report } from "torch-webgpu/report";
 *     const { kernels, gpuMemory } = await report(model, "forward", { ids: [[1, 2, 3]] });
 *     console.table(kernels);
 */

import { type DType, itemsize } from "./dtypes.js";
import { type DeviceOptions, PREFERENCE, lacks } from "./gpu.js";
import { numel } from "./layout.js";
import type { StateKind } from "./manifest.js";
import type { Model } from "./model.js";
import type { BundleTypes, EntryName, Inputs } from "./signatures.js";

/** A kernel in one call, on average; `milliseconds` are null without timestamps. */
export interface KernelReport { name: string; dispatches: number; milliseconds: number | null }

export interface StateReport { name: string; kind: StateKind; dtype: DType; nbytes: number }

export interface Report {
  /** The variant that runs, and why. */
  variant: { name: string; reason: string };
  /** Of each entry: one plan, or several that data choose among (`composed`). */
  entries: Record<string, "plain" | "composed">;
  /** Bytes on the GPU: all, those of states, the largest first, and the rest: constants, intermediates, inputs and results. */
  gpuMemory: { nbytes: number; ofStates: number; ofOthers: number; byState: StateReport[] };
  /** Of a call, from its start to the end of its work on the GPU; null where none was asked for. */
  milliseconds: number | null;
  /** Those of a call that take longest first; empty where none was asked for. */
  kernels: KernelReport[];
  /** How the kernels' times were found, or why there are none. */
  timing: string;
}

export interface ReportOptions {
  /** How many calls are timed; 10 by default. */
  calls?: number;
}

const QUERIES = 4096; // the most that a set may have

/** The dispatches of a device while it is watched, each in a pass of its own, with timestamps where it has them. */
class Watch {
  readonly counts = new Map<string, number>();
  private readonly timed: { name: string; set: GPUQuerySet; at: number }[] = [];
  private readonly sets: GPUQuerySet[] = [];
  readonly hasTimestamps: boolean;

  constructor(private readonly device: GPUDevice) {
    this.hasTimestamps = device.features.has("timestamp-query");
    const begin = device.createCommandEncoder;
    device.createCommandEncoder = (descriptor) => {
      const encoder = begin.call(device, descriptor);
      const pass = encoder.beginComputePass;
      encoder.beginComputePass = (given) => this.pass((own) => pass.call(encoder, { ...given, ...own }));
      return encoder;
    };
  }

  /** The device is as it was. */
  end(): void {
    Reflect.deleteProperty(this.device, "createCommandEncoder");
  }

  /** What takes the commands of a pass, and opens one for each dispatch, with all that was set before. */
  private pass(open: (descriptor: GPUComputePassDescriptor) => GPUComputePassEncoder): GPUComputePassEncoder {
    const set = new Map<string, [string, unknown[]]>();
    const command = (method: string, given: unknown[]): void => {
      if (method === "end") return;
      if (!method.startsWith("dispatch")) return void set.set(method === "setBindGroup" ? `${method} ${given[0]}` : method, [method, given]);
      const [pipeline] = set.get("setPipeline")![1] as [GPUComputePipeline];
      const inner = open(this.timestamps(pipeline.label)) as unknown as Record<string, (...given: unknown[]) => void>;
      for (const [name, values] of [...set.values(), [method, given] as const, ["end", []] as const]) inner[name]!(...values);
    };
    return new Proxy({}, { get: (_, method) => (...given: unknown[]) => command(String(method), given) }) as GPUComputePassEncoder;
  }

  private timestamps(name: string): GPUComputePassDescriptor {
    this.counts.set(name, (this.counts.get(name) ?? 0) + 1);
    if (!this.hasTimestamps) return {};
    const at = (2 * this.timed.length) % QUERIES;
    if (!at) this.sets.push(this.device.createQuerySet({ type: "timestamp", count: QUERIES }));
    const set = this.sets.at(-1)!;
    this.timed.push({ name, set, at });
    return { timestampWrites: { querySet: set, beginningOfPassWriteIndex: at, endOfPassWriteIndex: at + 1 } };
  }

  /** Milliseconds by kernel, of all dispatches together. */
  async milliseconds(): Promise<Map<string, number>> {
    const { device, sets, timed } = this;
    const size = 8 * QUERIES;
    const found = new Map<string, number>();
    for (const set of sets) {
      const resolved = device.createBuffer({ size, usage: GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC });
      const staging = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
      const own = timed.filter((row) => row.set === set);
      const encoder = device.createCommandEncoder();
      encoder.resolveQuerySet(set, 0, 2 * own.length, resolved, 0);
      encoder.copyBufferToBuffer(resolved, 0, staging, 0, size);
      device.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const ticks = new BigUint64Array(staging.getMappedRange());
      for (const { name, at } of own) {
        const nanoseconds = Number(ticks[at + 1]! - ticks[at]!); // clocks may be set back
        found.set(name, (found.get(name) ?? 0) + Math.max(0, nanoseconds) / 1e6);
      }
      for (const each of [set, resolved, staging]) each.destroy();
    }
    return found;
  }
}

/** Why a model runs its variant. */
async function reasonOf({ manifest: { variants }, variant: { name } }: Model, options: DeviceOptions): Promise<string> {
  if (options.variant) return "load was asked for it";
  if (variants.length === 1) return "the bundle has no other";
  const source = options.device ?? await navigator["gpu"].requestAdapter({ powerPreference: options.powerPreference ?? PREFERENCE });
  const before = variants.slice(0, variants.findIndex((each) => each.name === name));
  const missing = before.map((each) => `${each.name} needs ${(source && lacks(each, source, options.limits).join(", ")) || "what this GPU has not"}`);
  return [...missing, `it is the first of ${variants.map((each) => each.name).join(", ")} that this GPU can run`].join("; ");
}

/**
 * Reports on a model, and on calls of one of its entries.
 *
 * The entry is called once, and then twice as often as is timed: its states change as they do in any call. What else the page
 * has the device do meanwhile is counted with it. Browsers round timestamps, Chrome to 0.1 ms: an average of more calls is finer.
 *
 * @param name of an entry; without it, nothing is called.
 * @param inputs as of `model.run`.
 * @throws what `model.run` does.
 */
export async function report<B extends BundleTypes, N extends EntryName<B>>(
  model: Model<B>, name?: N, inputs?: Inputs<B, N>, { calls = 10 }: ReportOptions = {},
): Promise<Report> {
  const any = model as unknown as Model;
  const { device } = any;
  const run = async (count: number): Promise<number> => {
    const start = performance.now();
    for (let k = 0; k < count; k++) {
      const results = await any.run(name!, inputs as Parameters<Model["run"]>[1]);
      for (const tensor of Object.values(results)) tensor.dispose();
    }
    await device.queue.onSubmittedWorkDone();
    return (performance.now() - start) / count;
  };
  let milliseconds: number | null = null;
  let kernels: KernelReport[] = [];
  let timing = "no entry was called";
  if (name !== undefined) {
    await run(1);
    milliseconds = await run(calls);
    const watch = new Watch(device);
    await run(calls).finally(() => watch.end());
    await any.check();
    const times = await watch.milliseconds();
    kernels = [...watch.counts].map(([name, count]) => ({
      name, dispatches: count / calls, milliseconds: watch.hasTimestamps ? times.get(name)! / calls : null,
    })).sort((a, b) => b.milliseconds! - a.milliseconds! || b.dispatches - a.dispatches);
    timing = watch.hasTimestamps
      ? `timestamps of the GPU around each dispatch, in ${calls} calls`
      : "the device has no timestamp-query: kernels are counted, and only the whole call is timed";
  }
  const byState = Object.entries(any.variant.state).map(([name, { kind, dtype, sizes }]): StateReport =>
    ({ name, kind, dtype, nbytes: numel(sizes) * itemsize(dtype) })).sort((a, b) => b.nbytes - a.nbytes);
  const ofStates = byState.reduce((sum, { nbytes }) => sum + nbytes, 0);
  const nbytes = any.statistics.gpuBytes;
  const { callables } = model as unknown as { callables: ReadonlyMap<string, object> };
  return {
    variant: { name: any.variant.name, reason: await reasonOf(any, any["options"]) },
    entries: Object.fromEntries([...callables].map(([name, callable]) => [name, "call" in callable ? "composed" : "plain"])),
    gpuMemory: { nbytes, ofStates, ofOthers: nbytes - ofStates, byState },
    milliseconds, kernels, timing,
  };
}
