"""``webgpu::uniform`` as a hash of an element's number. Its definition: ``custom_ops``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, cast
from ..symbolic.sizes import ZERO, Expr, as_expr, contiguous_strides, linearize
from ..torch_ops import custom_ops
from .builder import Builder
from .registry import lowers
from .value import Value, positions, zeros

U32 = dtypes.uint32
BITS = 24


@lowers(torch.ops.webgpu.uniform.default)
def lower_uniform(
    builder: Builder, seed: Value, size: Sequence[int | Expr], device: object = None
) -> Value:
    """Random numbers of [0, 1), float32: multiples of 2⁻²⁴ that the seed (2 integers) determines.

    An element's number is that of its row-major position modulo 2³².
    """
    sizes = tuple(as_expr(length) for length in size)
    if any(length is ZERO for length in sizes):
        return zeros(sizes, dtypes.float32)
    number = linearize(positions(sizes), contiguous_strides(sizes))
    high = cast(random_bits(seed, number), dtypes.float32)
    return builder.pointwise(high * 2.0 ** (-BITS), sizes)


def random_bits(seed: Value, number: Expr) -> Scalar:
    """`BITS` random bits as a uint32: 2²⁴ times element ``number`` of ``webgpu::uniform``.

    A hash of the number and of the seed's two integers.
    """
    first, second = (cast(seed.at([as_expr(k)]), U32) for k in (0, 1))
    x = hashed(hashed(cast(Index(number), U32) * custom_ops.WEYL + first) ^ second)
    return x >> 32 - BITS


def hashed(x: Scalar) -> Scalar:
    """Bits as far as can be from those of other numbers; see ``custom_ops.uniform``."""
    for shift, factor in custom_ops.ROUNDS:
        x = _fold(x, shift) * factor
    return _fold(x, 16)


def _fold(x: Scalar, shift: int) -> Scalar:
    """x ^ (x >> shift)."""
    return x ^ x >> shift
