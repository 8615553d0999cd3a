"""The most frequent value of a row. Source: ATen ``mode``."""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, const, where
from .builder import Builder, masked
from .reductions import Reducing
from .registry import NotLowered, lowers
from .scans import inclusive_scan
from .searching import order_key
from .sorting import sort_along
from .value import Value, broadcast_index, positions, reshape

aten = torch.ops.aten


def _same(a: Scalar, b: Scalar) -> Scalar:
    """Whether two values are equal, as one NaN is to another."""
    equal = apply("eq", a, b)
    if not a.dtype.is_float:
        return equal
    both = apply("isnan", a) & apply("isnan", b)
    return equal | both


@lowers(aten.mode.default)
def lower_mode(
    builder: Builder, self: Value, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value]:
    """(the most frequent value along ``dim``, of several the smallest; the last position of it).

    In sorted rows equal values are neighbours. An element's distance from the first one of its run
    is largest at the end of the longest run, and its place in the row is where the value is last.

    Raises NotLowered: for rows without elements.
    """
    if not self.rank:
        return self, Value(dtypes.int64, (), const(0, dtypes.int64))
    dim %= self.rank
    if self.is_empty:
        raise NotLowered("the mode of nothing")
    values, places = sort_along(builder, self, dim)
    assert places is not None
    index = list(positions(self.sizes))
    at = Index(index[dim])
    previous = values.at([*index[:dim], index[dim] - 1, *index[dim + 1 :]])
    same = _same(order_key(values.body), order_key(previous))
    inside = Index(index[dim] - 1) >= 0
    repeated = masked(inside, same, False)
    start = builder.pointwise(where(repeated, 0, at), self.sizes, name="start")
    first = inclusive_scan(builder, "maximum", start, dim)
    length = builder.pointwise(at - first.body, self.sizes, name="length")
    split = Reducing(self, [dim])
    most = split.reduce(builder, "maximum", split.body(length), keepdim=True, name="most")
    longest = apply("eq", split.body(length), most.at(broadcast_index(most, split.index())))
    place = Index(split.index()[dim])
    ends = where(longest, place, Index(self.sizes[dim]))
    chosen = split.reduce(builder, "minimum", ends, keepdim=True, name="end")
    rows = positions(chosen.sizes)
    end = [*rows[:dim], chosen.body, *rows[dim + 1 :]]
    results = [
        builder.pointwise(found.at(end), chosen.sizes, name="mode") for found in (values, places)
    ]
    sizes = chosen.sizes if keepdim else split.sizes
    value, place_of = (reshape(result, sizes) for result in results)
    return value, place_of
