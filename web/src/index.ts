/**
 * Runs PyTorch models, and their training steps, on WebGPU: bundles that `torch_webgpu_compile.export` wrote.
 *
 *     const model = await load("bundle/");
 *     const { logits } = await model.run("forward", { ids: [[1, 2, 3]] });
 *     const data = await logits.read();
 */

export type { DType, Elements, ElementsOf } from "./dtypes.js";
export * from "./errors.js";
export type { Entry, Manifest, SizeEntry, StateEntry, StateKind, TensorEntry, Variant } from "./manifest.js";
export type { Input } from "./inputs.js";
export { type Kept, clear, storage } from "./kept.js";
export { type LoadOptions, Model, type Progress, type Statistics, load } from "./model.js";
export type { BundleTypes, EntryName, EntryTypes, Inputs, Results, RunOptions, StateName } from "./signatures.js";
export { readSafetensors, writeSafetensors } from "./safetensors.js";
export { Tensor } from "./tensor.js";
