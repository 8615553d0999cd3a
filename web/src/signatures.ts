/** What the types of a bundle say of its calls. `export` writes those of each bundle beside it, as `bundle.d.ts`. */

import type { DType } from "./dtypes.js";
import type { Input } from "./inputs.js";
import type { Tensor } from "./tensor.js";

/** The dtypes of an entry's inputs and results, by name. */
export interface EntryTypes { inputs: Record<string, DType>; results: Record<string, DType> }

/** What `bundle.d.ts` says of a bundle: its entries, and the dtypes of its states. Without it, any name will do. */
export interface BundleTypes { entries: Record<string, EntryTypes>; states: Record<string, DType> }

export type EntryName<B extends BundleTypes> = keyof B["entries"] & string;
export type StateName<B extends BundleTypes> = keyof B["states"] & string;

type InputsOf<E extends EntryTypes> = { [K in keyof E["inputs"]]: Input<E["inputs"][K]> };
export type Inputs<B extends BundleTypes, N extends EntryName<B>> = InputsOf<B["entries"][N]>;

type ResultsOf<E extends EntryTypes> = { [K in keyof E["results"]]: Tensor<E["results"][K]> };
export type Results<B extends BundleTypes, N extends EntryName<B>> = ResultsOf<B["entries"][N]>;

export interface RunOptions {
  /** Ends a call that waits for what data decide, between two steps. */
  signal?: AbortSignal;
}

/** What follows the name of an entry in a call: its inputs, which it may have none of, and options. */
export type CallArguments<I> = {} extends I ? [inputs?: I, options?: RunOptions] : [inputs: I, options?: RunOptions];
