/** `manifest.json`: its types, and whether what was fetched is one. A bundle may be anything. */

import { type DType, isDType, itemsize } from "./dtypes.js";
import { BundleError } from "./errors.js";
import { type Expr, checkExpr } from "./expressions.js";

export interface FileEntry { nbytes: number; sha256: string; chunks: string[] }
export type StateKind = "parameter" | "buffer" | "optimizer" | "tensor";
export interface StateEntry {
  kind: StateKind; dtype: DType; sizes: number[]; changes: boolean; file: string | null; offset: number;
}
export interface SizeEntry { name: string; low: number; high: number; input: string; dim: number }
export interface ArgumentEntry { input: string | null; state: string | null; seeds: number | null }
export interface TensorEntry { dtype: DType; sizes: Expr[] }
export interface ResultEntry { tensor: TensorEntry; output: number | null; input: string | null; state: string | null }
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

const LIMITS = new Set([
  "maxBufferSize", "maxStorageBufferBindingSize", "maxStorageBuffersPerShaderStage",
  "maxComputeInvocationsPerWorkgroup", "maxComputeWorkgroupSizeX", "maxComputeWorkgroupStorageSize",
]);
const FEATURES = new Set(["shader-f16"]);
const MOST = 1 << 16;

type Check<T> = (data: unknown, at: string) => T;

export function refuse(at: string, problem: string): never {
  throw new BundleError(`manifest.json: ${at} ${problem}; export the model again`);
}

const text: Check<string> = (data, at) =>
  typeof data === "string" && data.length <= 10_000 ? data : refuse(at, "is no text");
const flag: Check<boolean> = (data, at) => (typeof data === "boolean" ? data : refuse(at, "is neither true nor false"));
const count: Check<number> = (data, at) =>
  Number.isSafeInteger(data) && (data as number) >= 0 ? (data as number) : refuse(at, "is no size");
const hash: Check<string> = (data, at) =>
  typeof data === "string" && /^[0-9a-f]{64}$/.test(data) ? data : refuse(at, "is no SHA-256");
const path: Check<string> = (data, at) =>
  typeof data === "string" && /^[\w-]+(\/[\w-]+)*\.(json|safetensors)$/.test(data.replace(/\.(?=\w+\.)/g, "_"))
    ? data : refuse(at, "is no path inside of the bundle");
const dtype: Check<DType> = (data, at) => (isDType(data) ? data : refuse(at, "is no dtype"));
const optional = <T>(check: Check<T>): Check<T | null> => (data, at) => (data === null ? null : check(data, at));

function record(data: unknown, at: string): Record<string, unknown> {
  if (typeof data !== "object" || data === null || Array.isArray(data)) refuse(at, "is no object");
  return data as Record<string, unknown>;
}

function fields<T>(checks: { [K in keyof T]: Check<T[K]> }): Check<T> {
  return (data, at) => {
    const given = record(data, at);
    const found: Record<string, unknown> = {};
    for (const name of Object.keys(checks)) {
      found[name] = checks[name as keyof T](given[name], at ? `${at}.${name}` : name);
    }
    return found as T;
  };
}

function table<T>(check: Check<T>): Check<Record<string, T>> {
  return (data, at) => {
    const rows = Object.entries(record(data, at));
    if (rows.length > MOST) refuse(at, "has too many rows");
    // Without a prototype: a name may be anything, "__proto__" too.
    const found: Record<string, T> = Object.create(null);
    for (const [name, value] of rows) found[name] = check(value, `${at}.${name.slice(0, 100)}`);
    return found;
  };
}

function list<T>(check: Check<T>, most = MOST): Check<T[]> {
  return (data, at) => {
    if (!Array.isArray(data) || data.length > most) refuse(at, "is no list, or too long");
    return (data as unknown[]).map((value, k) => check(value, `${at}[${k}]`));
  };
}

