/**
 * Runs PyTorch models, and their training steps, on WebGPU: bundles that `torch_webgpu_compile.export` wrote.
 *
 *     const model = await load("bundle/");
 *     const { logits } = await model.run("forward", { ids: [[1, 2, 3]] });
 *     const data = await logits.read();
 */

/** PyTorch's names. */
export type DType = (typeof DTYPES)[number];
export type Elements = ElementsOf<DType>;
/** The elements of a dtype: float16, bfloat16 and floats of 8 bits are given as float32, bool as bytes of 0 and 1. */
export type ElementsOf<D extends DType> = D extends keyof Arrays ? Arrays[D] : Float32Array;
/** Base of all errors of this module. */
export declare class TorchWebGPUError extends Error {
}
/** The browser, or this machine, has no usable WebGPU. */
export declare class WebGPUUnavailableError extends TorchWebGPUError {
}
/** A bundle is damaged, of another version, or not one that may be run. */
export declare class BundleError extends TorchWebGPUError {
}
/** A call got something that the entry does not take. */
export declare class InputError extends TorchWebGPUError {
}
/** The GPU went away; `Model.restore()` goes on. */
export declare class DeviceLostError extends TorchWebGPUError {
}
/** The GPU has not enough memory. */
export declare class OutOfMemoryError extends TorchWebGPUError {
}
/** A tensor of indices has one for which there is no element. */
export declare class IndexOutOfRangeError extends TorchWebGPUError {
}
export interface Entry {
    plan: string;
    sizes: Record<string, SizeEntry>;
    arguments: ArgumentEntry[];
    inputs: Record<string, TensorEntry>;
    results: Record<string, ResultEntry>;
    structure: string;
}
export interface Manifest {
    format: string;
    version: number;
    name: string;
    producer: string;
    chunk_nbytes: number;
    files: Record<string, FileEntry>;
    variants: Variant[];
}
export interface SizeEntry {
    name: string;
    low: number;
    high: number;
    input: string;
    dim: number;
}
export interface StateEntry {
    kind: StateKind;
    dtype: DType;
    sizes: number[];
    changes: boolean;
    file: string | null;
    offset: number;
}
export type StateKind = "parameter" | "buffer" | "optimizer" | "tensor";
export interface TensorEntry {
    dtype: DType;
    sizes: Expr[];
}
export interface Variant {
    name: string;
    features: string[];
    limits: Record<string, number>;
    kernels: string;
    state: Record<string, StateEntry>;
    entries: Record<string, Entry>;
}
/**
 * What an input takes: a result, or numbers in rows. Sizes follow from lists in lists, or are given; where they are not,
 * they are those of the entry, of which one may follow from the number of elements.
 */
