"""Max pooling over windows whose places follow from random numbers. Source: ATen
``fractional_max_pool2d``, ``fractional_max_pool3d``.

Shapes: input [N, C, *space] or [C, *space], random samples [N, C, number of space dimensions].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, product
from .builder import Builder
from .pooling import ravel, spread, unravel
from .promotion import compute_dtype, rounded_to
from .reductions import converted
from .registry import lowers
from .scattering import scatter
from .value import IndexLike, Value, positions, reshape

aten = torch.ops.aten


def _start(
    sample: Scalar, at: Expr, size_in: Expr, size_out: Expr, kernel: Expr, dtype: DType
) -> Scalar:
    """⌊(at + sample) · α⌋ − ⌊sample · α⌋ with α = (in − kernel) / (out − 1); the last at the end.

    Rounded to ``dtype`` after each operation, as PyTorch computes it.
    """
    wide = compute_dtype(dtype)

    def rounded(scalar: Scalar) -> Scalar:
        return rounded_to(scalar, dtype)

    def number(expr: Expr) -> Scalar:
        return rounded(cast(Index(expr), wide))

    def floor(scalar: Scalar) -> Scalar:
        return cast(apply("trunc", scalar), dtypes.int64)

    end = Index(size_in - kernel)
    if size_out is ONE:
        return end
    alpha = rounded(number(size_in - kernel) / number(size_out - 1))
    sample = cast(sample, wide)
    moved = rounded(rounded(number(at) + sample) * alpha)
    start = floor(moved) - floor(rounded(sample * alpha))
    is_last = apply("eq", Index(at), Index(size_out - 1))
    return where(is_last, end, start)


def _forward(
    builder: Builder,
    rank: int,
    value: Value,
    kernel_size: Sequence[IntLike],
    random_samples: Value,
) -> tuple[Value | None, Value | None]:
    sizes = builder.out.sizes
    if any(size is ZERO for size in sizes):
        return Value(value.dtype, sizes, const(0, value.dtype)), Value(
            dtypes.int64, sizes, const(0, dtypes.int64)
        )
    kernel = spread(kernel_size, rank)
    lead = value.rank - rank
    index = positions(sizes)
    space = value.sizes[lead:]
    starts = []
    for k in range(rank):
        # Of two dimensions the first sample is the last one's; of three each has its own.
        which = rank - 1 - k if rank == 2 else k
        batch = [ZERO] if lead == 1 else []
        sample = random_samples.at([*batch, *index[:lead], ZERO + which])
        start = _start(sample, index[lead + k], space[k], sizes[lead + k], kernel[k], value.dtype)
        starts.append(start)
    taps = positions(kernel, "r")
    places: list[IndexLike] = [start + Index(tap) for start, tap in zip(starts, taps, strict=True)]
    dtype = compute_dtype(value.dtype)
    body = cast(value.at([*index[:lead], *places]), dtype)
    values = indices = None
    if builder.is_used(0):
        values = converted(builder, builder.reduce("maximum", body, sizes, kernel))
    if builder.is_used(1):
        best = builder.reduce("argmax", body, sizes, kernel, name="tap")
        chosen = [s + t for s, t in zip(starts, unravel(best.body, kernel), strict=True)]
        indices = builder.pointwise(ravel(chosen, space), sizes, name="indices")
    return values, indices


def _backward(builder: Builder, rank: int, grad: Value, value: Value, indices: Value) -> Value:
    """Every gradient element added to the element that was the largest of its window."""
    lead = value.rank - rank
    sizes = (*value.sizes[:lead], product(value.sizes[lead:]))
    zeros = Value(value.dtype, sizes, const(0, value.dtype))
    places: list[IndexLike] = [*positions(grad.sizes)[:lead], indices.body]
    total = scatter(builder, zeros, grad.sizes, places, grad.body, accumulate=True)
    return reshape(total, value.sizes)


def _register(rank: int) -> None:
    @lowers(getattr(aten, f"fractional_max_pool{rank}d").default)
    def forward(
        builder: Builder,
        self: Value,
        kernel_size: Sequence[IntLike],
        output_size: Sequence[IntLike],
        random_samples: Value,
    ) -> tuple[Value | None, Value | None]:
        """(the largest element of each window, its row-major position in the input's space).

        Windows begin where ``random_samples`` (in [0, 1), one for each image, channel and
        dimension) put them.
        """
        return _forward(builder, rank, self, kernel_size, random_samples)

    @lowers(getattr(aten, f"fractional_max_pool{rank}d_backward").default)
    def backward(
        builder: Builder,
        grad_output: Value,
        self: Value,
        kernel_size: Sequence[IntLike],
        output_size: Sequence[IntLike],
        indices: Value,
    ) -> Value:
        """Each gradient added to the input's element at its index.

        Raises NotLowered: where `scatter` does.
        """
        return _backward(builder, rank, grad_output, self, indices)


for _rank in (2, 3):
    _register(_rank)
