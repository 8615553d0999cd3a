/** `Readback`: bytes from the GPU, and what kernels report of indices. */

import { refuse } from "./checks.js";
import { IndexOutOfRangeError } from "./errors.js";
import { type Buffer, type Gpu, deviceLost } from "./gpu.js";
import { type IndexCheck, type Plan, STATUS_NBYTES } from "./plan.js";

const CHECK_INTERVAL = 1000; // ms: a loop that reads a token at a time copies nothing but tokens meanwhile
const LARGEST_KEPT = 1 << 20;
const STAGING = 0x0009; // GPUBufferUsage.MAP_READ | COPY_DST

export class Readback {
  /** Bytes read so far. */
  copiedBytes = 0;
  /** Where kernels report. */
  readonly status: Buffer;
  private readonly checks: (IndexCheck & { changes: boolean })[] = [];
  private readonly free = new Map<number, Buffer[]>();
  private hasReports = false;
  private lastCheck = -Infinity;

  constructor(private readonly gpu: Gpu) {
    this.status = gpu.allocate(STATUS_NBYTES);
  }

  /** Gives the checks of a plan their numbers: the first of each step. */
  numbered({ steps, outputs }: Plan): number[] {
    const changes = outputs.some(({ mutates }) => mutates !== null);
    return steps.map((step) => {
      const first = this.checks.length;
      this.checks.push(...step.checks.map((check) => ({ ...check, changes })));
      return first;
    });
  }

  /** Says that a call has checked indices. `isUrgent`: the next read looks at what it found. */
  expect(isUrgent: boolean): void {
    this.hasReports = true;
    if (isUrgent) this.urge();
  }

  /** Has the next read look at what was reported. */
  urge(): void {
    this.lastCheck = -Infinity;
  }

  /**
   * Bytes of a buffer, as they are after all that was submitted so far.
   *
   * @throws IndexOutOfRangeError, OutOfMemoryError, DeviceLostError: what went wrong until then.
   */
  async read(buffer: Buffer, start: number, nbytes: number): Promise<Uint8Array<ArrayBuffer>> {
    const { gpu } = this;
    const { device } = gpu;
    if (buffer.device !== device) throw deviceLost("what is read was on another one");
    const first = start - (start % 4);
    const size = Math.ceil((start - first + nbytes) / 4) * 4;
    const now = performance.now();
    const withReports = this.hasReports && now - this.lastCheck > CHECK_INTERVAL && size + STATUS_NBYTES <= device.limits.maxBufferSize;
    const all = size + (withReports ? STATUS_NBYTES : 0);
    const room = all > LARGEST_KEPT ? all : 2 ** Math.ceil(Math.log2(Math.max(64, all)));
    const free = this.free.get(room) ?? [];
    this.free.set(room, free);
    const staging = free.pop() ?? gpu.allocate(room, STAGING);
    gpu.submit((encoder) => {
      if (size) encoder.copyBufferToBuffer(buffer.gpu, first, staging.gpu, 0, size);
      if (!withReports) return;
      encoder.copyBufferToBuffer(this.status.gpu, 0, staging.gpu, size, STATUS_NBYTES);
      encoder.clearBuffer(this.status.gpu);
      this.hasReports = false;
      this.lastCheck = now;
    });
    this.copiedBytes += nbytes + all - size;
    try {
      await staging.gpu.mapAsync(GPUMapMode.READ, 0, all);
    } catch (error) {
      await Promise.resolve(); // what the device says of its loss comes first
      gpu.check();
      throw deviceLost((error as Error).message);
    }
    const bytes = new Uint8Array(staging.gpu.getMappedRange(0, all).slice(0));
    staging.gpu.unmap();
    if (room > LARGEST_KEPT) gpu.release(staging);
    else free.push(staging);
    gpu.check();
    if (withReports) this.report(new DataView(bytes.buffer, size));
    return bytes.slice(start - first, start - first + nbytes);
  }

  /** Throws what the status says, if anything. */
  private report(words: DataView): void {
    if (!words.getUint32(0, true)) return;
    const check = this.checks[words.getUint32(4, true)];
    if (!check) refuse("a kernel", "reports what it does not check");
    const { op, source, dim, changes } = check;
    const index = words.getBigInt64(8, true);
    const size = words.getUint32(16, true);
    const where = dim === null ? `a tensor of ${size} elements` : `dimension ${dim} with size ${size}`;
    const at = source ? `; at ${source}` : "";
    const next = changes ? ", and restore the state that the call has changed" : "";
    throw new IndexOutOfRangeError(`${op}: index ${index} is out of bounds for ${where}; correct the indices${next}${at}`);
  }
}