export type Input<D extends DType = DType> = Tensor<D> | NumberList | NestedNumbers | {
    data: Tensor<D> | NumberList;
    shape: readonly number[];
};
/** A bundle that the browser keeps; `used` is when it was last loaded from its server. What several share, one of them counts. */
export interface Kept {
    url: string;
    nbytes: number;
    used: Date;
}
/** Forgets what the browser keeps of a bundle, by the URL that `load` takes, or of all. */
export declare function clear(url?: string | URL): Promise<void>;
/** The bundles that the browser keeps for the pages of this origin. */
export declare function storage(): Promise<Kept[]>;
export interface LoadOptions extends DeviceOptions {
    /** Told of every chunk of the files, and of every pipeline. */
    progress?: (progress: Progress) => void;
    /** Ends loading. */
    signal?: AbortSignal;
    /** Whether files are kept in the browser's cache; true by default. */
    cache?: boolean;
    /** Of random numbers; by default another one each time. */
    seed?: bigint | number;
    /** Whether a lost device is replaced at once, with the last checkpoint. */
    autoRestore?: boolean;
    /** Told of a lost device. */
    onLost?: (error: DeviceLostError) => void;
    /** Instead of the browser's. */
    fetch?: Fetch;
}
/** A loaded bundle. `load` makes it. */
export declare class Model<B extends BundleTypes = BundleTypes> {
    readonly manifest: Manifest;
    private readonly base;
    private readonly fetcher;
    private readonly options;
    /** The variant that runs. */
    variant: Variant;
    private draws;
    private gpu;
    private pool;
    private states;
    private readback;
    private files;
    private callables;
    private saved;
    private restoring;
    /** The end of a call that waits between what it runs: others come after it. */
    private composing;
    private isDestroyed;
    private counted;
    get device(): GPUDevice;
    /** What the browser says of the GPU; null with a device of the caller's. */
    get adapterInfo(): GPUAdapterInfo | null;
    get entries(): Record<string, Entry>;
    get statistics(): Statistics;
    /** Of random numbers. Setting it starts them again. */
    get seed(): bigint;
    set seed(seed: bigint | number);
    private install;
    /** The names of all states, with what they are. */
    get stateKinds(): Record<string, StateKind>;
    private state;
    /** The elements of a state. */
    readState<N extends StateName<B>>(name: N): Promise<ElementsOf<B["states"][N]>>;
    /** Gives a state other elements; bytes as they are for a dtype that JavaScript has no numbers for. */
    writeState(name: StateName<B>, data: NumberList): void;
    /** Bytes of states as they are between two calls. */
    private bytesOf;
    /** A safetensors file with states of these kinds; PyTorch's `load_state_dict` takes parameters and buffers. */
    save(kinds?: readonly StateKind[]): Promise<Uint8Array<ArrayBuffer>>;
    /** Takes states from a safetensors file; others stay as they are. Throws before anything is changed. */
    loadState(file: Uint8Array): void;
    /** Gives what was changed, by calls or by the page, its first values again. */
    resetState(): Promise<void>;
    /** Keeps what was changed, by calls or by the page, in the page's memory, for `restore`. */
    checkpoint(): Promise<void>;
    /**
     * Goes on after the device was lost, or failed: with another one, and the state of the last checkpoint.
     *
     * @param device to use, instead of one of its own.
     */
    restore({ device, signal }?: {
        device?: GPUDevice;
        signal?: AbortSignal;
    }): Promise<void>;
    private lost;
    /** Frees everything. */
    destroy(): void;
    private alive;
    private usable;
    /**
     * Calls an entry. It is submitted when this returns; results are waited for where they are read.
     *
     * @param inputs by name.
     * @throws InputError, DeviceLostError, OutOfMemoryError; the signal's reason.
     */
    run<N extends EntryName<B>>(name: N, ...call: CallArguments<Inputs<B, N>>): Promise<Results<B, N>>;
    private call;
    /** Bytes of new seeds. */
    private drawn;
    /** The memory of a tensor that is an input. */
    private fitting;
    /** The buffer of an input that is not on the GPU, with these bytes. */
    private write;
    private upload;
    private copy;
    /** Prepares what a plan computes from states alone, if they have changed since. */
    private prepare;
    /** Makes what a call computed of states their contents. */
    private change;
    private results;
    /** Waits for all calls so far. Throws what went wrong in them. */
    check(): Promise<void>;
}
export interface Progress {
    loadedBytes: number;
    totalBytes: number;
    pipelines: number;
    totalPipelines: number;
}
/** What a model has done. `copiedBytes` are those of inputs written, results read, and copies between buffers. */
export interface Statistics {
    calls: number;
    dispatches: number;
    copiedBytes: number;
    gpuBytes: number;
}
/**
 * Loads a bundle.
 *
 * @param url of its folder, relative to the page.
 * @typeParam B the type that `export` wrote to the bundle's `bundle.d.ts`: names of entries, inputs, results and states are checked.
 * @throws WebGPUUnavailableError, BundleError, OutOfMemoryError; the signal's reason.
 */
