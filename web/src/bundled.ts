/** Files that `export_pipeline` put into a bundle. */

import type { Model } from "./model.js";
import type { Files } from "./files.js";

/** A file of JSON: checked and kept as the others of the bundle are. */
export async function bundled<T>(model: Model, path: string): Promise<T> {
  if (!model.manifest.files[path]) throw new TypeError(`the bundle has no ${path}; write it with export_pipeline`);
  return (await (model as unknown as { files: Files }).files.parsed(path)) as T;
}

/** What a pipeline has to know. */
export async function description<T extends { task: string }>(model: Model, task: T["task"]): Promise<T> {
  const found = await bundled<T>(model, "pipeline.json");
  if (found.task !== task) throw new TypeError(`the bundle is of the task ${found.task}, not ${task}`);
  return found;
}
