/** The file format of Hugging Face: a header of JSON, and the bytes of tensors. */

import { count, demand, fields, list, record, text } from "./checks.js";
import { type DType, safetensorsName, itemsize } from "./dtypes.js";
import { BundleError } from "./errors.js";

export interface NamedTensor { dtype: DType; sizes: readonly number[]; data: Uint8Array }

/** The bytes of a file with these tensors. */
export function writeSafetensors(tensors: Record<string, NamedTensor>): Uint8Array<ArrayBuffer> {
  const header: Record<string, unknown> = {};
  let end = 0;
  // As the library orders them: the elements of larger types first, which keeps them aligned.
  const width = (name: string): number => itemsize(tensors[name]!.dtype);
  const names = Object.keys(tensors).sort((a, b) => width(b) - width(a) || (a < b ? -1 : 1));
  for (const name of names) {
    const { dtype, sizes, data } = tensors[name]!;
    const label = safetensorsName(dtype);
    if (label.endsWith("UZ")) throw new BundleError(`${name} is ${dtype}, which safetensors does not have; leave it out`);
    header[name] = { dtype: label, shape: sizes, data_offsets: [end, (end += data.length)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const start = 8 + Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(start + end).fill(0x20, 8, start);
  new DataView(file.buffer).setBigUint64(0, BigInt(start - 8), true);
  file.set(text, 8);
  let at = start;
  for (const name of names) {
    file.set(tensors[name]!.data, at);
    at += tensors[name]!.data.length;
  }
  return file;
}

/** A tensor of a file, with the format's name of its dtype. */
export interface FileTensor { dtype: string; sizes: number[]; data: Uint8Array }

const row = fields<{ dtype: string; shape: number[]; data_offsets: number[] }>({ dtype: text, shape: list(count), data_offsets: list(count, 2) });

/**
 * The tensors of a file.
 *
 * @throws BundleError for anything else.
 */
export function readSafetensors(file: Uint8Array): Record<string, FileTensor> {
  const found: Record<string, FileTensor> = Object.create(null);
  try {
    const length = Number(new DataView(file.buffer, file.byteOffset, file.length).getBigUint64(0, true));
    const data = file.subarray(8 + length);
    const header: unknown = JSON.parse(new TextDecoder().decode(file.subarray(8, 8 + length)));
    for (const [name, value] of Object.entries(record(header, "its header"))) {
      if (name === "__metadata__") continue;
      const { dtype, shape, data_offsets: [start, end] } = row(value, name);
      demand(start! <= end! && end! <= data.length, name, "lies outside of it");
      found[name] = { dtype, sizes: shape, data: data.subarray(start, end) };
    }
  } catch (error) {
    throw new BundleError(`this is no safetensors file: ${(error as Error).message}; take another one`);
  }
  return found;
}
