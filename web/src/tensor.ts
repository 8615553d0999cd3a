/** `Tensor`: a result that is on the GPU, and the memory of results. */

import { type DType, type ElementsOf, decode, itemsize } from "./dtypes.js";
import { InputError } from "./errors.js";
import type { Buffer, Gpu } from "./gpu.js";
import { type Layout, inRows, numel, span } from "./layout.js";

const CALLS_KEPT = 64;

/** Buffers for results: each has as many users as there are tensors in it, and is used again when the last is gone. */
export class Pool {
  private readonly free = new Map<number, { buffer: Buffer; since: number }[]>();
  private readonly users = new Map<Buffer, number>();
  private calls = 0;

  constructor(private readonly gpu: Gpu) {}

  /** A buffer without users, whatever is in it. */
  lend(nbytes: number): Buffer {
    return this.free.get(nbytes)?.pop()?.buffer ?? this.gpu.allocate(nbytes);
  }

  hold(buffer: Buffer): void {
    this.users.set(buffer, (this.users.get(buffer) ?? 0) + 1);
  }

  leave(buffer: Buffer): void {
    const left = (this.users.get(buffer) ?? 1) - 1;
    if (left) this.users.set(buffer, left);
    else this.give(buffer);
  }

  /** Takes back a buffer that nobody uses. */
  give(buffer: Buffer): void {
    this.users.delete(buffer);
    const row = { buffer, since: this.calls };
    const same = this.free.get(buffer.nbytes);
    if (same) same.push(row);
    else this.free.set(buffer.nbytes, [row]);
  }

  /** Counts a call; now and then frees what many calls had no use for. */
  count(): void {
    if (++this.calls % CALLS_KEPT) return;
    for (const [nbytes, rows] of this.free) {
      const kept = rows.filter(({ buffer, since }) => since > this.calls - CALLS_KEPT || this.gpu.release(buffer));
      if (kept.length) this.free.set(nbytes, kept);
      else this.free.delete(nbytes);
    }
  }
}

/** What reads bytes of a buffer: `Model`. */
export interface Reader {
  readBytes(buffer: Buffer, start: number, nbytes: number): Promise<Uint8Array<ArrayBuffer>>;
}

const abandoned = new FinalizationRegistry<() => void>((leave) => leave());

/** A result of a call. It stays on the GPU until it is read, and may be an input of another call as it is. */
export class Tensor<D extends DType = DType> {
  /**
   * The memory that it is in; null once it was read or disposed of.
   *
   * @internal
   */
  memory: Buffer | null;
  private readonly leave: () => void;

  /** @internal `Model.run` gives tensors. */
  constructor(
    readonly name: string,
    readonly dtype: D,
    /** @internal */
    readonly layout: Layout,
    private readonly reader: Reader,
    pool: Pool,
    memory: Buffer,
  ) {
    this.memory = memory;
    pool.hold(memory);
    this.leave = () => pool.leave(memory);
    abandoned.register(this, this.leave, this);
  }

  get shape(): readonly number[] {
    return this.layout.shape;
  }

  /** The number of elements. */
  get size(): number {
    return numel(this.shape);
  }

  /** Whether its elements are in rows, without gaps, from the start of its memory. */
  get isContiguous(): boolean {
    return this.layout.offset === 0 && inRows(this.layout);
  }

  /**
   * Its elements, in rows. What was computed so far is waited for; calls made meanwhile go on.
   *
   * @param options.keep leaves the tensor on the GPU; otherwise it is used up, and its memory serves later calls.
   * @throws IndexOutOfRangeError, OutOfMemoryError, DeviceLostError: what went wrong on the GPU.
   */
  async read({ keep = false } = {}): Promise<ElementsOf<D>> {
    const memory = this.held();
    const width = itemsize(this.dtype);
    const { shape, strides, offset } = this.layout;
    const count = Math.max(0, span(this.layout) - offset);
    const reading = this.reader.readBytes(memory, count && offset * width, count * width);
    if (!keep) this.dispose(); // what later calls write comes after the copy that was submitted
    const elements = decode(this.dtype, await reading) as ElementsOf<D>;
    if (inRows(this.layout)) return elements;
    const rows = new (elements.constructor as { new (count: number): ElementsOf<D> })(this.size);
    for (let k = 0; k < this.size; k++) {
      let rest = k;
      let at = 0;
      for (let dim = shape.length - 1; dim >= 0; dim--) {
        at += (rest % shape[dim]!) * strides[dim]!;
        rest = Math.floor(rest / shape[dim]!);
      }
      rows[k] = elements[at]!;
    }
    return rows;
  }

  /** The only element. */
  async item(): Promise<number> {
    if (this.size !== 1) throw new InputError(`${this.name} has ${this.size} elements, not one; use read()`);
    return Number((await this.read())[0]);
  }

  /** Gives its memory to later calls. */
  dispose(): void {
    if (!this.memory) return;
    this.memory = null;
    abandoned.unregister(this);
    this.leave();
  }

  /** @internal Its memory. Throws `InputError` once it is gone. */
  held(): Buffer {
    if (!this.memory) throw new InputError(`${this.name} was read or disposed of; use read({keep: true})`);
    return this.memory;
  }
}
