"""Sizes, strides and indices of tensors as exact expressions (see `expressions`).

>>> i = iteration("i0", 24)
>>> delinearize(i, (as_expr(4), as_expr(6)))
(i0//6, i0%6)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import isqrt

from .expressions import (
    ONE,
    ZERO,
    Atom,
    Expr,
    FloorDiv,
    IntLike,
    Mod,
    Monomial,
    Symbol,
    SymbolicError,
    as_expr,
    atom_expr,
    bound,
    floordiv,
    is_less,
    is_nonnegative,
    mod,
    substitute,
    symbols_of,
)

# Of `expressions`, what is imported from here.
__all__ = [
    "ONE",
    "ZERO",
    "Atom",
    "Expr",
    "FloorDiv",
    "IntLike",
    "Mod",
    "Monomial",
    "Symbol",
    "SymbolicError",
    "as_expr",
    "atom_expr",
    "bound",
    "floordiv",
    "is_less",
    "is_nonnegative",
    "mod",
    "substitute",
    "symbols_of",
]


def symbol(name: str, lower: int = 0, most: int | None = None, usual: int | None = None) -> Expr:
    """A size symbol: an integer in [lower, most], and usually of the magnitude of ``usual``."""
    return atom_expr(Symbol(name, lower, None, most, usual))


@lru_cache(maxsize=1 << 13)
def iteration(name: str, extent: IntLike) -> Expr:
    """An iteration symbol: 0 ≤ name < extent."""
    return atom_expr(Symbol(name, 0, as_expr(extent), None, None))


def as_symbol(expr: Expr) -> Symbol | None:
    """The symbol that ``expr`` is, if it is just one."""
    if expr.constant == 0 and len(expr.terms) == 1:
        monomial, coefficient = expr.terms[0]
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            return monomial[0]
    return None


def ceildiv(a: IntLike, b: IntLike) -> Expr:
    """⌈a / b⌉ for b > 0."""
    b = as_expr(b)
    return floordiv(as_expr(a) + (b - 1), b)


# Sizes and their differences are smaller than this: divided by it, they give -1 below 0, else 0.
_BEYOND = (1 << 31) - 1


def minimum(a: IntLike, b: IntLike) -> Expr:
    """The smaller of two expressions between -2³⁰ and 2³⁰, as one without a choice."""
    a, b = as_expr(a), as_expr(b)
    if is_less(a, b + 1):
        return a
    if is_less(b, a + 1):
        return b
    # Minus the difference where it is negative.
    return b - (a - b) * floordiv(a - b, as_expr(_BEYOND))


def maximum(a: IntLike, b: IntLike) -> Expr:
    """The larger of two sizes, under the conditions of `minimum`."""
    return as_expr(a) + b - minimum(a, b)


def from_start(index: IntLike, size: IntLike) -> Expr:
    """A Python index, counted from the end where it is negative; both smaller than 2³¹ − 1."""
    index = as_expr(index)
    if is_nonnegative(index):
        return index
    return index - as_expr(size) * floordiv(index, as_expr(_BEYOND))


def upper_bound(expr: Expr) -> int | None:
    """The largest value that ``expr`` can take, when it is known as a number."""
    high = bound(expr, True)
    if high is None or high.is_constant or any(s.most is None for s in symbols_of(high)):
        return high.constant if high is not None and high.is_constant else None
    return value_range(high)[-1]


_TYPICAL = 64  # of a size of which nothing is known


def typical(size: Expr) -> int:
    """A typical value of a size, to weigh costs: itself, or one within its class.

    Sizes of a call are symbols in [lower, most] (`size_classes`): what is decided by this number
    is the same for all calls that a kernel may serve, and about right for each. Those of a graph
    without ranges are usually in the class of the size that it was traced with.
    """
    if size.is_constant:
        return size.constant
    return evaluate(size, {s.name: _typical_of(s) for s in symbols_of(size)})


def magnitude(size: Expr) -> int | None:
    """`typical` of a size that is known, within a class or usually so; else None."""
    unknown = any(s.most is None and s.usual is None for s in symbols_of(size))
    return None if unknown else typical(size)


def magnitudes(*sizes: Expr) -> tuple[int, ...] | None:
    """`magnitude` of several; None where one is not known."""
    found = [number for number in map(magnitude, sizes) if number is not None]
    return tuple(found) if len(found) == len(sizes) else None


def _typical_of(symbol: Symbol) -> int:
    if symbol.most is None:
        return _TYPICAL if symbol.usual is None else symbol.usual
    return middle(symbol.lower, symbol.most)


def middle(lower: int, most: int) -> int:
    """The number in [lower, most] from which both ends differ by about the same factor."""
    return isqrt(max(1, lower) * (most + 1))


INT32 = range(-(1 << 31), 1 << 31)
INT64 = range(-(1 << 63), 1 << 63)
LARGEST_SIZE = INT32[-1]
"""Kernels get sizes as 32-bit parameters; a runtime refuses larger ones."""


@lru_cache(maxsize=1 << 16)
def value_range(expr: Expr, largest: int = LARGEST_SIZE) -> range:
    """A range of integers that holds all values of ``expr``, for sizes of at most ``largest``.

    A size symbol that may be negative is any int64: it is a number of the caller's, not a size.
    """
    low = high = expr.constant
    for monomial, coefficient in expr.terms:
        ends = (coefficient, coefficient)
        for atom in monomial:
            of_atom = _atom_range(atom, largest)
            corners = [a * b for a in ends for b in (of_atom[0], of_atom[-1])]
            ends = (min(corners), max(corners))
        low, high = low + ends[0], high + ends[1]
    return range(low, high + 1)


def _atom_range(atom: Atom, largest: int) -> range:
    if isinstance(atom, Symbol):
        if atom.extent is not None:
            return range(atom.lower, max(atom.lower, value_range(atom.extent, largest)[-1] - 1) + 1)
        if atom.lower < 0:
            return INT64
        most = largest if atom.most is None else min(largest, atom.most)
        return range(atom.lower, max(atom.lower, most) + 1)
    numerator = value_range(atom.numerator, largest)
    denominator = value_range(atom.denominator, largest)
    divisors = (max(1, denominator[0]), max(1, denominator[-1]))
    if isinstance(atom, FloorDiv):
        corners = [a // b for a in (numerator[0], numerator[-1]) for b in divisors]
        return range(min(corners), max(corners) + 1)
    last = divisors[-1] - 1
    return range(min(last, numerator[-1]) + 1 if numerator[0] >= 0 else last + 1)


def is_within(expr: Expr, limits: range, largest: int = LARGEST_SIZE) -> bool:
    """Whether all values of ``expr`` lie in ``limits``, for sizes of at most ``largest``."""
    found = value_range(expr, largest)
    return limits[0] <= found[0] and found[-1] <= limits[-1]


def computed_parts(expr: Expr) -> list[Expr]:
    """``expr``, and all that a kernel divides or divides by for it."""
    found = [expr]
    for monomial, _ in expr.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                continue
            if any(s.extent is not None for s in symbols_of(atom_expr(atom))):
                found += computed_parts(atom.numerator) + computed_parts(atom.denominator)
    return found


def evaluate(expr: Expr, values: Mapping[str, int]) -> int:
    """The value of ``expr`` with every symbol given by name."""
    total = expr.constant
    for monomial, coefficient in expr.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                coefficient *= values[atom.name]
            else:
                a, b = evaluate(atom.numerator, values), evaluate(atom.denominator, values)
                coefficient *= a // b if isinstance(atom, FloorDiv) else a % b
        total += coefficient
    return total


def product(factors: Iterable[IntLike]) -> Expr:
    """The product of all factors; 1 for none."""
    total = ONE
    for factor in factors:
        total = total * factor
    return total


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements may be at one place; False only if none are, as NumPy's bounds."""
    length = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride < length:
                return True
            length += stride * (size - 1)
    return False


