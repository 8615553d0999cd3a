/** `States`: the tensors that stay on the GPU between calls. */

import { InputError } from "./errors.js";
import type { Files } from "./files.js";
import type { Buffer, Gpu } from "./gpu.js";
import { type StateEntry, stateBytes } from "./manifest.js";

/** A state. `version` grows with each change of its contents. */
export interface State { entry: StateEntry; buffer: Buffer; version: number; isWritten: boolean }

/** A part of a file that is copied to a state; `carried` are bytes of a word that has not come as a whole. */
interface Part { state: State; start: number; end: number; carried: Uint8Array; at: number }

const QUEUED = 64 << 20; // bytes on their way to the GPU

export class States {
  private readonly all: Map<string, State>;

  constructor(private readonly gpu: Gpu, entries: Record<string, StateEntry>) {
    this.all = new Map(Object.entries(entries).map(([name, entry]) =>
      [name, { entry, buffer: gpu.allocate(stateBytes(entry)), version: 0, isWritten: false }]));
  }

  /** Throws `InputError` where there is none of this name. */
  get(name: string): State {
    const found = this.all.get(name);
    if (!found) throw new InputError(`there is no state ${name}; there are ${[...this.all.keys()].slice(0, 20)}`);
    return found;
  }

  /** The names of those that a test of them finds. */
  names(test: (state: State) => boolean): string[] {
    return [...this.all].flatMap(([name, state]) => (test(state) ? name : []));
  }

  /** The names of those that do not hold what their files say, or will not. */
  changed(): string[] {
    return this.names(({ entry, isWritten }) => entry.changes || isWritten);
  }

  /** Gives a state other bytes. */
  put(name: string, bytes: Uint8Array): void {
    const state = this.get(name);
    const { entry } = state;
    const wanted = stateBytes(entry);
    if (bytes.length !== wanted) {
      throw new InputError(`${name} has ${wanted} bytes, not ${bytes.length}; its sizes are [${entry.sizes}]`);
    }
    this.gpu.upload(state.buffer, bytes);
    state.version++;
    state.isWritten = true;
  }

  /** Fills states with what their files say: chunk by chunk, from the network to the GPU. */
  async loadAll(names: readonly string[], files: Files): Promise<void> {
    const byFile = new Map<string, Part[]>();
    for (const name of names) {
      const state = this.get(name);
      const { file, offset } = state.entry;
      state.version++;
      state.isWritten = false;
      if (file === null) {
        this.gpu.submit((encoder) => encoder.clearBuffer(state.buffer.gpu));
        continue;
      }
      const part = { state, start: offset, end: offset + stateBytes(state.entry), carried: new Uint8Array(0), at: 0 };
      byFile.set(file, [...(byFile.get(file) ?? []), part]);
    }
    let queued = 0;
    for (const [file, parts] of byFile) {
      await files.read(file, parts.map(({ start, end }): [number, number] => [start, end]), async (start, chunk) => {
        for (const part of parts) this.upload(part, start, chunk);
        queued += chunk.length;
        if (queued >= QUEUED) {
          queued = 0;
          await this.gpu.settled();
        }
      });
    }
  }

  /** Copies what a chunk, which starts at byte `start` of the file, has of a state. */
  private upload(part: Part, start: number, chunk: Uint8Array<ArrayBuffer>): void {
    const from = Math.max(start, part.start) - start;
    const to = Math.min(start + chunk.length, part.end) - start;
    if (from >= to) return;
    let piece = chunk.subarray(from, to);
    const { carried } = part;
    if (carried.length || piece.length % 4) {
      // Whole words only: what is left of one waits for the next chunk.
      const joined = new Uint8Array(carried.length + piece.length);
      joined.set(carried);
      joined.set(piece, carried.length);
      const whole = start + to === part.end ? joined.length : joined.length - (joined.length % 4);
      part.carried = joined.slice(whole);
      piece = joined.subarray(0, whole);
    }
    this.gpu.upload(part.state.buffer, piece, part.at);
    part.at += piece.length;
  }
}
