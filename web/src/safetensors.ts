/** The file format of Hugging Face: a header of JSON, and the bytes of tensors. */

import { type DType, SAFETENSORS } from "./dtypes.js";
import { BundleError } from "./errors.js";

export interface NamedTensor { dtype: DType; sizes: readonly number[]; data: Uint8Array }

/** The bytes of a file with these tensors. */
export function writeSafetensors(tensors: Record<string, NamedTensor>): Uint8Array<ArrayBuffer> {
  const header: Record<string, unknown> = {};
  let end = 0;
  // As the library orders them: the elements of larger types first, which keeps them aligned.
  const width = (tensor: NamedTensor): number => tensor.data.length / Math.max(1, tensor.sizes.reduce((a, b) => a * b, 1));
  const names = Object.keys(tensors).sort((a, b) => width(tensors[b]!) - width(tensors[a]!) || (a < b ? -1 : 1));
  for (const name of names) {
    const { dtype, sizes, data } = tensors[name]!;
    const label = SAFETENSORS[dtype];
    if (!label) throw new BundleError(`${name} is ${dtype}, which safetensors files do not have; leave it out`);
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

/** The tensors of a file: dtype by the format's name, sizes, and bytes. */
export function readSafetensors(file: Uint8Array): Record<string, { dtype: string; sizes: number[]; data: Uint8Array }> {
  const refuse = (): never => {
    throw new BundleError("this is no safetensors file; choose another one");
  };
  if (file.length < 8) refuse();
  const length = Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
  if (length > file.length - 8) refuse();
  const found: Record<string, { dtype: string; sizes: number[]; data: Uint8Array }> = Object.create(null);
  try {
    const header: unknown = JSON.parse(new TextDecoder().decode(file.subarray(8, 8 + length)));
    for (const [name, row] of Object.entries(header as Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }>)) {
      if (name === "__metadata__") continue;
      const [start, end] = row.data_offsets;
      if (!(start >= 0 && start <= end && 8 + length + end <= file.length)) refuse();
      found[name] = { dtype: row.dtype, sizes: row.shape, data: file.subarray(8 + length + start, 8 + length + end) };
    }
  } catch {
    refuse();
  }
  return found;
}
