"""``webgpu::fft``, ``rfft`` and ``irfft`` as `Fourier` nodes. Their definition: ``fft_ops``.

Dimensions are transformed one after the other. Real numbers are loaded without an imaginary part,
and mirrored halves where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from .. import dtypes
from ..ir import fourier
from ..ir.scalar import Index, apply, cast, const
from ..symbolic.sizes import ONE, ZERO, Expr, as_expr, contiguous_strides, floordiv, mod
from ..torch_ops import fft as _fft  # noqa: F401  defines the operators
from .builder import Builder, masked
from .fourier_nodes import (
    PAIR,
    Complex,
    ComplexTable,
    Rows,
    Transform,
    add_transform,
    number_at,
)
from .registry import NotLowered, lowers
from .value import Value, permute, positions, reshape

F32 = dtypes.float32
I64 = dtypes.int64


@lowers(torch.ops.webgpu.fft.default)
def lower_fft(
    builder: Builder, pairs: Value, dims: Sequence[int], forward: bool, scale: float
) -> Value:
    """The Fourier transform of complex numbers over ``dims``, multiplied by ``scale``.

    ``pairs`` is float32 [*sizes, 2], (real, imaginary) in its last dimension, and so is the result.
    Raises NotLowered: for float64 and for a symbolic length.
    """
    _check(pairs)
    return _transformed(builder, pairs, dims, forward, scale)


@lowers(torch.ops.webgpu.rfft.default)
def lower_rfft(builder: Builder, x: Value, dims: Sequence[int], scale: float) -> Value:
    """The Fourier transform of real numbers over ``dims``, multiplied by ``scale``.

    Of the last one of ``dims``, with n elements, the n // 2 + 1 first results are given: float32
    pairs [*sizes, 2]. It is transformed first, as rows without imaginary parts. Raises NotLowered:
    for float64 and for a symbolic length.
    """
    _check(x)
    last = dims[-1] % x.rank
    n = _length(x.sizes[last])
    half = as_expr(n // 2 + 1)
    sizes = (*x.sizes[:last], half, *x.sizes[last + 1 :], PAIR)
    if any(size is ZERO for size in sizes):
        return Value(F32, sizes, const(0.0, F32))
    if n == 1:
        zero = apply("eq", Index(positions(sizes)[-1]), const(0, I64))
        body = masked(zero, cast(x.at(positions(sizes)[:-1]), F32), const(0.0, F32))
        first = Value(F32, sizes, body)
    else:
        buffer = builder.new_buffer(F32, sizes)
        own = replace(_along(last, x.sizes, n, True), is_half=True)
        element = _elements(last, lambda at: Complex(cast(x.at(at), F32)))
        add_transform(builder, buffer, replace(own, element=element, scale=_own(scale, dims)), last)
        first = builder.load(buffer)
    rest = [dim % x.rank for dim in dims[:-1]]
    return _transformed(builder, first, rest, True, scale if rest or n == 1 else 1.0)


def _own(scale: float, dims: Sequence[int]) -> float:
    """The scale that the first of several transforms applies: all of it if it is the only one."""
    return scale if len(dims) == 1 else 1.0


@lowers(torch.ops.webgpu.irfft.default)
def lower_irfft(
    builder: Builder, pairs: Value, dims: Sequence[int], n: int | Expr, scale: float
) -> Value:
    """The inverse of `lower_rfft`: n real numbers in the last one of ``dims``, times ``scale``.

    That dimension is transformed last; for an even n by a transform of half the length. Raises
    NotLowered: for float64 and for a symbolic length.
    """
    _check(pairs)
    length = _length(as_expr(n))
    last = dims[-1] % (pairs.rank - 1)
    sizes = tuple(as_expr(length) if k == last else s for k, s in enumerate(pairs.sizes[:-1]))
    if any(size is ZERO for size in sizes):
        return Value(F32, sizes, const(0.0, F32))
    spectrum = _transformed(builder, pairs, dims[:-1], False, 1.0)

    number = partial(number_at, spectrum)
    if length == 1:
        body = apply("mul", number(positions(sizes)).real, const(scale, F32))
        return builder.pointwise(body, sizes)
    if length % 2 or length == 2:
        own = replace(
            _along(last, sizes, length, False),
            element=_elements(last, lambda at: _mirrored(number, at, last, length)),
            scale=scale,
        )
        buffer = builder.new_buffer(F32, sizes)
        add_transform(builder, buffer, own, last)
        return builder.load(buffer)
    return _of_half_length(builder, number, sizes, last, scale)


def _mirrored(
    number: Callable[[Sequence[Expr]], Complex], at: Sequence[Expr], dim: int, n: int
) -> Complex:
    """The number at any position, of which the first half is given: conj(X[n - j]) is X[j]."""
    j = at[dim]
    behind = floordiv(2 * j, as_expr(n + 1))  # 1 from position n // 2 + 1 on
    there = number([*at[:dim], j + behind * (n - 2 * j), *at[dim + 1 :]])
    assert there.imaginary is not None
    conjugate = apply("eq", Index(behind), const(1, I64))
    imaginary = apply("where", conjugate, apply("neg", there.imaginary), there.imaginary)
    alone = apply("eq", Index(mod(2 * j, as_expr(n))), const(0, I64))
    return Complex(there.real, apply("where", alone, const(0.0, F32), imaginary))


def _of_half_length(
    builder: Builder,
    number: Callable[[Sequence[Expr]], Complex],
    sizes: tuple[Expr, ...],
    dim: int,
    scale: float,
) -> Value:
    """The inverse transform to real numbers of an even n, by one of length m = n/2.

    With E[k] = X[k] + conj(X[m - k]) and O[k] = (X[k] - conj(X[m - k])) · exp(2πi · k/n), the
    transform of E + iO has the result's even elements as real and the odd ones as imaginary parts.
    """
    n = int(sizes[dim])
    m = n // 2
    roots = ComplexTable(builder, fourier.roots(np.arange(m), n, forward=False), f"roots_{n}")
    zero = const(0.0, F32)

    def both(at: Sequence[Expr]) -> Complex:
        k = at[dim]
        near, far = number(at), number([*at[:dim], m - k, *at[dim + 1 :]])
        assert near.imaginary is not None
        assert far.imaginary is not None
        first = apply("eq", Index(k), const(0, I64))
        a, b = near.real, apply("where", first, zero, near.imaginary)
        c, d = far.real, apply("where", first, zero, far.imaginary)
        odd = Complex(apply("sub", a, c), apply("add", b, d)) * roots.at(k)
        assert odd.imaginary is not None
        return Complex(
            apply("sub", apply("add", a, c), odd.imaginary),
            apply("add", apply("sub", b, d), odd.real),
        )

    # Pairs of elements are neighbours along the dimension.
    halves = (*sizes[:dim], as_expr(m), PAIR, *sizes[dim + 1 :])
    order = [k for k in range(len(halves)) if k != dim + 1]
    strides = contiguous_strides(halves)
    buffer = builder.new_buffer(
        F32,
        [halves[k] for k in (*order, dim + 1)],
        strides=[strides[k] for k in (*order, dim + 1)],
    )
    logical = [halves[k] for k in order]
    own = replace(_along(dim, logical, m, False), element=_elements(dim, both), scale=scale)
    add_transform(builder, buffer, own, dim)
    inverse = list(range(len(order)))
    inverse.insert(dim + 1, len(order))
    return reshape(permute(builder.load(buffer), inverse), sizes)


def _transformed(
    builder: Builder, pairs: Value, dims: Sequence[int], forward: bool, scale: float
) -> Value:
    """``pairs`` with ``dims`` transformed, the last one first."""
    rank = pairs.rank - 1
    left = [d for d in (dim % rank for dim in dims) if pairs.sizes[d] is not ONE]
    if pairs.is_empty:
        return Value(F32, pairs.sizes, const(0.0, F32))
    if not left and scale == 1.0:
        return pairs.cast(F32)
    if not left:
        return builder.pointwise(
            apply("mul", cast(pairs.body, F32), const(scale, F32)), pairs.sizes
        )
    lengths = [_length(pairs.sizes[dim]) for dim in left]
    while left:
        dim, n = left.pop(), lengths.pop()
        buffer = builder.new_buffer(F32, (*pairs.sizes[:-1], PAIR))
        own = replace(
            _along(dim, pairs.sizes[:-1], n, forward),
            element=_elements(dim, partial(number_at, pairs)),
            scale=1.0 if left else scale,
        )
        add_transform(builder, buffer, own, dim)
        pairs = builder.load(buffer)
    return pairs


def _along(dim: int, sizes: Sequence[Expr], n: int, forward: bool) -> Transform:
    """The transform of a dimension of a tensor of ``sizes``, but for its elements."""

    def nothing(rows: Rows, j: Expr) -> Complex:
        raise AssertionError("a transform without elements")

    return Transform(
        ranges=(*sizes[:dim], *sizes[dim + 1 :]),
        length=n,
        forward=forward,
        element=nothing,
        index=lambda rows, k: (*rows[:dim], k, *rows[dim:]),
    )


def _elements(
    dim: int, number: Callable[[Sequence[Expr]], Complex]
) -> Callable[[Rows, Expr], Complex]:
    return lambda rows, j: number([*rows[:dim], j, *rows[dim:]])


def _length(size: Expr) -> int:
    if not size.is_constant:
        raise NotLowered(f"a Fourier transform of the symbolic length {size}")
    return size.constant


def _check(value: Value) -> None:
    if not value.dtype.is_float or value.dtype.itemsize > 4:
        raise NotLowered(f"Fourier transforms compute in float32, not {value.dtype.name}")
