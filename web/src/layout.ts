/** `Layout`: where a tensor's elements are in its memory. */

/** Sizes, and strides and the first element's place in elements. */
export interface Layout { shape: readonly number[]; strides: readonly number[]; offset: number }

/** The number of elements. */
export const numel = (shape: readonly number[]): number => shape.reduce((a, b) => a * b, 1);

/** Elements from the start of the memory to the last one; 0 for an empty tensor. */
export function span({ shape, strides, offset }: Layout): number {
  return numel(shape) && shape.reduce((last, size, dim) => last + (size - 1) * strides[dim]!, offset + 1);
}

/** Whether elements follow each other in rows, without gaps. */
export function inRows({ shape, strides }: Layout): boolean {
  let step = 1;
  return !numel(shape) || shape.every((_, k) => {
    const dim = shape.length - 1 - k;
    const fits = shape[dim] === 1 || strides[dim] === step;
    step *= shape[dim]!;
    return fits;
  });
}

/** The layout of a tensor in rows. */
export function rows(shape: readonly number[]): Layout {
  return { shape, strides: shape.map((_, dim) => numel(shape.slice(dim + 1))), offset: 0 };
}
