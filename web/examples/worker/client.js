// The page's side of the worker: `run` looks like that of a model, but gives elements, not tensors.
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let calls = 0;

/** Told how much of the bundle has been loaded. */
export const loading = new EventTarget();

worker.onmessage = ({ data: { id, results, error, progress } }) => {
  if (progress) return void loading.dispatchEvent(new CustomEvent("progress", { detail: progress }));
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (error) reject(Object.assign(new Error(error.message), { name: error.name }));
  else resolve(results);
};
worker.onerror = ({ message }) => {
  for (const { reject } of waiting.values()) reject(new Error(message ?? "the worker could not be loaded"));
  waiting.clear();
};

/** Results by name: {shape, data}, where data is a typed array. */
export function run(entry, inputs) {
  return new Promise((resolve, reject) => {
    const id = calls++;
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, entry, inputs });
  });
}