const file = fields<FileEntry>({ nbytes: count, sha256: hash, chunks: list(hash, 1 << 24) });
const state = fields<StateEntry>({
  kind: (data, at) =>
    ["parameter", "buffer", "optimizer", "tensor"].includes(data as string) ? (data as StateKind) : refuse(at, "is no kind"),
  dtype, sizes: list(count, 64), changes: flag, file: optional(path), offset: count,
});
const argument = fields<ArgumentEntry>({ input: optional(text), state: optional(text), seeds: optional(count) });
const size = fields<SizeEntry>({ name: text, low: count, high: count, input: text, dim: count });

function entry(data: unknown, at: string): Entry {
  const symbols = new Set(Object.keys(record(record(data, at).sizes, `${at}.sizes`)));
  const expr: Check<Expr> = (value, place) => {
    try {
      checkExpr(value, symbols);
    } catch (error) {
      refuse(place, `is wrong: ${(error as Error).message}`);
    }
    return value as Expr;
  };
  const tensor = fields<TensorEntry>({ dtype, sizes: list(expr, 64) });
  const found = fields<Entry>({
    plan: path, sizes: table(size), arguments: list(argument), inputs: table(tensor),
    results: table(fields<ResultEntry>({ tensor, output: optional(count), input: optional(text), state: optional(text) })),
    structure: text,
  })(data, at);
  for (const [symbol, { input, dim, low, high }] of Object.entries(found.sizes)) {
    const sizes = Object.hasOwn(found.inputs, input) ? found.inputs[input]!.sizes[dim] : undefined;
    const isSymbol = typeof sizes === "object" && sizes.c === 0 && sizes.t.length === 1 &&
      sizes.t[0]!.length === 2 && sizes.t[0]![0] === 1 && (sizes.t[0]![1] as unknown[])[0] === symbol;
    if (!isSymbol || low > high) refuse(`${at}.sizes.${symbol}`, "is no dimension of an input");
  }
  return found;
}

function variant(data: unknown, at: string): Variant {
  const found = fields<Variant>({
    name: text,
    features: list((v, p) => (FEATURES.has(v as string) ? (v as string) : refuse(p, "is a feature that is not known"))),
    limits: table(count), kernels: path, state: table(state), entries: table(entry),
  })(data, at);
  for (const name of Object.keys(found.limits)) {
    if (!LIMITS.has(name)) refuse(`${at}.limits.${name}`, "is a limit that is not known");
  }
  return found;
}

/** Bytes of a state. */
export function stateBytes(entry: StateEntry): number {
  return entry.sizes.reduce((a, b) => a * b, 1) * itemsize(entry.dtype);
}

/** The manifest in parsed JSON. Throws `BundleError` for anything else. */
export function checkManifest(data: unknown): Manifest {
  const { format, version } = record(data, "it");
  if (format !== "torch-webgpu-bundle") refuse("it", "is of no bundle");
  if (version !== 1) {
    throw new BundleError(`the bundle has version ${String(version)}, this runtime reads 1; use the runtime that fits, or export again`);
  }
  const found = fields<Manifest>({
    format: text, version: count, name: text, producer: text, chunk_nbytes: count, files: table(file), variants: list(variant, 64),
  })(data, "");
  const chunk = found.chunk_nbytes;
  if (chunk < 4 || chunk % 4 || chunk > 1 << 26) refuse("chunk_nbytes", "is no multiple of 4 up to 64 MiB");
  for (const [name, { nbytes, chunks }] of Object.entries(found.files)) {
    path(name, `files.${name}`);
    if (chunks.length !== Math.ceil(nbytes / chunk)) refuse(`files.${name}.chunks`, "are not as many as there are");
  }
  if (!found.variants.length) refuse("variants", "are missing");
  for (const each of found.variants) {
    const used = [each.kernels, ...Object.values(each.entries).map((e) => e.plan)];
    for (const name of used) if (!Object.hasOwn(found.files, name)) refuse(name, "is not among the files");
    for (const [name, s] of Object.entries(each.state)) {
      const nbytes = stateBytes(s);
      if (!Number.isSafeInteger(nbytes) || nbytes > 2 ** 40) refuse(`state ${name}`, "is too large");
      if (s.file === null) continue;
      if (!Object.hasOwn(found.files, s.file) || s.offset + nbytes > found.files[s.file]!.nbytes) {
        refuse(`state ${name}`, "lies outside of its file");
      }
    }
  }
  return found;
}