def storage_span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one in memory; 0 for an empty tensor."""
    if 0 in sizes:
        return 0
    return 1 + sum([(n - 1) * s for n, s in zip(sizes, strides, strict=True)])


def are_alike(sizes: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides are the same where they matter: not of sizes of 1, or without elements."""
    pairs = zip(sizes, one, other, strict=True)
    return one == other or 0 in sizes or all(n == 1 or a == b for n, a, b in pairs)


def contiguous_strides(sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """Row-major strides, in elements."""
    strides: list[Expr] = []
    stride = ONE
    for size in reversed(sizes):
        strides.append(stride)
        stride = stride * size
    return tuple(reversed(strides))


def linearize(index: Sequence[Expr], strides: Sequence[Expr]) -> Expr:
    """Σ index · stride."""
    total = ZERO
    for i, stride in zip(index, strides, strict=True):
        total = total + i * stride
    return total


def delinearize(flat: Expr, sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """The row-major index of element number ``flat`` of a tensor of these sizes."""
    index: list[Expr] = []
    strides = contiguous_strides(sizes)
    for k, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        quotient = floordiv(flat, stride) if stride is not ZERO else ZERO
        index.append(ZERO if size is ONE else quotient if k == 0 else mod(quotient, size))
    return tuple(index)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(0, (n - 1).bit_length())
