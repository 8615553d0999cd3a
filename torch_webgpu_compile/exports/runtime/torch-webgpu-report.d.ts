/**
 * What a model does with the GPU: which kernels take how long, what is in its memory, and why this variant runs.
 *
 *     import { report } from "torch-webgpu/report";
 *     const { kernels, gpuMemory } = await report(model, "forward", { ids: [[1, 2, 3]] });
 *     console.table(kernels);
 */

import type { StateKind, DType, BundleTypes, EntryName, Model, Inputs } from "./torch-webgpu.js";
/** A kernel in one call, on average; `milliseconds` are null without timestamps. */
export interface KernelReport {
    name: string;
    dispatches: number;
    milliseconds: number | null;
}
export interface StateReport {
    name: string;
    kind: StateKind;
    dtype: DType;
    nbytes: number;
}
export interface Report {
    /** The variant that runs, and why. */
    variant: {
        name: string;
        reason: string;
    };
    /** Of each entry: one plan, or several that data choose among (`composed`). */
    entries: Record<string, "plain" | "composed">;
    /** Bytes on the GPU: all, those of states, the largest first, and the rest: constants, intermediates, inputs and results. */
    gpuMemory: {
        nbytes: number;
        ofStates: number;
        ofOthers: number;
        byState: StateReport[];
    };
    /** Of a call, from its start to the end of its work on the GPU; null where none was asked for. */
    milliseconds: number | null;
    /** Those of a call that take longest first; empty where none was asked for. */
    kernels: KernelReport[];
    /** How the kernels' times were found, or why there are none. */
    timing: string;
}
export interface ReportOptions {
    /** How many calls are timed; 10 by default. */
    calls?: number;
}
/**
 * Reports on a model, and on calls of one of its entries.
 *
 * The entry is called once, and then twice as often as is timed: its states change as they do in any call. What else the page
 * has the device do meanwhile is counted with it. Browsers round timestamps, Chrome to 0.1 ms: an average of more calls is finer.
 *
 * @param name of an entry; without it, nothing is called.
 * @param inputs as of `model.run`.
 * @throws what `model.run` does.
 */
export declare function report<B extends BundleTypes, N extends EntryName<B>>(model: Model<B>, name?: N, inputs?: Inputs<B, N>, { calls }?: ReportOptions): Promise<Report>;
export {};
