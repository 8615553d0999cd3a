"""Folding of scalars before a kernel runs: constants, decided choices, index arithmetic.

PyTorch computes positions with tensors (``arange``, ``%``, ``where``). `fold` makes `Index`
expressions of them again: then their ranges are known, comparisons of them can be decided, and
gathers by them are views.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dtypes
from ..dtypes import DType
from ..symbolic.sizes import (
    INT64,
    Expr,
    as_expr,
    computed_parts,
    is_less,
    is_nonnegative,
    is_within,
    upper_bound,
)
from .numeric import convert, numpy_dtype, scalar_op
from .scalar import (
    Const,
    Index,
    Masked,
    Op,
    Scalar,
    apply,
    cast,
    const,
    rewrite,
)

_INT32_MAX = (1 << 31) - 1

# Comparisons, and what they are for two equal numbers.
COMPARISONS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}


def fold(body: Scalar) -> Scalar:
    """``body`` with int64 arithmetic on index values folded and decided conditions resolved."""
    return rewrite(body, _fold)


def narrow(
    body: Scalar, wide: DType, dtype: DType, keep: Callable[[Scalar], bool] = lambda node: False
) -> Scalar:
    """``body`` with all arithmetic in ``wide`` done in ``dtype`` instead, but for what is kept."""

    def change(node: Scalar) -> Scalar | None:
        match node:
            case Const(value, kind) if kind is wide:
                return const(value, dtype)
            case Op("cast", (inner,), kind):
                return cast(inner, dtype if kind is wide else kind)
            case Op(name, args, kind) if kind is wide:
                return apply(name, *args)
        return None

    return rewrite(body, change, keep)


def _fold(node: Scalar) -> Scalar | None:
    found = of_constants(node)
    if found is not None:
        return found
    match node:
        case Op("cast", (inner,), dtype):
            return _fold_cast(inner, dtype)
        case Op("bitwise_and" | "bitwise_or", (a, b), dtypes.bool_):
            return fold_logic(node.name, a, b)
        case Op(name, (a, b)):
            left, right = _expr(a), _expr(b)
            if left is None or right is None:
                return None
            return _fold_pair(name, left, right)
        case Op("neg", (a,)):
            inner_expr = _expr(a)
            return None if inner_expr is None else _index(-inner_expr)
    return None


def of_constants(node: Scalar) -> Scalar | None:
    """An operation on constants, or a choice by a constant, folded; else None."""
    match node:
        case Masked(Const(value), body, other):
            return body if value else other
        case Op("where", (Const(value), chosen, other)):
            return chosen if value else other
        case Op(name, args, dtype) if name != "opaque":
            arrays = [
                np.asarray(a.value, numpy_dtype(a.dtype)) for a in args if isinstance(a, Const)
            ]
            if len(arrays) < len(args):
                return None
            with np.errstate(all="ignore"):
                if name in ("cast", "bitcast"):
                    result = convert(name, arrays[0], args[0].dtype, dtype)
                else:
                    result = scalar_op(name, arrays, dtype)
            return const(result.item(), dtype)
    return None


def simplified(node: Scalar) -> Scalar | None:
    """`of_constants`, and decided comparisons and neutral operations; None for anything else."""
    found = of_constants(node)
    if found is not None:
        return found
    match node:
        case Op("where", (_, chosen, other)) if chosen is other:
            return chosen
        case Op("cast", (Op("cast", (value,)),)) if value.dtype is dtypes.bool_:
            return Op("cast", (value,), node.dtype)
        case Op("cast", (Op("cast", (value,), wide),), dtype) if value.dtype is dtype:
            # To a wider float and back.
            is_nothing = dtype.is_float and wide.is_float and wide.bits >= dtype.bits
            return value if is_nothing else None
        case Op("div", (value, Const(value=1))):
            return value
        case Op(name, (left, right), dtype) if name in COMPARISONS:
            if left is right and not left.dtype.is_float:
                return const(COMPARISONS[name], dtype)
            a, b = as_index(left), as_index(right)
            is_true = None if a is None or b is None else decide(name, a, b)
            return None if is_true is None else const(is_true, dtype)
    return None


def as_index(node: Scalar) -> Expr | None:
    """A scalar that is plain index arithmetic, as an expression."""
    if isinstance(node, Index):
        return node.expr
    if isinstance(node, Const) and node.dtype is dtypes.int64:
        return as_expr(int(node.value))
    return None


def _expr(value: Scalar) -> Expr | None:
    """The index expression that an int64 scalar is, where int64 holds all its values."""
    expr = as_index(value)
    return None if expr is None or not is_within(expr, INT64) else expr


def _index(expr: Expr) -> Scalar | None:
    """An index expression as a scalar; None where an int64 may wrap around, as no `Expr` does.

    Neither may what it divides, or divides by: ⌊⌊a / b⌋ / c⌋ has become ⌊a / (b·c)⌋.
    """
    return Index(expr) if all(is_within(part, INT64) for part in computed_parts(expr)) else None


def _fold_cast(inner: Scalar, dtype: object) -> Scalar | None:
    """int64 → int32 → int64 of values that fit is nothing."""
    if dtype is not dtypes.int64 or not isinstance(inner, Op) or inner.name != "cast":
        return None
    source = _expr(inner.args[0])
    if source is None or inner.dtype is not dtypes.int32 or not is_nonnegative(source):
        return None
    bound = upper_bound(source)
    return Index(source) if bound is not None and bound <= _INT32_MAX else None


def fold_logic(name: str, a: Scalar, b: Scalar) -> Scalar | None:
    """``bitwise_and`` or ``bitwise_or`` of bools, one of which is a constant; else None."""
    for known, other in ((a, b), (b, a)):
        if isinstance(known, Const):
            keeps = bool(known.value) == (name == "bitwise_and")
            return other if keeps else known
    return None


def _fold_pair(name: str, a: Expr, b: Expr) -> Scalar | None:
    positive = is_nonnegative(b - 1)
    match name:
        case "add":
            return _index(a + b)
        case "sub":
            return _index(a - b)
        case "mul":
            return _index(a * b)
        case "floor_divide" if positive:
            return _index(a // b)
        case "remainder" if positive:
            return _index(a % b)
        case "trunc_divide" if positive and is_nonnegative(a):
            return _index(a // b)
        case "fmod" if positive and is_nonnegative(a):
            return _index(a % b)
        case "minimum" | "maximum":
            smaller = a if not is_less(b, a + 1) else b
            known = is_less(a, b + 1) or is_less(b, a + 1)
            larger = b if smaller is a else a
            return _index(smaller if name == "minimum" else larger) if known else None
        case _ if name in COMPARISONS:
            found = decide(name, a, b)
            return None if found is None else const(found, dtypes.bool_)
    return None


def decide(name: str, left: Expr, right: Expr) -> bool | None:
    """The result of a comparison that holds, or fails, for all values of the symbols."""
    if name in ("ge", "le"):
        flipped = decide("lt", left, right) if name == "ge" else decide("lt", right, left)
        return None if flipped is None else not flipped
    if name == "gt":
        return decide("lt", right, left)
    if name == "lt":
        if is_less(left, right):
            return True
        return False if is_nonnegative(left - right) else None
    if left is right:
        return name == "eq"
    apart = is_less(left, right) or is_less(right, left)
    return (name == "ne") if apart else None
