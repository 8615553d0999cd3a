"""Indices from data: converted, wrapped, and checked unless they are in range whatever the data is.

PyTorch's CPU kernels raise for an index out of range. A kernel here reports it (`Checked`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import dtypes
from ..dtypes import Kind
from ..errors import IndexCheck
from ..ir.folding import fold
from ..ir.nodes import Pointwise, Reduction, outputs_of
from ..ir.scalar import Checked, Const, Index, Load, Op, Scalar, cast, where
from ..ir.spaces import Node
from ..symbolic.sizes import (
    INT32,
    Expr,
    as_expr,
    computed_parts,
    is_less,
    is_nonnegative,
    is_within,
    product,
)
from .builder import Builder

# Indices are seldom made by more nodes than these, one after another.
_DEEPEST = 4


def data_index(
    builder: Builder, given: Scalar, size: Expr, dim: int | None, *, wrap: bool = False
) -> Scalar:
    """A checked index from data as int64; with ``wrap`` a negative one counts from the end.

    Args:
        dim: the dimension that errors name, of ``size`` elements; None for all elements.
    """
    known = Ranges(builder.nodes)
    position = fold(cast(given, dtypes.int64))
    if known.is_at_least_zero(position):
        if known.is_below(position, size):
            return position
    elif wrap:
        position = _wrapped(position, size)
    check = IndexCheck(builder.origin.op, builder.origin.source, dim)
    return Checked(position, given, Index(size), check)


def data_position(given: Scalar, size: Expr) -> Scalar:
    """An index from data that is known to be in range, after a negative one has wrapped."""
    position = fold(cast(given, dtypes.int64))
    if isinstance(position, Index) and is_nonnegative(position.expr):
        return position
    return _wrapped(position, size)


def _wrapped(position: Scalar, size: Expr) -> Scalar:
    return fold(where(position < 0, position + Index(size), position))


class Ranges:
    """Proves bounds of integer scalars that hold whatever the data is.

    Loads of buffers that nodes have stored are followed to the nodes' bodies.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._depth = 0

    def is_at_least_zero(self, value: Scalar) -> bool:
        """Whether an integer scalar is proven to be ≥ 0."""
        match value:
            case Const(number):
                return number >= 0
            case Index(expr):
                return is_nonnegative(expr)
            case Op("minimum", args):
                return all(map(self.is_at_least_zero, args))
            case Op("maximum" | "bitwise_and", args):
                return any(map(self.is_at_least_zero, args))
            case Op("where", (_, *choices)):
                return all(map(self.is_at_least_zero, choices))
            case Op("remainder", (_, divisor)):
                return self.is_at_least_zero(divisor)
            case Op("cast", (inner,)) if _widens(inner, value):
                unsigned = inner.dtype.kind in (Kind.UNSIGNED, Kind.BOOL)
                return unsigned or self.is_at_least_zero(inner)
            case Load(buffer):
                return self._holds_of(buffer, self.is_at_least_zero, lambda count: True)
        return False

    def is_below(self, value: Scalar, size: Expr) -> bool:
        """Whether an integer scalar is proven to be < size."""
        match value:
            case Const(number):
                return is_less(as_expr(int(number)), size)
            case Index(expr):
                return _is_address(expr) and is_less(expr, size)
            case Op("minimum", args):
                return any(self.is_below(a, size) for a in args)
            case Op("maximum", args):
                return all(self.is_below(a, size) for a in args)
            case Op("where", (_, *choices)):
                return all(self.is_below(c, size) for c in choices)
            case Op("bitwise_and", args):
                return any(self.is_at_least_zero(a) and self.is_below(a, size) for a in args)
            case Op("remainder", (_, divisor)):
                by = _expr(divisor)
                return by is not None and is_nonnegative(by - 1) and is_nonnegative(size - by)
            case Op("cast", (inner,)) if _widens(inner, value):
                bits = {Kind.BOOL: 1, Kind.UNSIGNED: inner.dtype.bits}.get(inner.dtype.kind)
                fits = bits is not None and is_nonnegative(size - (1 << bits))
                return fits or self.is_below(inner, size)
            case Load(buffer):
                return self._holds_of(
                    buffer,
                    lambda body: self.is_below(body, size),
                    lambda count: is_nonnegative(size - count),
                )
        return False

    def _holds_of(
        self, buffer: str, of_body: Callable[[Scalar], bool], of_position: Callable[[Expr], bool]
    ) -> bool:
        """Whether something holds for what a node stores.

        Args:
            of_body: whether it holds for a body.
            of_position: whether it holds for a position among so many.
        """
        if self._depth == _DEEPEST:
            return False
        node = next((node for node in self._nodes if buffer in outputs_of(node)), None)
        self._depth += 1
        try:
            match node:
                case Pointwise():
                    return of_body(node.body)
                case Reduction(kind="argmin" | "argmax"):
                    return of_position(product(node.reduce_ranges))
                case Reduction(kind="minimum" | "maximum"):
                    return of_body(node.body)
        finally:
            self._depth -= 1
        return False


def _is_address(expr: Expr) -> bool:
    """Whether 32 bits hold all that is divided for ``expr``, as kernels compute addresses.

    Another is a number of the user's, such as (i · 2³³) % 13: as the position of a `Checked`
    it is computed in the bits that it needs.
    """
    return all(is_within(part, INT32) for part in computed_parts(expr)[1:])


def _widens(inner: Scalar, outer: Scalar) -> bool:
    """Whether a conversion between integers keeps every value."""
    if inner.dtype.kind is Kind.BOOL:
        return True
    return inner.dtype.is_integer and inner.dtype.bits <= outer.dtype.bits


def _expr(value: Scalar) -> Expr | None:
    if isinstance(value, Index):
        return value.expr
    return as_expr(int(value.value)) if isinstance(value, Const) else None
