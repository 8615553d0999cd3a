/** `Files`: a bundle's files, chunk by chunk: fetched, checked by their hashes, and kept in the browser's cache. */

import { demand, refuse } from "./checks.js";
import { BundleError } from "./errors.js";
import { place } from "./kept.js";
import type { Manifest } from "./manifest.js";

export type Fetch = typeof fetch;

const TRIES = 4;
const LARGEST_JSON = 1 << 28;

/** A SHA-256 in hexadecimal. */
export async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  if (!globalThis.crypto?.subtle) throw new BundleError("hashes need https or localhost; use one of them");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Why a response has no content. */
function unreadable({ url, status }: Response): Error {
  const kind = status >= 500 || status === 429 ? TypeError : BundleError; // a server may recover: `fetch` fails alike
  return new kind(`${url} cannot be read: HTTP ${status}; check the address, and that it was uploaded`);
}

/** A response that has content. */
export async function fetched(fetcher: Fetch, address: URL, init: RequestInit): Promise<Response> {
  const response = await fetcher(address, init);
  if (!response.ok) throw unreadable(response);
  return response;
}

export class Files {
  /**
   * @param signal ends what is read while it is set.
   */
  constructor(
    private readonly manifest: Manifest,
    private readonly base: URL,
    private readonly fetcher: Fetch,
    private cache: Cache | null | undefined,
    private readonly onBytes: (count: number) => void,
    public signal: AbortSignal | undefined,
  ) {}

  /** A whole file of JSON. */
  async parsed(path: string): Promise<unknown> {
    const { nbytes } = this.manifest.files[path]!;
    demand(nbytes <= LARGEST_JSON, path, "is too large");
    const all = new Uint8Array(nbytes);
    await this.read(path, [[0, nbytes]], (start, chunk) => all.set(chunk, start));
    try {
      return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(all));
    } catch (error) {
      return refuse(path, `is no JSON (${(error as Error).message})`);
    }
  }

  /**
   * Reads the chunks of a file that these ranges of bytes touch, in order.
   *
   * Their bytes are all in the same memory, one chunk at a time: what is used later has to be copied.
   */
  async read(
    path: string, ranges: readonly [number, number][], use: (start: number, chunk: Uint8Array<ArrayBuffer>) => unknown,
  ): Promise<void> {
    const { chunks } = this.manifest.files[path]!;
    const size = this.manifest.chunk_nbytes;
    const wanted = new Set<number>();
    for (const [start, end] of ranges) {
      for (let k = Math.floor(start / size); k * size < end; k++) wanted.add(k);
    }
    const order = [...wanted].sort((a, b) => a - b);
    const room: Room = { memory: new ArrayBuffer(0) };
    for (let at = 0; at < order.length; ) {
      this.signal?.throwIfAborted();
      const first = order[at]!;
      const cached = await this.cached(path, first, room);
      if (cached) {
        this.onBytes(cached.length);
        await use(first * size, cached);
        at++;
        continue;
      }
      // All that follow without a gap and are not in the cache come in one response.
      let count = 1;
      while (order[at + count] === first + count && !(await this.cache?.match(place(chunks[first + count]!)))) count++;
      await this.fetchChunks(path, first, count, room, use);
      at += count;
    }
  }

  private nbytesOf(path: string, chunk: number): number {
    const size = this.manifest.chunk_nbytes;
    return Math.min(size, this.manifest.files[path]!.nbytes - chunk * size);
  }

  private async cached(path: string, chunk: number, room: Room): Promise<Uint8Array<ArrayBuffer> | null> {
    const hash = this.manifest.files[path]!.chunks[chunk]!;
    const found = await this.cache?.match(place(hash));
    if (!found) return null;
    const data = await reading(found, room)(this.nbytesOf(path, chunk)).catch(() => null);
    if (data && (await sha256(data)) === hash) return data;
    await this.cache?.delete(place(hash)); // damaged: fetched again
    return null;
  }

  /** Fetches `count` chunks from `first` on; goes on where it was when a download breaks. */
  private async fetchChunks(
    path: string, first: number, count: number, room: Room, use: (start: number, chunk: Uint8Array<ArrayBuffer>) => unknown,
  ): Promise<void> {
    const { chunks } = this.manifest.files[path]!;
    const size = this.manifest.chunk_nbytes;
    const end = first + count;
    let failures = 0;
    for (let k = first; k < end; ) {
      try {
        for await (const chunk of this.chunksOf(path, k, end, room, failures ? "reload" : "default")) {
          const wanted = chunks[k]!;
          if ((await sha256(chunk)) !== wanted) {
            if (!failures) throw new TypeError(); // it may be another release's, kept by a cache of HTTP
            throw new BundleError(`${path} is damaged: chunk ${k} has another SHA-256; upload the bundle again`);
          }
          await this.cache?.put(place(wanted), new Response(chunk)).catch(() => (this.cache = null)); // it is full
          this.onBytes(chunk.length);
          await use(k++ * size, chunk);
          failures = 0;
        }
      } catch (error) {
        if (!(error instanceof TypeError)) throw error;
        if (++failures === TRIES) {
          throw new BundleError(`${path} cannot be read: ${error.message}; load again later, what has come is kept`);
        }
        await new Promise((resolve) => setTimeout(resolve, 100 * 4 ** failures));
        this.signal?.throwIfAborted();
      }
    }
  }

  /** The chunks `first` … `end` of a file, from one response. */
  private async *chunksOf(
    path: string, first: number, end: number, room: Room, cache: RequestCache,
  ): AsyncGenerator<Uint8Array<ArrayBuffer>> {
    const size = this.manifest.chunk_nbytes;
    const { nbytes } = this.manifest.files[path]!;
    const whole = !first && end * size >= nbytes;
    const headers: HeadersInit = whole ? {} : { Range: `bytes=${first * size}-${Math.min(end * size, nbytes) - 1}` };
    const response = await fetched(this.fetcher, new URL(path, this.base), { headers, cache, signal: this.signal ?? null });
    const read = reading(response, room);
    try {
      // A server without ranges sends all of it.
      for (let k = response.status === 206 ? first : 0; k < end; k++) {
        const chunk = await read(this.nbytesOf(path, k));
        if (k >= first) yield chunk;
      }
    } finally {
      await read(0).catch(() => undefined);
    }
  }
}

