"""The most frequent value of a row. Source: ATen ``mode``."""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const
from .builder import Builder, extreme
from .reductions import Reducing
from .registry import NotLowered, lowers
from .searching import order_key
from .sorting import LONGEST_ROW
from .value import Value, broadcast_index, positions

aten = torch.ops.aten


def _same(a: Scalar, b: Scalar) -> Scalar:
    """Whether two values are equal, as one NaN is to another."""
    equal = apply("eq", a, b)
    if not a.dtype.is_float:
        return equal
    both = apply("bitwise_and", apply("isnan", a), apply("isnan", b))
    return apply("bitwise_or", equal, both)


@lowers(aten.mode.default)
def lower_mode(
    builder: Builder, self: Value, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value]:
    """(the smallest of the most frequent values, where it is last)."""
    if not self.rank:
        return self, Value(dtypes.int64, (), const(0, dtypes.int64))
    dim %= self.rank
    size = self.sizes[dim]
    if self.is_empty or not (size.is_constant and size.constant <= LONGEST_ROW):
        raise NotLowered(f"the mode of {size} elements: at most {LONGEST_ROW} here")
    here = list(positions(self.sizes))
    (r,) = positions((size,), "r")
    there = [*here[:dim], r, *here[dim + 1 :]]
    hits = cast(_same(order_key(self.body), order_key(self.at(there))), dtypes.int32)
    counts = builder.reduce("sum", hits, self.sizes, (size,), name="counts")
    split = Reducing(self, [dim])
    most = split.reduce(builder, "maximum", split.body(counts), keepdim=True, name="most")
    key = order_key(split.body())
    at_most = most.at(broadcast_index(most, split.index()))
    frequent = apply("eq", split.body(counts), at_most)
    highest = const(extreme(key.dtype, lowest=False), key.dtype)
    chosen = apply("where", frequent, key, highest)
    value = split.reduce(builder, "minimum", chosen, keepdim=True, name="value")
    at_value = value.at(broadcast_index(value, split.index()))
    place = apply("where", _same(key, at_value), Index(r), const(0, dtypes.int64))
    index = split.reduce(builder, "maximum", place, keepdim=keepdim, name="index")
    if not keepdim:
        sizes = split.sizes
        at = [*positions(sizes)[:dim], positions((value.sizes[dim],))[0], *positions(sizes)[dim:]]
        value = Value(value.dtype, sizes, value.at(at))
    return builder.pointwise(cast(value.body, self.dtype), value.sizes), index
