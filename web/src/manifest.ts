/** `manifest.json`: its types, and whether what was fetched is one. A bundle may be anything. */

import { type Check, below, count, demand, dtype, fields, flag, is, list, oneOf, optional, record, refuse, table, text } from "./checks.js";
import { type DType, itemsize } from "./dtypes.js";
import { BundleError } from "./errors.js";
import { type Expr, exprOf } from "./expressions.js";
import { numel } from "./layout.js";

export interface FileEntry { nbytes: number; sha256: string; chunks: string[] }
export type StateKind = "parameter" | "buffer" | "optimizer" | "tensor";
export interface StateEntry {
  kind: StateKind; dtype: DType; sizes: number[]; changes: boolean; file: string | null; offset: number;
}
export interface SizeEntry { name: string; low: number; high: number; input: string; dim: number }
export interface ArgumentEntry { input: string | null; state: string | null; seeds: number | null }
export interface TensorEntry { dtype: DType; sizes: Expr[] }
/** A size is null where data decide it. */
export interface ResultTensor { dtype: DType; sizes: (Expr | null)[] }
export interface ResultEntry { tensor: ResultTensor; output: number | null; input: string | null; state: string | null }
export interface Entry {
  plan: string;
  sizes: Record<string, SizeEntry>;
  arguments: ArgumentEntry[];
  inputs: Record<string, TensorEntry>;
  results: Record<string, ResultEntry>;
  structure: string;
}
export interface Variant {
  name: string; features: string[]; limits: Record<string, number>; kernels: string;
  state: Record<string, StateEntry>; entries: Record<string, Entry>;
}
export interface Manifest {
  format: string; version: number; name: string; producer: string; chunk_nbytes: number;
  files: Record<string, FileEntry>; variants: Variant[];
}

const LARGEST_STATE = 2 ** 40;
const LARGEST_CHUNK = 1 << 26;
const MOST_SEEDS = 1 << 20;
const MOST_DIMS = 64;

const hash = is<string>((data) => typeof data === "string" && /^[0-9a-f]{64}$/.test(data), "is no SHA-256");
const path = is<string>(
  (data) => typeof data === "string" && /^([\w-][\w.-]*\/)*[\w-][\w.-]*\.(json|safetensors)$/.test(data),
  "is no path inside of the bundle");

const file = fields<FileEntry>({ nbytes: count, sha256: hash, chunks: list(hash, 1 << 24) });
const state = fields<StateEntry>({
  kind: oneOf("parameter", "buffer", "optimizer", "tensor"),
  dtype, sizes: list(count, MOST_DIMS), changes: flag, file: optional(path), offset: count,
});
const argument = fields<ArgumentEntry>({
  input: optional(text), state: optional(text),
  seeds: optional(below(MOST_SEEDS)),
});
const size = fields<SizeEntry>({ name: text, low: count, high: count, input: text, dim: count });

const entry: Check<Entry> = (data, at) => {
  const sizes = table(size)(record(data, at).sizes, `${at}.sizes`);
  const expr = exprOf(new Set(Object.keys(sizes)));
  const tensor = fields<TensorEntry>({ dtype, sizes: list(expr, MOST_DIMS) });
  const result = fields<ResultTensor>({ dtype, sizes: list(optional(expr), MOST_DIMS) });
  const found = fields<Entry>({
    plan: path, sizes: () => sizes, arguments: list(argument), inputs: table(tensor),
    results: table(fields<ResultEntry>({ tensor: result, output: optional(count), input: optional(text), state: optional(text) })),
    structure: text,
  })(data, at);
  for (const [symbol, { input, dim, low, high }] of Object.entries(sizes)) {
    // The dimension is just the symbol: {"c": 0, "t": [[1, [symbol, …]]]}.
    const expr = found.inputs[input]?.sizes[dim] as { c: number; t: unknown[][] } | undefined;
    const isSymbol = expr?.c === 0 && expr.t.length === 1 && expr.t[0]![0] === 1 && expr.t[0]!.length === 2 &&
      (expr.t[0]![1] as unknown[])[0] === symbol;
    demand(isSymbol && low <= high, `${at}.sizes.${symbol}`, "is no dimension of an input");
  }
  return found;
};

const variant = fields<Variant>({
  name: text, features: list(oneOf("shader-f16")), limits: table(count), kernels: path, state: table(state), entries: table(entry),
});

const manifest = fields<Manifest>({
  format: text, version: count, name: text, producer: text, chunk_nbytes: count, files: table(file), variants: list(variant),
});

/** Bytes of a state. */
export function stateBytes({ sizes, dtype }: StateEntry): number {
  return numel(sizes) * itemsize(dtype);
}

/**
 * The manifest in parsed JSON.
 *
 * @throws BundleError for anything else.
 */
export function checkManifest(data: unknown): Manifest {
  const { format, version } = record(data, "manifest.json");
  demand(format === "torch-webgpu-bundle", "manifest.json", "is of no bundle");
  if (version !== 1) {
    throw new BundleError(`the bundle has version ${String(version)}, this runtime reads 1; export again, or use another runtime`);
  }
  const found = manifest(data, "manifest.json");
  const chunk = found.chunk_nbytes;
  demand(chunk > 0 && chunk % 4 === 0 && chunk <= LARGEST_CHUNK, "chunk_nbytes", "is no multiple of 4 up to 64 MiB");
  for (const [name, { nbytes, chunks }] of Object.entries(found.files)) {
    path(name, `files.${name}`);
    demand(chunks.length === Math.ceil(nbytes / chunk), `files.${name}.chunks`, "are not as many as there are");
  }
  demand(found.variants.length > 0, "variants", "are missing");
  for (const each of found.variants) checkVariant(each, found);
  return found;
}

function checkVariant({ kernels, state, entries }: Variant, { files }: Manifest): void {
  for (const [name, row] of Object.entries(state)) {
    const nbytes = stateBytes(row);
    demand(nbytes <= LARGEST_STATE && row.sizes.every((n) => n <= LARGEST_STATE), `state ${name}`, "is too large");
    if (row.file === null) continue;
    demand(row.offset + nbytes <= (files[row.file]?.nbytes ?? -1), `state ${name}`, "lies outside of its file");
  }
  for (const used of [kernels, ...Object.values(entries).map(({ plan }) => plan)]) {
    if (!files[used]) refuse(used, "is not among the files");
  }
  for (const [name, { inputs, results, arguments: given }] of Object.entries(entries)) {
    for (const [label, row] of [...Object.entries(given), ...Object.entries(results)]) {
      const { input, state: kept, ...others } = row;
      const sources = [input, kept, "seeds" in others ? others.seeds : others.output].filter((source) => source !== null);
      const exists = (input === null || input in inputs) && (kept === null || kept in state);
      demand(sources.length === 1 && exists, `${name}: ${"seeds" in row ? "argument" : "result"} ${label}`, "is not one thing that there is");
    }
  }
}
