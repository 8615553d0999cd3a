"""Transforms of rows as `Fourier` nodes.

A row that fits in a workgroup is transformed by one node. Longer rows take several passes
("four-step"), lengths with large prime factors two transforms of another length (Bluestein). What
is multiplied and padded in between is in the scalars that nodes load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import fourier
from ..ir.graph import Buffer
from ..ir.nodes import Fourier
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..symbolic.sizes import Expr, as_expr, floordiv, mod
from .builder import Builder, masked
from .value import Value, positions

F32 = dtypes.float32
I64 = dtypes.int64
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
            return Complex(apply("mul", a, c), apply("mul", a, d))
        return Complex(
            apply("sub", apply("mul", a, c), apply("mul", b, d)),
            apply("add", apply("mul", a, d), apply("mul", b, c)),
        )


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
    """One node, or with n = n1 · n2 transforms of the n1 elements that are n2 apart, then of n2.

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
    first = replace(
        transform,
        ranges=(*transform.ranges, as_expr(n2)),
        length=n1,
        element=lambda rows, j1: transform.element(rows[:-1], j1 * n2 + rows[-1]),
        index=lambda rows, k1: (*rows[:-1], k1, rows[-1]),
        scale=1.0,
        factor=None,
        mirror=None,
        is_half=False,
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
    zero = const(0.0, F32)

    def element(rows: Rows, j: Expr) -> Complex:
        number = transform.element(rows, j) * chirp.at(j)
        assert number.imaginary is not None
        inside = apply("lt", Index(j), const(n, I64))
        return Complex(masked(inside, number.real, zero), masked(inside, number.imaginary, zero))

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
