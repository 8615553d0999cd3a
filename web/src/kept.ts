/** What the browser keeps of bundles: chunks of files by their hashes, and the manifests that name them. */

import type { Manifest } from "./manifest.js";

/** A bundle that the browser keeps; `used` is when it was last loaded from its server. What several share, one of them counts. */
export interface Kept { url: string; nbytes: number; used: Date }

// Followed by a chunk's hash or a bundle's address. No page asks for that: no service worker that looks into all caches gives it away.
const FOLDER = "https://torch-webgpu.invalid/";
const PERIOD = 90 * 864e5; // milliseconds, after which what nobody loads is forgotten
let loading = 0; // bundles, whose chunks no kept manifest names yet

/** The browser's cache; nothing without one, or where the page or the user has forbidden it. */
export async function openCache(isWanted = true): Promise<Cache | undefined> {
  return isWanted ? globalThis.caches?.open("torch-webgpu").catch(() => undefined) : undefined;
}

/** Where a chunk is kept, by its hash, or a manifest, by its bundle's address. */
export function place(name: string): string {
  return FOLDER + name;
}

/** A bundle's folder. */
export function folderOf(url: string | URL): URL {
  return new URL(String(url).replace(/\/?$/, "/"), globalThis.document?.baseURI ?? globalThis.location?.href);
}

/** Loads a bundle of this manifest, which is kept then in place of the last one. */
export async function keeping(cache: Cache | undefined, { href }: URL, { body }: Response, load: () => Promise<void>): Promise<void> {
  loading++; // for ever where it fails: what has come is kept
  await load();
  await cache?.put(place(href), new Response(body, { headers: { date: new Date().toUTCString() } })).catch(() => undefined); // it is full
  if (!--loading) await look(cache, ({ used }) => Date.now() - +used < PERIOD);
}

/** What is kept. Where `stays` is given, all else is forgotten, with the chunks that no manifest names. */
async function look(cache: Cache | undefined, stays?: (bundle: Kept) => boolean): Promise<Kept[]> {
  const bundles: Kept[] = [];
  if (!cache) return bundles;
  const others = new Map((await cache.keys()).map((request): [string, Request] => [request.url.slice(FOLDER.length), request]));
  for (const [url, request] of [...others]) {
    const response = url.includes(":") && (await cache.match(request)); // no hash
    if (!response) continue;
    const bundle = { url, nbytes: 0, used: new Date(response.headers.get("date")!) };
    if (stays && !stays(bundle)) continue;
    const { files, chunk_nbytes: size } = await response.json().catch(() => ({ files: {} })) as Manifest;
    for (const { nbytes, chunks } of Object.values(files)) {
      chunks.forEach((hash, k) => (bundle.nbytes += others.delete(hash) ? Math.min(size, nbytes - k * size) : 0));
    }
    others.delete(url);
    bundles.push(bundle);
  }
  if (stays) for (const request of others.values()) await cache.delete(request);
  return bundles;
}

/** The bundles that the browser keeps for the pages of this origin. */
export async function storage(): Promise<Kept[]> {
  return look(await openCache());
}

/** Forgets what the browser keeps of a bundle, by the URL that `load` takes, or of all. */
export async function clear(url?: string | URL): Promise<void> {
  await look(await openCache(), (bundle) => url !== undefined && bundle.url !== folderOf(url).href);
}
