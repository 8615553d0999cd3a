/** What pipelines share: bundles that `export_pipeline` wrote. */

import type { Tokenizer } from "@huggingface/tokenizers";
import type { Files } from "./files.js";
import { type LoadOptions, load } from "./index.js";
import type { Model } from "./model.js";

/** A file of JSON: checked and kept as the others of the bundle are. */
async function bundled<T>(model: Model, path: string): Promise<T> {
  if (!model.manifest.files[path]) throw new TypeError(`the bundle has no ${path}; write it with export_pipeline`);
  return (await (model as unknown as { files: Files }).files.parsed(path)) as T;
}

/** Loads a bundle of a task, and makes of it and of its description what runs it. */
export async function opened<T extends { task: string }, P>(
  url: string | URL, options: LoadOptions | undefined, task: T["task"], make: (model: Model, about: T) => P | Promise<P>,
): Promise<P> {
  const model = await load(url, options);
  try {
    const about = await bundled<T>(model, "pipeline.json");
    if (about.task !== task) throw new TypeError(`the bundle is of the task ${about.task}, not ${task}`);
    return await make(model, about);
  } catch (error) {
    model.destroy();
    throw error;
  }
}

/** The tokenizer whose files are in a bundle. */
export async function tokenizerOf(model: Model, kind: typeof Tokenizer): Promise<Tokenizer> {
  const [rules, config] = await Promise.all(["tokenizer.json", "tokenizer_config.json"].map((name) => bundled<object>(model, name)));
  return new kind(rules!, config!);
}

/** What somebody gave in the place of something else, for a message. */
export function kindOf(given: unknown): string {
  return given === null || typeof given !== "object" ? String(given) : given.constructor?.name;
}
