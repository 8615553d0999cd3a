"""``webgpu::gguf_…``: weights in the blocks of a GGUF file, each row as planes.

A block of a file has the fields of 32 or 256 elements side by side, at odd offsets. Here a row of a
weight (…, K) has each field of all its elements side by side, in their order, as a plane of whole
words: the lowest bits of all elements, their further bits, a byte for the scale of each group of
elements and one for its minimum (both in one where they have four bits each), and the half floats
of each block. No plane is wider than the field in the file, but those of scales of six bits (1 to
4 % of the bytes).

An element is scale · (level - zero) - minimum, or scale · values[level]; ggml-quants.c is the
source of all formats. Products of the parts have at most 24 bits, so that whatever order a kernel
computes them in, they are the numbers that ggml gives, bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import OpOverload
from . import int4

_ALIGNMENT = 4
"""Words of a row are a multiple of it: kernels load so many at a time."""


class Fields(NamedTuple):
    """What blocks consist of; as many elements of a dimension as a block has of a field.

    Attributes:
        levels: uint8 (blocks, elements).
        halves: float16 (blocks, 0 to 2), the scale of the block first.
        scales: int8 (blocks, groups); uint8 if it is an exponent, or scale and minimum in one.
        minimums: int8 (blocks, groups).
    """

    levels: Tensor
    halves: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None


class Format(NamedTuple):
    """How a type of GGUF has its elements.

    Attributes:
        number: in ggml's ``enum ggml_type``.
        block: elements of a block.
        nbytes: of a block in a file.
        bits: of a level, by plane, the lowest first.
        split: the fields of blocks, uint8 (blocks, nbytes).
        halves: half floats of a block.
        group: elements that share a scale; 0 where that is the block's.
        has_minimums: whether a group has a minimum, too; the second half is then its unit, and else
            what is added to all elements of a block.
        in_one: whether scale and minimum of a group have four bits each of one byte.
        is_exponent: whether a group's scale is a power of two.
        zero: the level of 0.
        values: what levels stand for; none for themselves.
    """

    number: int
    block: int
    nbytes: int
    bits: tuple[int, ...]
    split: Callable[[Tensor], Fields]
    halves: int = 1
    group: int = 0
    has_minimums: bool = False
    in_one: bool = False
    is_exponent: bool = False
    zero: int = 0
    values: tuple[int, ...] = ()

    def words(self, columns: int) -> list[int]:
        """Words of a row's planes: of levels, scales, minimums and halves; and what fills it up."""
        groups = 8 * (columns // self.group) if self.group else 0
        minimums = groups if self.has_minimums and not self.in_one else 0
        halves = 16 * self.halves * (columns // self.block)
        levels = (columns * width for width in self.bits)
        words = [-(-bits // 32) for bits in (*levels, groups, minimums, halves)]
        return [*words, -sum(words) % _ALIGNMENT]

    def filled(self, columns: int) -> int:
        """Elements of a row of whole blocks that has so many."""
        return -(-columns // self.block) * self.block

    def row_words(self, columns: int) -> int:
        """Words of a row of so many elements, filled up to whole blocks."""
        return sum(self.words(self.filled(columns)))


# -- the fields of blocks --------------------------------------------------------------------------


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16)


def _parts_of_bytes(bytes: Tensor, width: int, run: int) -> Tensor:
    """Numbers of ``width`` bits: the lowest ones of ``run`` bytes, then the next of the same."""
    runs = bytes.reshape(len(bytes), -1, 1, run)
    parts = [(runs >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.cat(parts, 2).flatten(1)


def _scales_of_six_bits(bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums in 12 bytes, of Q4_K and Q5_K."""
    first, second, third = bytes.view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return scales.view(torch.int8), minimums.view(torch.int8)


def _of_4_bits(blocks: Tensor, start: int) -> Tensor:
    """Levels of blocks of 32: elements 0 to 15 in the lower halves of bytes."""
    return _parts_of_bytes(blocks[:, start : start + 16], 4, 16)


def _of_5_bits(blocks: Tensor, start: int) -> Tensor:
    """Levels of blocks of 32: first their fifth bits, in a word, then the others."""
    high = _parts_of_bytes(blocks[:, start : start + 4], 1, 1)
    return _of_4_bits(blocks, start + 4) | (high << 4)


def _q4_0(blocks: Tensor) -> Fields:
    return Fields(_of_4_bits(blocks, 2), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Fields:
    return Fields(_of_4_bits(blocks, 4), _half(blocks, 0, 2))


def _q5_0(blocks: Tensor) -> Fields:
    return Fields(_of_5_bits(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Fields:
    return Fields(_of_5_bits(blocks, 4), _half(blocks, 0, 2))


def _q8_0(blocks: Tensor) -> Fields:
    return Fields(blocks[:, 2:], _half(blocks, 0))  # signed, so that 0 is none of its levels


def _q2_k(blocks: Tensor) -> Fields:
    return Fields(_parts_of_bytes(blocks[:, 16:80], 2, 32), _half(blocks, 80, 2), blocks[:, :16])


def _q3_k(blocks: Tensor) -> Fields:
    levels = _parts_of_bytes(blocks[:, 32:96], 2, 32)
    high = _parts_of_bytes(blocks[:, :32], 1, 32)
    low_scales = _parts_of_bytes(blocks[:, 96:104], 4, 8)
    scales = low_scales | (_parts_of_bytes(blocks[:, 104:108], 2, 4) << 4)
    return Fields(levels | (high << 2), _half(blocks, 108), scales.view(torch.int8) - 32)


def _q4_k(blocks: Tensor) -> Fields:
    levels = _parts_of_bytes(blocks[:, 16:], 4, 32)
    return Fields(levels, _half(blocks, 0, 2), *_scales_of_six_bits(blocks[:, 4:16].contiguous()))


def _q5_k(blocks: Tensor) -> Fields:
    levels = _parts_of_bytes(blocks[:, 48:], 4, 32)
    high = _parts_of_bytes(blocks[:, 16:48], 1, 32)
    scales = _scales_of_six_bits(blocks[:, 4:16].contiguous())
    return Fields(levels | (high << 4), _half(blocks, 0, 2), *scales)


def _q6_k(blocks: Tensor) -> Fields:
    levels = _parts_of_bytes(blocks[:, :128], 4, 64)
    high = _parts_of_bytes(blocks[:, 128:192], 2, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Fields(levels | (high << 4), _half(blocks, 208), scales)


def _iq4_xs(blocks: Tensor) -> Fields:
    low, high = _parts_of_bytes(blocks[:, 4:8], 4, 1), _parts_of_bytes(blocks[:, 2:4], 2, 1)
    levels = _parts_of_bytes(blocks[:, 8:], 4, 16)
    return Fields(levels, _half(blocks, 0), (low | (high << 4)).view(torch.int8) - 32)


def _mxfp4(blocks: Tensor) -> Fields:
    empty = blocks.new_empty((len(blocks), 0), dtype=torch.float16)
    return Fields(_of_4_bits(blocks, 1), empty, blocks[:, :1])


_OF_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_OF_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers

FORMATS = {
    "Q4_0": Format(2, 32, 18, (4,), _q4_0, zero=8),
    "Q4_1": Format(3, 32, 20, (4,), _q4_1, halves=2),
    "Q5_0": Format(6, 32, 22, (4, 1), _q5_0, zero=16),
    "Q5_1": Format(7, 32, 24, (4, 1), _q5_1, halves=2),
    "Q8_0": Format(8, 32, 34, (8,), _q8_0),
    "Q2_K": Format(10, 256, 84, (2,), _q2_k, halves=2, group=16, has_minimums=True, in_one=True),
    "Q3_K": Format(11, 256, 110, (2, 1), _q3_k, group=16, zero=4),
    "Q4_K": Format(12, 256, 144, (4,), _q4_k, halves=2, group=32, has_minimums=True),
    "Q5_K": Format(13, 256, 176, (4, 1), _q5_k, halves=2, group=32, has_minimums=True),
    "Q6_K": Format(14, 256, 210, (4, 2), _q6_k, group=16, zero=32),
    "IQ4_NL": Format(20, 32, 18, (4,), _q4_0, values=_OF_IQ4),
    "IQ4_XS": Format(23, 256, 136, (4,), _iq4_xs, group=32, values=_OF_IQ4),
    "MXFP4": Format(
        39, 32, 17, (4,), _mxfp4, halves=0, group=32, is_exponent=True, values=_OF_E2M1
    ),
}
"""By the name of the type."""

BY_NUMBER = {made.number: made for made in FORMATS.values()}
"""By ``ggml_type``."""


def name_of(ggml_type: int) -> str:
    """The name of a type."""
    return next(name for name, form in FORMATS.items() if form.number == ggml_type)


def row_words(ggml_type: int, columns: int) -> int:
    """Words of a row of so many elements."""
    return sum(BY_NUMBER[ggml_type].words(columns))


# -- planes ----------------------------------------------------------------------------------------


def _packed(numbers: Tensor, width: int) -> Tensor:
    """uint8 (…, K · width / 8) of numbers (…, K) of ``width`` bits, the first in the lowest."""
    if width == 8:
        return numbers
    count = 8 // width
    parts = numbers.reshape(*numbers.shape[:-1], -1, count).unbind(-1)
    result = parts[0]
    for place, part in enumerate(parts[1:], 1):
        result = result | (part << (width * place))
    return result


def fields_of_parts(blocks: Tensor, ggml_type: int) -> list[Tensor]:
    """``webgpu::gguf_fields`` in plain ATen: each field of blocks, packed.

    Args:
        blocks: uint8 (blocks, bytes of one).
        ggml_type: of `BY_NUMBER`.

    Returns:
        uint8 (blocks, bytes of the field in a plane).
    """
    form = BY_NUMBER[ggml_type]
    return packed_fields(form.split(blocks), form)


def packed_fields(fields: Fields, form: Format) -> list[Tensor]:
    """Each field of blocks, packed: what `fields_of_parts` gives."""
    pieces, shift = [], 0
    for width in form.bits:
        pieces.append(_packed((fields.levels >> shift) & ((1 << width) - 1), width))
        shift += width
    pieces += [field for field in (fields.scales, fields.minimums) if field is not None]
    return [piece.contiguous().view(torch.uint8) for piece in (*pieces, fields.halves)]


def pack(blocks: Tensor, ggml_type: int) -> Tensor:
    """The planes of a weight's rows.

    Args:
        blocks: uint8 (…, bytes of a row), as they are in a file.
        ggml_type: of `BY_NUMBER`.

    Returns:
        int32 (…, words of a row).
    """
    form = BY_NUMBER[ggml_type]
    outer, columns = blocks.shape[:-1], blocks.shape[-1] // form.nbytes * form.block
    return joined(fields(blocks.reshape(-1, form.nbytes), ggml_type), outer, form, columns)


def joined(fields: Sequence[Tensor], outer: Sequence[int], form: Format, columns: int) -> Tensor:
    """The planes of rows of so many elements, of the fields of their blocks.

    Args:
        fields: of `packed_fields`.
        outer: the sizes of the weight without ``columns``.

    Returns:
        int32 (*outer, words of a row).
    """
    rows = []
    for field in fields:
        row = field.view(*outer, -1)
        rows += [row, row.new_zeros(*outer, -row.shape[-1] % 4)]
    rows.append(row.new_zeros(*outer, 4 * form.words(columns)[-1]))
    return torch.cat([row for row in rows if row.numel()], -1).view(torch.int32)


def _of_words(
    words: Tensor, width: int, count: int, inner: int = 1, signed: bool = False
) -> Tensor:
    """The first ``count`` numbers of `int4.unpacked`: a row's last word may not be full."""
    return int4.unpacked(words, width, inner, signed=signed)[..., : count * inner]


def dequantized(packed: Tensor, ggml_type: int, columns: int) -> Tensor:
    """A weight in float32.

    Args:
        packed: of `pack`.
        ggml_type: of `BY_NUMBER`.
        columns: K, a multiple of a block's elements.

    Returns:
        (…, K)
    """
    form = BY_NUMBER[ggml_type]
    *bits, scales, minimums, halves, _ = torch.split(packed, form.words(columns), -1)
    numbers = _numbers(bits, form, columns)
    if form.is_exponent:
        exponent = _of_words(scales, 8, columns // form.group, form.group)
        # Half of 2 ** (exponent - 127), as `values` are doubled; also where that is subnormal.
        scale = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        return scale.view(torch.float32) * numbers
    scale, minimum = _scales(scales, minimums, halves, form, columns)
    numbers = scale * numbers
    return numbers if minimum is None else numbers + minimum


def _numbers(bits: Sequence[Tensor], form: Format, columns: int) -> Tensor:
    """float32 (…, columns): what levels stand for, before they are scaled."""
    levels: Tensor | None = None
    shift = 0
    for width, plane in zip(form.bits, bits, strict=True):
        part = _of_words(plane, width, columns, signed=width == 8)
        levels = part if levels is None else levels | (part << shift)
        shift += width
    assert levels is not None
    if form.values:
        return _looked_up(levels, form.values)
    return (levels - form.zero if form.zero else levels).float()


def _scales(
    scales: Tensor, minimums: Tensor, halves: Tensor, form: Format, columns: int
) -> tuple[Tensor, Tensor | None]:
    """Scale, and what is added, of each element: float32 (…, columns)."""
    if form.halves == 1:
        scale = _half_of(_of_words(halves, 16, columns // form.block, form.block))
        if form.group:
            scale = scale * _of_words(scales, 8, columns // form.group, form.group, True).float()
        return scale, None
    whole = halves[..., None].expand(*halves.shape, form.block).flatten(-2)
    scale, minimum = _half_of(whole), _half_of(whole >> 16)
    if form.in_one:
        both = _of_words(scales, 8, columns // form.group, form.group)
        return scale * (both & 15).float(), -minimum * (both >> 4).float()
    if form.group:
        groups = 8, columns // form.group, form.group, True
        scale = scale * _of_words(scales, *groups).float()
        minimum = -minimum * _of_words(minimums, *groups).float()
    return scale, minimum


def _half_of(words: Tensor) -> Tensor:
    """float32 of the halves in the lower 16 bits of words."""
    return words.to(torch.int16).view(torch.float16).float()


def _looked_up(levels: Tensor, values: Sequence[int]) -> Tensor:
    """float32: what each of 16 levels stands for, of a table in four words."""
    words = struct.unpack("<4i", struct.pack("16b", *values))
    first, second, third, fourth = (levels.new_full((), word) for word in words)
    low = torch.where(levels < 4, first, second)
    word = torch.where(levels < 8, low, torch.where(levels < 12, third, fourth))
    return ((word << (24 - 8 * (levels & 3))) >> 24).float()


def multiplied(weight: Tensor, rows: int | torch.SymInt, dtype: torch.dtype) -> Tensor:
    """A weight in the dtype in which so many rows of activations are multiplied with it.

    As other devices have it: up to `FEW_ROWS` are multiplied in float32, more in their own dtype,
    to which the weight is rounded. float16 has no other matrix units, so it is always rounded.

    Args:
        weight: float32.
    """
    if dtype is torch.bfloat16 and isinstance(rows, int) and rows > FEW_ROWS:
        return weight.to(dtype)
    return int4.multiplied(weight, dtype)


FEW_ROWS = 8
"""transformers' ``MAX_GEMV_ROWS``."""


# -- operators -------------------------------------------------------------------------------------


def linear_of_parts(
    input: Tensor, weight: Tensor, ggml_type: int, bias: Tensor | None = None
) -> Tensor:
    """``webgpu::gguf_linear`` in plain ATen: a linear layer, rounded once.

    Args:
        input: (…, K).
        weight: of `pack`, of (N, K).
        bias: (N,)

    Returns:
        (…, N)
    """
    flat = input.reshape(-1, input.shape[-1])
    whole = dequantized(weight, ggml_type, flat.shape[1])
    whole = multiplied(whole, flat.shape[0], input.dtype)
    bias = None if bias is None else bias.to(whole.dtype)
    result = torch.nn.functional.linear(flat.to(whole.dtype), whole, bias)
    return result.to(input.dtype).reshape(*input.shape[:-1], weight.shape[0])


def embedding_of_parts(
    indices: Tensor, weight: Tensor, ggml_type: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """``webgpu::gguf_embedding`` in plain ATen: rows of a weight.

    Args:
        indices: integers (…).
        weight: of `pack`, of (N, K).
        columns: K.

    Returns:
        (…, K) of ``dtype``.
    """
    return dequantized(_selected(weight, indices), ggml_type, columns).to(dtype)


def experts_of_parts(input: Tensor, weight: Tensor, ggml_type: int, ids: Tensor) -> Tensor:
    """``webgpu::gguf_experts`` in plain ATen: each row times the weights of its experts.

    Args:
        input: (M, K).
        weight: of `pack`, of (experts, N, K).
        ids: integers (M, T).

    Returns:
        (M, T, N)
    """
    whole = dequantized(_selected(weight, ids), ggml_type, input.shape[1])
    whole = multiplied(whole, 1, input.dtype)
    return (whole @ input.to(whole.dtype)[:, None, :, None])[..., 0].to(input.dtype)


def _selected(weight: Tensor, indices: Tensor) -> Tensor:
    """``weight[indices]``, but that no index counts from the end, which is more to compute."""
    return weight.index_select(0, indices.flatten()).view(*indices.shape, *weight.shape[1:])


def _declared(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """An operator of ATen's; on the device it runs as the CPU does until it is decomposed."""
    made = torch.library.custom_op(f"webgpu::{name}", function, mutates_args=(), device_types="cpu")
    made.register_fake(fake)
    found: OpOverload = getattr(torch.ops.webgpu, name).default
    return found


def _linear_fake(
    input: Tensor, weight: Tensor, ggml_type: int, bias: Tensor | None = None
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _embedding_fake(
    indices: Tensor, weight: Tensor, ggml_type: int, columns: int, dtype: torch.dtype
) -> Tensor:
    return weight.new_empty((*indices.shape, columns), dtype=dtype)


def _experts_fake(input: Tensor, weight: Tensor, ggml_type: int, ids: Tensor) -> Tensor:
    return input.new_empty((*ids.shape, weight.shape[1]))


fields = _declared("gguf_fields", fields_of_parts, fields_of_parts)
linear = _declared("gguf_linear", linear_of_parts, _linear_fake)
embedding = _declared("gguf_embedding", embedding_of_parts, _embedding_fake)
experts = _declared("gguf_experts", experts_of_parts, _experts_fake)


def _save_linear(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ctx.ggml_type, bias = inputs
    ctx.columns, ctx.has_bias = x.shape[-1], bias is not None
    ctx.save_for_backward(weight)


def _gradients_of_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the input and the bias; a packed weight has none."""
    (weight,) = ctx.saved_tensors
    given = grad.float() @ dequantized(weight, ctx.ggml_type, ctx.columns)
    bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
    return given.to(grad.dtype), None, None, bias


def _save_experts(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ctx.ggml_type, ids = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(weight, ids)


def _gradients_of_experts(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the input: (M, T, N) times the experts' weights, summed over T."""
    weight, ids = ctx.saved_tensors
    whole = dequantized(_selected(weight, ids), ctx.ggml_type, ctx.columns)
    given = (grad.float()[..., None, :] @ whole).sum((1, 2))
    return given.to(grad.dtype), None, None, None


torch.library.register_autograd(
    "webgpu::gguf_linear", _gradients_of_linear, setup_context=_save_linear
)
torch.library.register_autograd(
    "webgpu::gguf_experts", _gradients_of_experts, setup_context=_save_experts
)