/** Memory that one chunk after the other is read into. */
interface Room { memory: ArrayBuffer }

/** Reads so many bytes of a response's body, which have to be there, or ends it for 0. */
function reading({ body }: Response, room: Room): (nbytes: number) => Promise<Uint8Array<ArrayBuffer>> {
  let reader: ReadableStreamBYOBReader | ReadableStreamDefaultReader<Uint8Array>;
  try {
    reader = body!.getReader({ mode: "byob" }); // which leaves no garbage
  } catch {
    reader = body!.getReader();
  }
  let rest: Uint8Array = new Uint8Array(0);
  return async (nbytes) => {
    if (!nbytes) await reader.cancel();
    if (room.memory.byteLength < nbytes) room.memory = new ArrayBuffer(nbytes);
    for (let filled = 0; filled < nbytes; ) {
      const left = nbytes - filled;
      if (reader instanceof ReadableStreamDefaultReader) {
        if (!rest.length) rest = (await reader.read()).value ?? missing();
        const piece = rest.subarray(0, left);
        new Uint8Array(room.memory).set(piece, filled);
        rest = rest.subarray(piece.length);
        filled += piece.length;
      } else {
        const { value, done } = await reader.read(new Uint8Array(room.memory, filled, left));
        if (done) missing();
        room.memory = value!.buffer;
        filled += value!.length;
      }
    }
    return new Uint8Array(room.memory, 0, nbytes);
  };
}

function missing(): never {
  throw new TypeError("it ended early");
}
