"""Index arithmetic that a graph writes as tensor operators becomes index expressions again.

PyTorch computes positions with tensors (``arange``, ``%``, ``where``); as `Index` expressions their
ranges are known, comparisons of them can be decided, and gathers by them are views.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dtypes
from ..dtypes import DType
from ..ir.numeric import numpy_dtype, scalar_op
from ..ir.scalar import (
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

_INT32_MAX = (1 << 31) - 1


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
    match node:
        case Op(name, args, dtype) if name != "cast" and all(isinstance(a, Const) for a in args):
            return _fold_constants(name, args, dtype)
        case Masked(Const(value), body, other):
            return body if value else other
        case Op("where", (Const(value), yes, no)):
            return yes if value else no
        case Op("cast", (inner,), dtype):
            return _fold_cast(inner, dtype)
        case Op("bitwise_and" | "bitwise_or", (a, b), dtypes.bool_):
            return _fold_logic(node.name, a, b)
        case Op(name, (a, b)):
            left, right = _expr(a), _expr(b)
            if left is None or right is None:
                return None
            return _fold_pair(name, left, right)
        case Op("neg", (a,)):
            inner_expr = _expr(a)
            return None if inner_expr is None else _index(-inner_expr)
    return None


def _fold_constants(name: str, args: tuple[Scalar, ...], dtype: DType) -> Scalar | None:
    if name == "bitcast":
        return None
    with np.errstate(all="ignore"):
        values = [np.asarray(a.value, numpy_dtype(a.dtype)) for a in args if isinstance(a, Const)]
        return const(scalar_op(name, values, dtype).item(), dtype)


def _expr(value: Scalar) -> Expr | None:
    """The index expression that an int64 scalar is, where int64 holds all its values."""
    if isinstance(value, Index):
        return value.expr if is_within(value.expr, INT64) else None
    if isinstance(value, Const) and value.dtype is dtypes.int64:
        return as_expr(int(value.value))
    return None


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


def _fold_logic(name: str, a: Scalar, b: Scalar) -> Scalar | None:
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
        case "lt" | "ge":
            return _decided(is_less(a, b), not_less(a, b), name == "lt")
        case "gt" | "le":
            return _decided(is_less(b, a), not_less(b, a), name == "gt")
        case "eq" | "ne":
            equal, unequal = a is b, is_less(a, b) or is_less(b, a)
            return _decided(equal, unequal, name == "eq")
    return None


def not_less(a: Expr, b: Expr) -> bool:
    """Whether a ≥ b is proven."""
    return is_nonnegative(a - b)


def _decided(holds: bool, fails: bool, positive: bool) -> Scalar | None:
    if holds or fails:
        return const(holds == positive, dtypes.bool_)
    return None
