"""``webgpu::fft``, ``rfft`` and ``irfft`` as `Fourier` nodes. Their definition: ``torch_ops.fft``.

Dimensions are transformed one after the other. Real numbers are loaded without an imaginary part,
and the mirrored half of a spectrum from the half that is given.

A row that fits in a workgroup is transformed by one node. Longer rows take several passes
("four-step"), lengths with large prime factors two transforms of another length (Bluestein). What
is multiplied and padded in between is in the scalars that nodes load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import dtypes
from ..ir import fourier
from ..ir.buffers import Buffer
from ..ir.nodes import Fourier
from ..ir.scalar import Index, Scalar, apply, cast, where
from ..symbolic.sizes import ONE, Expr, as_expr, contiguous_strides, floordiv, mod
from ..torch_ops import fft as _fft  # noqa: F401  defines the operators
from .builder import Builder, masked
from .registry import NotLowered, lowers
from .value import Value, has_no_elements, permute, positions, reshape, zeros

F32 = dtypes.float32


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
    sizes = (*x.sizes[:last], as_expr(n // 2 + 1), *x.sizes[last + 1 :], PAIR)
    if has_no_elements(sizes):
        return zeros(sizes, F32)
    if n == 1:
        zero = apply("eq", Index(positions(sizes)[-1]), 0)
        body = masked(zero, cast(x.at(positions(sizes)[:-1]), F32), 0.0)
        first = Value(F32, sizes, body)
    else:
        buffer = builder.new_buffer(F32, sizes)
        own_scale = scale if len(dims) == 1 else 1.0
        own = _along(last, x.sizes, n, True, lambda at: Complex(cast(x.at(at), F32)), own_scale)
        add_transform(builder, buffer, replace(own, is_half=True), last)
        first = builder.load(buffer)
    rest = [dim % x.rank for dim in dims[:-1]]
    return _transformed(builder, first, rest, True, scale if rest or n == 1 else 1.0)


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
    if has_no_elements(sizes):
        return zeros(sizes, F32)
    spectrum = _transformed(builder, pairs, dims[:-1], False, 1.0)

    number = partial(number_at, spectrum)
    if length == 1:
        return builder.pointwise(number(positions(sizes)).real * scale, sizes)
    if length % 2 or length == 2:

        def whole(at: Sequence[Expr]) -> Complex:
            return _mirrored(number, at, last, length)

        own = _along(last, sizes, length, False, whole, scale)
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
    conjugate = apply("eq", Index(behind), 1)
    imaginary = where(conjugate, -there.imaginary, there.imaginary)
    alone = apply("eq", Index(mod(2 * j, as_expr(n))), 0)
    return Complex(there.real, where(alone, 0.0, imaginary))


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

    def both(at: Sequence[Expr]) -> Complex:
        k = at[dim]
        near, far = number(at), number([*at[:dim], m - k, *at[dim + 1 :]])
        assert near.imaginary is not None
        assert far.imaginary is not None
        first = apply("eq", Index(k), 0)
        a, b = near.real, where(first, 0.0, near.imaginary)
        c, d = far.real, where(first, 0.0, far.imaginary)
        odd = Complex(a - c, b + d) * roots.at(k)
        assert odd.imaginary is not None
        return Complex(a + c - odd.imaginary, b - d + odd.real)

    # Pairs of elements are neighbours along the dimension.
    halves = (*sizes[:dim], as_expr(m), PAIR, *sizes[dim + 1 :])
    order = [k for k in range(len(halves)) if k != dim + 1]
    strides = contiguous_strides(halves)
    buffer = builder.new_buffer(
        F32, [halves[k] for k in (*order, dim + 1)], strides=[strides[k] for k in (*order, dim + 1)]
    )
    logical = [halves[k] for k in order]
    own = _along(dim, logical, m, False, both, scale)
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
        return zeros(pairs.sizes, F32)
    if not left and scale == 1.0:
        return pairs.cast(F32)
    if not left:
        return builder.pointwise(cast(pairs.body, F32) * scale, pairs.sizes)
    lengths = [_length(pairs.sizes[dim]) for dim in left]
    while left:
        dim, n = left.pop(), lengths.pop()
        buffer = builder.new_buffer(F32, (*pairs.sizes[:-1], PAIR))
        number, own_scale = partial(number_at, pairs), 1.0 if left else scale
        own = _along(dim, pairs.sizes[:-1], n, forward, number, own_scale)
        add_transform(builder, buffer, own, dim)
        pairs = builder.load(buffer)
    return pairs


def _along(
    dim: int,
    sizes: Sequence[Expr],
    n: int,
    forward: bool,
    number: Callable[[Sequence[Expr]], Complex],
    scale: float,
) -> Transform:
    """The transform of one dimension of a tensor of ``sizes``, whose elements ``number`` gives."""
    return Transform(
        ranges=(*sizes[:dim], *sizes[dim + 1 :]),
        length=n,
        forward=forward,
        element=lambda rows, j: number([*rows[:dim], j, *rows[dim:]]),
        index=lambda rows, k: (*rows[:dim], k, *rows[dim:]),
        scale=scale,
    )


def _length(size: Expr) -> int:
    if not size.is_constant:
        raise NotLowered(f"a Fourier transform of the symbolic length {size}")
    return size.constant


def _check(value: Value) -> None:
    if not value.dtype.is_float or value.dtype.itemsize > 4:
        raise NotLowered(f"Fourier transforms compute in float32, not {value.dtype.name}")


PAIR = as_expr(2)

# Neighbouring rows that a workgroup takes where rows are not contiguous: whole sectors of memory
# (32 bytes) between passes, half ones where the alternative is another pass.
_ROWS_OF_PASS = 4
_ROWS_OF_COLUMN = 2


@dataclass(frozen=True, slots=True)
class Complex:
    """One complex number; without an imaginary part it is real."""

    real: Scalar
    imaginary: Scalar | None = None

    def __mul__(self, other: Complex) -> Complex:
        """The product of complex numbers; ``other`` has an imaginary part."""
        a, b, c, d = self.real, self.imaginary, other.real, other.imaginary
        assert d is not None
        if b is None:
            return Complex(a * c, a * d)
        return Complex(a * c - b * d, a * d + b * c)


Rows = Sequence[Expr]


@dataclass(frozen=True, slots=True)
class Transform:
    """Transforms of rows, before it is decided which nodes compute them.

    Attributes:
        ranges: the sizes of rows.
        length: n, at least 2.
        forward: the sign of the exponent is negative.
        element: the number at a position of a row.
        index: where in the output the result at a position of a row is, without the part.
        scale: multiplies all results.
        factor: multiplies the result at a position of a row.
        mirror: where in the output the conjugate of a result is as well.
        is_half: whether all numbers are real and only the first half of the results is wanted.
    """

    ranges: tuple[Expr, ...]
    length: int
    forward: bool
    element: Callable[[Rows, Expr], Complex]
    index: Callable[[Rows, Expr], tuple[Expr, ...]]
    scale: float = 1.0
    factor: Callable[[Rows, Expr], Complex] | None = None
    mirror: Callable[[Rows, Expr], tuple[Expr, ...]] | None = None
    is_half: bool = False


def number_at(pairs: Value, at: Sequence[Expr]) -> Complex:
    """The complex number at an index of pairs, whose last dimension is (real, imaginary)."""
    real, imaginary = (cast(pairs.at([*at, as_expr(part)]), F32) for part in range(2))
    return Complex(real, imaginary)


@dataclass(frozen=True, slots=True)
class ComplexTable:
    """Complex numbers known while compiling; equal names have equal contents."""

    builder: Builder
    contents: Any
    name: str

    def at(self, position: Expr) -> Complex:
        """The number at a position; the table becomes a constant buffer when it is first read."""
        sizes = tuple(map(as_expr, self.contents.shape))
        if self.name not in self.builder.constants:
            self.builder.constant(self.contents, F32, sizes, self.name)
        return number_at(self.builder.load(self.builder.buffers[self.name]), [position])


def add_transform(builder: Builder, output: Buffer, transform: Transform, dim: int) -> None:
    """Adds the nodes that transform dimension ``dim`` of a tensor with the layout of ``output``."""
    target = builder.target
    contiguous = dim == len(output.sizes) - 2 or output.sizes[dim + 1 :] in ((), (PAIR,))
    longest = fourier.longest_row(target, 1 if contiguous else _ROWS_OF_COLUMN)
    if not fourier.has_radices(transform.length):
        _add_bluestein(builder, output, transform, longest)
    else:
        _add_passes(builder, output, transform, longest)


def _add_passes(builder: Builder, output: Buffer, transform: Transform, longest: int) -> None:
    """Adds one node, or with n = n1 · n2 two: transforms of n1 elements n2 apart, then of n2.

    Element j1 · n2 + j2 has its part in result k1 + n1 · k2 by way of number (k1, j2) in between,
    which is multiplied by exp(∓2πi · k1 · j2 / n).

    Of real numbers, number (n1 - k1, j2) is the conjugate of (k1, j2), and result n - k that of k:
    half of the numbers in between are enough. Rows that are their own mirror, k1 = 0 and n1/2, have
    all of their results themselves.
    """
    n = transform.length
    if n <= longest:
        _add_node(builder, output, transform)
        return
    longest = fourier.longest_row(builder.target, _ROWS_OF_PASS)
    n1 = fourier.divide(n, longest)
    n2 = n // n1
    kept = as_expr(n1 // 2 + 1 if transform.is_half else n1)
    sizes = (*transform.ranges, kept, as_expr(n2), PAIR)
    between = builder.new_buffer(F32, sizes, f"{builder.hint}_pass")
    first = Transform(
        ranges=(*transform.ranges, as_expr(n2)),
        length=n1,
        forward=transform.forward,
        element=lambda rows, j1: transform.element(rows[:-1], j1 * n2 + rows[-1]),
        index=lambda rows, k1: (*rows[:-1], k1, rows[-1]),
    )
    _add_node(builder, between, first)
    loaded = builder.load(between)
    factor, mirror = transform.factor, transform.mirror

    def element(rows: Rows, j2: Expr) -> Complex:
        turn = _root(builder, n, rows[-1] * j2, transform.forward)
        return number_at(loaded, [*rows, j2]) * turn

    def result(k1: Expr, k2: Expr) -> Expr:
        return k1 + n1 * k2

    def mirrored(rows: Rows, k2: Expr) -> tuple[Expr, ...]:
        k1, size = rows[-1], as_expr(n1)
        alone = floordiv(n1 - k1, size) + floordiv(2 * k1, size)  # 1 for 0 and n1/2, else 0
        return transform.index(rows[:-1], n + n * alone - result(k1, k2))

    second = replace(
        transform,
        ranges=(*transform.ranges, kept),
        length=n2,
        element=element,
        index=lambda rows, k2: transform.index(rows[:-1], result(rows[-1], k2)),
        factor=None if factor is None else lambda rows, k2: factor(rows[:-1], result(rows[-1], k2)),
        mirror=None if mirror is None else lambda rows, k2: mirror(rows[:-1], result(rows[-1], k2)),
        is_half=False,
    )
    if transform.is_half:
        second = replace(second, mirror=mirrored)
    _add_passes(builder, output, second, longest)


def _root(builder: Builder, n: int, position: Expr, forward: bool) -> Complex:
    """exp(∓2πi · position / n) as the product of two numbers from short tables."""
    step = 1 << (n.bit_length() // 2)
    sign = "" if forward else "_inverse"
    many = fourier.roots(step * np.arange(-(-n // step)), n, forward)
    few = fourier.roots(np.arange(step), n, forward)
    high = ComplexTable(builder, many, f"roots_{n}_by_{step}{sign}")
    low = ComplexTable(builder, few, f"roots_{n}_below_{step}{sign}")
    at = as_expr(step)
    return high.at(floordiv(position, at)) * low.at(mod(position, at))


def _add_bluestein(builder: Builder, output: Buffer, transform: Transform, longest: int) -> None:
    """A convolution with a chirp: see `fourier.chirp`."""
    n = transform.length
    padded = fourier.padded_length(n, longest)
    sign = "" if transform.forward else "_inverse"
    numbers = np.zeros((padded, 2), np.float32)
    numbers[:n] = fourier.chirp(n, transform.forward)
    chirp = ComplexTable(builder, numbers, f"chirp_{n}_{padded}{sign}")
    spectrum = ComplexTable(
        builder,
        fourier.chirp_spectrum(n, padded, transform.forward),
        f"chirp_spectrum_{n}_{padded}{sign}",
    )

    def element(rows: Rows, j: Expr) -> Complex:
        number = transform.element(rows, j) * chirp.at(j)
        assert number.imaginary is not None
        inside = Index(j) < n
        return Complex(masked(inside, number.real, 0.0), masked(inside, number.imaginary, 0.0))

    sizes = (*transform.ranges, as_expr(padded), PAIR)
    between = builder.new_buffer(F32, sizes, f"{builder.hint}_spectrum")
    there = Transform(transform.ranges, padded, True, element, lambda rows, k: (*rows, k))
    _add_passes(builder, between, there, longest)
    loaded = builder.load(between)
    back = replace(
        transform,
        length=padded,
        forward=False,
        element=lambda rows, k: number_at(loaded, [*rows, k]) * spectrum.at(k),
        factor=lambda rows, k: chirp.at(k),
        is_half=False,
    )
    _add_passes(builder, output, back, longest)


def _add_node(builder: Builder, output: Buffer, transform: Transform) -> None:
    n = transform.length
    rows = positions(transform.ranges)
    j, k = (positions((as_expr(n),), prefix)[0] for prefix in "jk")
    radices = fourier.choose_radices(n)
    number = transform.element(rows, j)
    scalars = {"real": number.real, "imaginary": number.imaginary}
    if len(radices) > 1:
        (w,) = positions((as_expr(n - radices[0]),), "w")
        sign = "" if transform.forward else "_inverse"
        contents = fourier.stage_roots(radices, transform.forward)
        root = ComplexTable(builder, contents, f"stage_roots_{n}{sign}").at(w)
        scalars |= {"root_real": root.real, "root_imaginary": root.imaginary}
    if transform.factor is not None:
        factor = transform.factor(rows, k)
        scalars |= {"factor_real": factor.real, "factor_imaginary": factor.imaginary}
    bodies: dict[str, Any] = {
        name: builder.finished(body) for name, body in scalars.items() if body is not None
    }
    node = Fourier(
        output=output.name,
        ranges=transform.ranges,
        radices=radices,
        forward=transform.forward,
        scale=float(transform.scale),
        index=transform.index(rows, k),
        mirror=None if transform.mirror is None else transform.mirror(rows, k),
        origins=(builder.origin,),
        **bodies,
    )
    builder.nodes.append(node)
