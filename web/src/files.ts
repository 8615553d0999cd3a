/** `Files`: a bundle's files, chunk by chunk: fetched, checked by their hashes, and kept in the browser's cache. */

import { BundleError } from "./errors.js";
import type { Manifest } from "./manifest.js";

export type Fetch = typeof fetch;

const CACHE = "torch-webgpu";
const TRIES = 4;

/** A SHA-256 in hexadecimal. */
export async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  if (!globalThis.crypto?.subtle) throw new BundleError("hashes need a page from https or localhost; serve it so");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Why a response has no content. */
export function unreadable({ url, status }: Response): Error {
  const kind = status >= 500 ? TypeError : BundleError; // a server may recover: `fetch` fails alike
  return new kind(`${url} cannot be read: HTTP ${status}; check the address, and that all files were uploaded`);
}

interface Source {
  /** Some of the next bytes, in the memory of a view, which is given back with them; null at the end. */
  read(view: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer> | null>;
  cancel(): Promise<void>;
}

function bytesOf(body: ReadableStream<Uint8Array>): Source {
  try {
    const reader = body.getReader({ mode: "byob" });
    return { read: async (view) => (await reader.read(view)).value ?? null, cancel: () => reader.cancel() };
  } catch {
    // Not every browser reads responses into memory of the caller's.
    const reader = body.getReader();
    let rest = new Uint8Array(0);
    const read = async (view: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer> | null> => {
      if (!rest.length) {
        const { done, value } = await reader.read();
        if (done) return null;
        rest = value as Uint8Array<ArrayBuffer>;
      }
      const part = rest.subarray(0, view.length);
      view.set(part);
      rest = rest.subarray(part.length);
      return view.subarray(0, part.length);
    };
    return { read, cancel: () => reader.cancel() };
  }
}

export class Files {
  private cache: Cache | null = null;

  private constructor(
    private readonly manifest: Manifest,
    private readonly base: URL,
    private readonly fetcher: Fetch,
    private readonly signal: AbortSignal | undefined,
    private readonly onBytes: (count: number) => void,
  ) {}

  static async open(
    manifest: Manifest, base: URL, fetcher: Fetch, useCache: boolean, signal: AbortSignal | undefined,
    onBytes: (count: number) => void,
  ): Promise<Files> {
    const files = new Files(manifest, base, fetcher, signal, onBytes);
    // Without one, or where the user has forbidden it, the network alone will do.
    if (useCache) files.cache = (await globalThis.caches?.open(CACHE).catch(() => null)) ?? null;
    return files;
  }

  /** A whole file of JSON. */
  async json(path: string): Promise<unknown> {
    const { nbytes } = this.manifest.files[path]!;
    const all = new Uint8Array(nbytes);
    await this.read(path, [[0, nbytes]], (start, chunk) => all.set(chunk, start));
    try {
      return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(all));
    } catch (error) {
      throw new BundleError(`${path} is no JSON (${(error as Error).message}); export the model again`);
    }
  }

  /**
   * Reads the chunks of a file that these ranges of bytes touch, in order.
   *
   * A chunk's memory is used again once `use` is done with it.
   */
  async read(
    path: string, ranges: readonly [number, number][], use: (start: number, chunk: Uint8Array<ArrayBuffer>) => unknown,
  ): Promise<void> {
    const { chunks, nbytes } = this.manifest.files[path]!;
    const size = this.manifest.chunk_nbytes;
    const wanted = new Set<number>();
    for (const [start, end] of ranges) {
      for (let k = Math.floor(start / size); k * size < end; k++) wanted.add(k);
    }
    const order = [...wanted].sort((a, b) => a - b);
    for (let at = 0; at < order.length; ) {
      this.signal?.throwIfAborted();
      const first = order[at]!;
      const cached = await this.cached(chunks[first]!, Math.min(size, nbytes - first * size));
      if (cached) {
        this.onBytes(cached.length);
        await use(first * size, cached);
        at++;
        continue;
      }
      // All that follow without a gap and are not in the cache come in one response.
      let count = 1;
      while (order[at + count] === first + count && !(await this.has(chunks[first + count]!))) count++;
      await this.fetchChunks(path, first, count, use);
      at += count;
    }
  }

  private key(hash: string): string {
    return new URL(`/.torch-webgpu/${hash}`, this.base).href;
  }

  private async has(hash: string): Promise<boolean> {
    return !!(await this.cache?.match(this.key(hash)));
  }

  private async cached(hash: string, nbytes: number): Promise<Uint8Array<ArrayBuffer> | null> {
    const found = await this.cache?.match(this.key(hash));
    if (!found) return null;
    const data = new Uint8Array(await found.arrayBuffer());
    if (data.length === nbytes && (await sha256(data)) === hash) return data;
    await this.cache?.delete(this.key(hash)); // damaged: fetched again
    return null;
  }

  /** Fetches `count` chunks from `first` on; goes on where it was when a download breaks. */
  private async fetchChunks(
    path: string, first: number, count: number, use: (start: number, chunk: Uint8Array<ArrayBuffer>) => unknown,
  ): Promise<void> {
    const { chunks, nbytes } = this.manifest.files[path]!;
    const size = this.manifest.chunk_nbytes;
    const end = Math.min((first + count) * size, nbytes);
    let next = first;
    for (let failures = 0; next < first + count; ) {
      let current: number = next;
      try {
        for await (const chunk of this.stream(path, next * size, end)) {
          const wanted = chunks[current]!;
          if ((await sha256(chunk)) !== wanted) {
            throw new BundleError(`${path} is damaged: chunk ${current} has another SHA-256; upload or export the bundle again`);
          }
          await this.cache?.put(this.key(wanted), new Response(chunk)).catch(() => (this.cache = null)); // it is full
          this.onBytes(chunk.length);
          await use(current * size, chunk);
          next = ++current;
          failures = 0;
        }
        if (next < first + count) throw new TypeError("the response ended early");
      } catch (error) {
        if (error instanceof BundleError || !(error instanceof TypeError) || ++failures === TRIES) throw error;
        await new Promise((resolve) => setTimeout(resolve, 100 * 4 ** failures));
        this.signal?.throwIfAborted();
      }
    }
  }

  /** The bytes start … end of a file in chunks of the manifest's size, the last one shorter. */
  private async *stream(path: string, start: number, end: number): AsyncGenerator<Uint8Array<ArrayBuffer>> {
    const url = new URL(path, this.base);
    const whole = end === this.manifest.files[path]!.nbytes && start === 0;
    const headers: HeadersInit = whole ? {} : { Range: `bytes=${start}-${end - 1}` };
    const response = await this.fetcher(url, { headers, signal: this.signal ?? null });
    if (!response.ok || !response.body) throw unreadable(response);
    // A server without ranges sends all of it: what comes before is read over what follows.
    let skip = response.status === 206 ? 0 : start;
    const size = this.manifest.chunk_nbytes;
    const { read, cancel } = bytesOf(response.body);
    // The same memory for all chunks: the browser would let a gigabyte of dead ones pile up.
    let memory = new ArrayBuffer(Math.min(size, end - start));
    try {
      for (let left = end - start, filled = 0; left > 0; ) {
        const wanted = skip ? Math.min(skip, memory.byteLength) : Math.min(size, left) - filled;
        const value = await read(new Uint8Array(memory, filled, wanted));
        if (!value) return;
        memory = value.buffer;
        if (skip) {
          skip -= value.length;
          continue;
        }
        filled += value.length;
        if (filled < Math.min(size, left)) continue;
        yield new Uint8Array(memory, 0, filled);
        left -= filled;
        filled = 0;
      }
    } finally {
      await cancel().catch(() => undefined);
    }
  }
}