export declare function load<B extends BundleTypes = BundleTypes>(url: string | URL, options?: LoadOptions): Promise<Model<B>>;
/** What `bundle.d.ts` says of a bundle: its entries, and the dtypes of its states. Without it, any name will do. */
export interface BundleTypes {
    entries: Record<string, EntryTypes>;
    states: Record<string, DType>;
}
export type EntryName<B extends BundleTypes> = keyof B["entries"] & string;
/** The dtypes of an entry's inputs and results, by name. */
export interface EntryTypes {
    inputs: Record<string, DType>;
    results: Record<string, DType>;
}
export type Inputs<B extends BundleTypes, N extends EntryName<B>> = InputsOf<B["entries"][N]>;
export type Results<B extends BundleTypes, N extends EntryName<B>> = ResultsOf<B["entries"][N]>;
export interface RunOptions {
    /** Ends a call that waits for what data decide, between two steps. */
    signal?: AbortSignal;
}
export type StateName<B extends BundleTypes> = keyof B["states"] & string;
/**
 * The tensors of a file.
 *
 * @throws BundleError for anything else.
 */
export declare function readSafetensors(file: Uint8Array): Record<string, FileTensor>;
/** The bytes of a file with these tensors. */
export declare function writeSafetensors(tensors: Record<string, NamedTensor>): Uint8Array<ArrayBuffer>;
/** A result of a call. It stays on the GPU until it is read, and may be an input of another call as it is. */
export declare class Tensor<D extends DType = DType> {
    readonly name: string;
    readonly dtype: D;
    private readonly reader;
    private readonly leave;
    get shape(): readonly number[];
    /** The number of elements. */
    get size(): number;
    /** Whether its elements are in rows, without gaps, from the start of its memory. */
    get isContiguous(): boolean;
    /**
     * Its elements, in rows. What was computed so far is waited for; calls made meanwhile go on.
     *
     * @param options.keep leaves the tensor on the GPU; otherwise it is used up, and its memory serves later calls.
     * @throws IndexOutOfRangeError, OutOfMemoryError, DeviceLostError: what went wrong on the GPU.
     */
    read({ keep }?: {
        keep?: boolean | undefined;
    }): Promise<ElementsOf<D>>;
    /** The only element. */
    item(): Promise<number>;
    /** Gives its memory to later calls. */
    dispose(): void;
}
/** Elements as JavaScript sees them; bytes are PyTorch's. */
declare const DTYPES: readonly ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint32", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"];
interface Arrays {
    float64: Float64Array;
    int64: BigInt64Array;
    int32: Int32Array;
    int16: Int16Array;
    int8: Int8Array;
    uint32: Uint32Array;
    uint8: Uint8Array;
    bool: Uint8Array;
}
interface ArgumentEntry {
    input: string | null;
    state: string | null;
    seeds: number | null;
}
interface ResultEntry {
    tensor: ResultTensor;
    output: number | null;
    input: string | null;
    state: string | null;
}
interface FileEntry {
    nbytes: number;
    sha256: string;
    chunks: string[];
}
type Expr = number | {
    c: number;
    t: [number, ...Atom[]][];
};
type NumberList = ArrayLike<number | bigint | boolean>;
type NestedNumbers = number | bigint | boolean | readonly NestedNumbers[];
interface DeviceOptions {
    /** A device to use instead of one of its own. */
    device?: GPUDevice;
    powerPreference?: GPUPowerPreference;
    /** The name of a variant, instead of the first that the device can run. */
    variant?: string;
    /** Caps what the adapter is taken to have, by WebGPU's names of limits: how it would be on a smaller one. */
    limits?: Record<string, number>;
}
type Fetch = typeof fetch;
/** What follows the name of an entry in a call: its inputs, which it may have none of, and options. */
type CallArguments<I> = {} extends I ? [inputs?: I, options?: RunOptions] : [inputs: I, options?: RunOptions];
type InputsOf<E extends EntryTypes> = {
    [K in keyof E["inputs"]]: Input<E["inputs"][K]>;
};
type ResultsOf<E extends EntryTypes> = {
    [K in keyof E["results"]]: Tensor<E["results"][K]>;
};
/** A tensor of a file, with the format's name of its dtype. */
interface FileTensor {
    dtype: string;
    sizes: number[];
    data: Uint8Array;
}
interface NamedTensor {
    dtype: DType;
    sizes: readonly number[];
    data: Uint8Array;
}
/** A size is null where data decide it. */
interface ResultTensor {
    dtype: DType;
    sizes: (Expr | null)[];
}
type Atom = [string, number] | ["//" | "%", Expr, Expr];
export {};
