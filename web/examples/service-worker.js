// Opens a page without a network: keeps the page's own files, and takes newer ones where there is a network.
// What bundles consist of, torch-webgpu keeps itself. Register it in the page:
//
//     navigator.serviceWorker?.register("service-worker.js");

const OWN = ["./", "page.js", "model/torch-webgpu.js"]; // what the page needs besides bundles: yours
const BUNDLES = ["model/"];
const NAME = "page";

const under = (paths, url) => paths.some((path) => url.startsWith(new URL(path, self.registration.scope).href));
const isOfBundle = (url) => under(BUNDLES, url) && /\.(json|safetensors)$/.test(new URL(url).pathname);

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open(NAME).then((cache) => cache.addAll(OWN)));
});
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET" || isOfBundle(request.url) || !under(["./"], request.url)) return;
  event.respondWith((async () => {
    const cache = await caches.open(NAME);
    try {
      const response = await fetch(request);
      if (response.ok) await cache.put(request, response.clone());
      return response;
    } catch (error) {
      const kept = await cache.match(request);
      if (kept) return kept;
      throw error;
    }
  })());
});
