/** `Gpu`: a device, its buffers, and what went wrong with it. */

import { DeviceLostError, OutOfMemoryError, TorchWebGPUError, WebGPUUnavailableError } from "./errors.js";
import type { Variant } from "./manifest.js";

export interface DeviceOptions {
  /** A device to use instead of one of its own. */
  device?: GPUDevice;
  powerPreference?: GPUPowerPreference;
  /** The name of a variant, instead of the first that the device can run. */
  variant?: string;
  /** Caps what the adapter is taken to have, by WebGPU's names of limits: how it would be on a smaller one. */
  limits?: Record<string, number>;
}

/** A buffer with a number, which is never used twice on this page. */
export interface Buffer {
  readonly gpu: GPUBuffer;
  readonly id: number;
  readonly nbytes: number;
  readonly device: GPUDevice;
}

export const PREFERENCE = "high-performance";

let buffersMade = 0;

/** Bytes that are allocated for so many: a multiple of 16, and at least 16. */
export const rounded = (nbytes: number): number => Math.max(16, Math.ceil(nbytes / 16) * 16);

const HELP = "use a current Chrome, Edge, Safari or Firefox, and https or localhost";

export const deviceLost = (why: string): DeviceLostError =>
  new DeviceLostError(`the GPU device was lost: ${why}; go on with model.restore()`);

const outOfMemory = (what: string): OutOfMemoryError =>
  new OutOfMemoryError(`${what}; close other pages, use a smaller model or sizes, and go on with model.restore()`);

/** What a variant needs and a device, or adapter, has not. */
export function lacks({ features, limits }: Variant, source: GPUDevice | GPUAdapter, caps: Record<string, number> = {}): string[] {
  return [
    ...features.filter((name) => !source.features.has(name)),
    ...Object.entries(limits).flatMap(([name, needed]) => {
      const found = (source.limits as unknown as Record<string, number>)[name] ?? 0;
      const has = Math.min(found, caps[name] ?? found);
      return has < needed ? `${name} ${needed} (it has ${has})` : [];
    }),
  ];
}

export class Gpu {
  /** Bytes in buffers that this runtime has made and not destroyed. */
  allocated = 0;
  private failure: TorchWebGPUError | null = null;
  private scopes: Promise<void> = Promise.resolve();
  private readonly ending = new AbortController();
  private readonly buffers = new Set<Buffer>();

  private constructor(
    readonly device: GPUDevice,
    readonly info: GPUAdapterInfo | null,
    private readonly isOwn: boolean,
    onLost: (error: DeviceLostError) => void,
  ) {
    void device.lost.then(({ reason, message }) => {
      if (this.ending.signal.aborted) return;
      const lost = (this.failure = deviceLost(message || reason));
      onLost(lost);
    });
    device.addEventListener("uncapturederror", ({ error }) => {
      this.fail(error instanceof GPUOutOfMemoryError
        ? outOfMemory(error.message)
        : new TorchWebGPUError(`the GPU refused a command: ${error.message}; report it, and go on with model.restore()`));
    }, { signal: this.ending.signal });
  }

  /** Opens a device for the first of the variants that it can run. */
  static async open(
    variants: readonly Variant[], options: DeviceOptions, onLost: (error: DeviceLostError) => void,
  ): Promise<[Gpu, Variant]> {
    const { device, variant: wanted, limits: caps, powerPreference = PREFERENCE } = options;
    const source = device ?? await globalThis.navigator?.["gpu"]?.requestAdapter({ powerPreference });
    if (!source) throw new WebGPUUnavailableError(`there is no WebGPU, or no GPU for it: ${HELP}, and see chrome://gpu`);
    const missing: string[] = [];
    for (const variant of variants) {
      if (wanted !== undefined && variant.name !== wanted) continue;
      const absent = lacks(variant, source, caps);
      if (absent.length) {
        missing.push(`${variant.name} needs ${absent.join(", ")}`);
        continue;
      }
      if (device) return [new Gpu(device, null, false, onLost), variant];
      const adapter = source as GPUAdapter;
      const opened = await adapter.requestDevice({
        // Timestamps cost nothing until `report` asks for them.
        requiredFeatures: [...variant.features, "timestamp-query"].filter((name) => source.features.has(name)) as GPUFeatureName[],
        requiredLimits: variant.limits,
      }).catch((error: Error) => {
        throw new WebGPUUnavailableError(`the GPU gives no device: ${error.message}; ${HELP}`);
      });
      return [new Gpu(opened, adapter.info ?? null, true, onLost), variant];
    }
    const why = missing.length ? missing.join("; ") : `there is no variant ${String(wanted)}`;
    throw new WebGPUUnavailableError(`this GPU can run no variant of the bundle: ${why}; export for target "browser"`);
  }

  /** Throws what went wrong before. */
  check(): void {
    if (this.failure) throw this.failure;
  }

  /** Notes what went wrong first, for whoever waits next. */
  private fail(error: TorchWebGPUError): void {
    this.failure ??= error;
  }

  /** A new buffer, of zeros. */
  allocate(nbytes: number, usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST): Buffer {
    this.check();
    const size = rounded(nbytes);
    const most = this.device.limits.maxBufferSize;
    if (size > most) throw outOfMemory(`a buffer of this GPU has at most ${most} bytes, not ${size}`);
    this.device.pushErrorScope("out-of-memory");
    const gpu = this.device.createBuffer({ size, usage });
    const beside = this.allocated;
    this.scopes = this.device.popErrorScope().then((error) => {
      if (error) this.fail(outOfMemory(`the GPU has no memory for ${size} bytes beside ${beside}`));
    }, () => undefined);
    const made = { gpu, id: buffersMade++, nbytes: size, device: this.device };
    this.allocated += size;
    this.buffers.add(made);
    return made;
  }

  /** Writes bytes to the start of a buffer, or to a multiple of 4 of it. */
  upload({ gpu }: Buffer, data: Uint8Array, start = 0): void {
    let whole = data as Uint8Array<ArrayBuffer>;
    if (data.length % 4) (whole = new Uint8Array(Math.ceil(data.length / 4) * 4)).set(data);
    this.device.queue.writeBuffer(gpu, start, whole);
  }

  /** Submits what is recorded. */
  submit(record: (encoder: GPUCommandEncoder) => void): void {
    const encoder = this.device.createCommandEncoder();
    record(encoder);
    this.device.queue.submit([encoder.finish()]);
  }

  /** Frees a buffer's memory as soon as what was submitted is done. */
  release(buffer: Buffer): void {
    if (!this.buffers.delete(buffer)) return;
    this.allocated -= buffer.nbytes;
    buffer.gpu.destroy();
  }

  /** Waits for everything that was submitted. Throws what went wrong. */
  async settled(): Promise<void> {
    await this.device.queue.onSubmittedWorkDone().catch(() => undefined);
    await this.scopes;
    this.check();
  }

  /** Frees everything. */
  destroy(): void {
    this.ending.abort();
    this.fail(deviceLost("it was given back"));
    for (const buffer of this.buffers) buffer.gpu.destroy();
    this.buffers.clear();
    this.allocated = 0;
    if (this.isOwn) this.device.destroy();
  }
}
