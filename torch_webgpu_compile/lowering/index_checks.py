"""Indices from data: converted, wrapped, and checked unless they are in range whatever the data is.

PyTorch's CPU kernels raise for an index out of range. A kernel here reports it (`Checked`).
"""

from __future__ import annotations

from .. import dtypes
from ..checks import IndexCheck
from ..dtypes import Kind
from ..ir.scalar import Checked, Const, Index, Op, Scalar, apply, cast, const
from ..sizes import Expr, as_expr, is_less, is_nonnegative
from .builder import Builder
from .folding import fold


def data_index(
    builder: Builder, given: Scalar, size: Expr, dim: int | None, *, wrap: bool = False
) -> Scalar:
    """A checked index from data as int64; with ``wrap`` a negative one counts from the end.

    Args:
        dim: the dimension that errors name, of ``size`` elements; None for all elements.
    """
    position = data_position(given, size, wrap=wrap)
    if is_at_least_zero(position) and is_below(position, size):
        return position
    check = IndexCheck(builder.origin.op, builder.origin.source, dim)
    return Checked(position, given, Index(size), check)


def data_position(given: Scalar, size: Expr, *, wrap: bool = False) -> Scalar:
    """An index from data that is known to be in range, after wrapping."""
    position = fold(cast(given, dtypes.int64))
    if not wrap or is_at_least_zero(position):
        return position
    moved = apply("add", position, Index(size))
    return fold(apply("where", apply("lt", position, const(0, dtypes.int64)), moved, position))


def is_at_least_zero(value: Scalar) -> bool:
    """Whether an integer is ≥ 0 whatever is loaded."""
    match value:
        case Const(number):
            return number >= 0
        case Index(expr):
            return is_nonnegative(expr)
        case Op("minimum", args):
            return all(map(is_at_least_zero, args))
        case Op("maximum" | "bitwise_and", args):
            return any(map(is_at_least_zero, args))
        case Op("where", (_, *choices)):
            return all(map(is_at_least_zero, choices))
        case Op("remainder", (_, divisor)):
            return is_at_least_zero(divisor)
        case Op("cast", (inner,)) if _widens(inner, value):
            return inner.dtype.kind in (Kind.UNSIGNED, Kind.BOOL) or is_at_least_zero(inner)
    return False


def is_below(value: Scalar, size: Expr) -> bool:
    """Whether an integer is < size whatever is loaded."""
    match value:
        case Const(number):
            return is_less(as_expr(int(number)), size)
        case Index(expr):
            return is_less(expr, size)
        case Op("minimum", args):
            return any(is_below(a, size) for a in args)
        case Op("maximum", args):
            return all(is_below(a, size) for a in args)
        case Op("where", (_, *choices)):
            return all(is_below(c, size) for c in choices)
        case Op("bitwise_and", args):
            return any(is_at_least_zero(a) and is_below(a, size) for a in args)
        case Op("remainder", (_, divisor)):
            divided = _expr(divisor)
            known = divided is not None and is_nonnegative(divided - 1)
            return known and divided is not None and is_nonnegative(size - divided)
        case Op("cast", (inner,)) if _widens(inner, value):
            if inner.dtype.kind in (Kind.UNSIGNED, Kind.BOOL):
                bits = 1 if inner.dtype.kind is Kind.BOOL else inner.dtype.bits
                if is_nonnegative(size - (1 << bits)):
                    return True
            return is_below(inner, size)
    return False


def _widens(inner: Scalar, outer: Scalar) -> bool:
    """Whether a conversion between integers keeps every value."""
    if inner.dtype.kind is Kind.BOOL:
        return True
    return inner.dtype.is_integer and inner.dtype.bits <= outer.dtype.bits


def _expr(value: Scalar) -> Expr | None:
    if isinstance(value, Index):
        return value.expr
    return as_expr(int(value.value)) if isinstance(value, Const) else None
